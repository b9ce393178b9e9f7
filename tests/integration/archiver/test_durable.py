"""Law 5 at the archiver, on a real Valkey: durable before acknowledged."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import redis

from lorabridge.bridge.errors import DiskFull, LedgerError
from lorabridge.bridge.ledger import archiver as archiver_module
from lorabridge.bridge.ledger.commits import read_log
from lorabridge.bridge.ledger.lease import Lease
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.embedded import embedded_valkey
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.stream.trim import EntryId
from tests.archives import (
    acknowledged,
    assert_holds,
    drain,
    finish_all,
    forget_lease,
    ids_in,
    make_archiver,
    send_all,
)


def test_everything_sent_is_in_the_ledger_and_acknowledged(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    ids = send_all(client, keys, range(3))
    drain(make_archiver(client, keys, ledger))
    assert_holds(ledger, range(3))
    assert str(acknowledged(client, keys.trajectories)) == ids[-1]
    drain(make_archiver(client, keys, ledger))
    assert len(read_log(ledger).commits) == 1, "nothing new is no commit"
    send_all(client, keys, range(3, 5))
    drain(make_archiver(client, keys, ledger, entries=2))
    assert len(read_log(ledger).commits) > 2
    assert_holds(ledger, range(5))


class Killed(BaseException):
    """Stands for kill -9: nothing that the archiver does on an error is done."""


class Crashing:
    """Dies at the n-th of the points before and after each thing that the archiver does to the world."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        for owner, name in [
            (archiver_module, "write_file"), (archiver_module, "append"), (Lease, "acknowledge"), (Lease, "trim"),
        ]:  # fmt: skip
            monkeypatch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def crashing(*args: Any, **named: Any) -> Any:
            self._point()
            answer = act(*args, **named)
            self._point()
            return answer

        return crashing

    def _point(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


def test_a_crash_at_any_point_leaves_no_gap_and_no_double(client: redis.Redis, tmp_path: Path) -> None:
    """Every point, one after the other, each on a run of its own; until the archiver comes through alive."""
    for at in itertools.count():
        keys, ledger = Keys(f"run{at}"), tmp_path / str(at)
        send_all(client, keys, range(2))
        drain(make_archiver(client, keys, ledger))
        send_all(client, keys, range(2, 4))
        finish_all(client, keys)
        with pytest.MonkeyPatch.context() as patch:
            crash = Crashing(patch, at)
            try:
                drain(make_archiver(client, keys, ledger))
            except Killed:
                pass
        log = read_log(ledger)
        for stream, key in keys.streams.items():
            assert acknowledged(client, key) <= log.cursor(stream), "acknowledged before it was on disk"
        forget_lease(client, keys)
        send_all(client, keys, range(4, 5))
        drain(make_archiver(client, keys, ledger))
        assert_holds(ledger, range(5))
        if crash.left > 0:
            break
    assert at > 30, "the points were not where they should be"


_PROGRAM = """
import os, signal, sys
from pathlib import Path
from lorabridge.bridge.errors import BridgeError
from lorabridge.bridge.ledger import archiver, commands
from lorabridge.bridge.ledger.lease import Lease

def die(*args, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def dying_after(act):
    return lambda *args, **named: (act(*args, **named), die())

config, at = Path(sys.argv[1]), sys.argv[2]
if at == "before the commit":
    archiver.append = die
elif at == "after the commit":
    archiver.append = dying_after(archiver.append)
elif at == "before trimming":
    commit, archiver.append = archiver.append, lambda *args: setattr(Lease, "trim", die) or commit(*args)
elif at == "disk full":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    commands.archiver(config)
except BridgeError as error:
    print(error.diagnostics(), file=sys.stderr)
    sys.exit(error.exit_code)
"""


def write_config(folder: Path, section: RedisSection, flush_s: float, outage_s: float = 10) -> Path:
    file = folder / "config.toml"
    file.write_text(
        f'[run]\ndir = "{folder}"\n[ledger]\nflush_s = {flush_s}\n[redis]\nurl = "{section.url}"\n'
        f'password_file = "{section.password_file}"\noutage_s = {outage_s}\nconnect_s = 5\n'
    )
    return file


def start(config: Path, at: str = "") -> subprocess.Popen[str]:
    """A real archiver in a process of its own, that dies where it is told."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _PROGRAM, str(config), at], stderr=subprocess.PIPE, text=True
    )


def wait_for(stream: IO[str] | None, words: str) -> None:
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        if words in line:
            return
    pytest.fail(f"it ended without saying {words!r}: {''.join(seen)}")


def stop(process: subprocess.Popen[str]) -> str:
    """Ask it to end, as a supervisor does; what it said. It must do so with 0."""
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize("at", ["before the commit", "after the commit", "before trimming"])
def test_kill_9_and_a_restart_leave_no_gap_and_no_double(
    client: redis.Redis, server: RedisSection, keys: Keys, ledger: Path, tmp_path: Path, at: str
) -> None:
    config = write_config(tmp_path, server, flush_s=0.2)
    ids = send_all(client, keys, range(3))
    finish_all(client, keys)
    killed = start(config, at)
    _, said = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, said
    assert ids_in(client, keys.trajectories) == ids, "trimmed what was not acknowledged"
    if at == "before the commit":
        assert list(ledger.glob("trajectories/*.parquet")), "it was to die after it wrote"
        assert read_log(ledger).commits == []
    if at != "before trimming":
        assert acknowledged(client, keys.trajectories) == EntryId(0, 0)
    forget_lease(client, keys)
    again = start(config)
    wait_for(again.stderr, "continues")
    send_all(client, keys, range(3, 4))
    stop(again)
    assert_holds(ledger, range(4))


def test_sigterm_ends_with_a_last_commit(
    client: redis.Redis, server: RedisSection, keys: Keys, ledger: Path, tmp_path: Path
) -> None:
    process = start(write_config(tmp_path, server, flush_s=3600))
    wait_for(process.stderr, "continues")
    send_all(client, keys, range(3))
    assert "commit 1: 3 events, 3 manifests, 6 trajectories" in stop(process)
    assert_holds(ledger, range(3))
    assert client.get(keys.archiver) is None, "the next one need not wait"


def test_a_full_disk_is_an_error_and_nothing_is_acknowledged(
    client: redis.Redis, server: RedisSection, keys: Keys, ledger: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, server, flush_s=0.2)
    ids = send_all(client, keys, range(40))
    finish_all(client, keys)
    process = start(config, "disk full")
    _, said = process.communicate()
    assert (process.returncode, "no room left" in said) == (DiskFull.exit_code, True), said
    assert acknowledged(client, keys.trajectories) == EntryId(0, 0)
    assert ids_in(client, keys.trajectories) == ids
    assert [file for file in ledger.rglob("*") if file.is_file()] == [], "nothing half-written stays"
    again = start(config)
    wait_for(again.stderr, "continues")
    stop(again)
    assert_holds(ledger, range(40))


def test_a_server_that_goes_away_is_an_error_and_nothing_is_lost(keys: Keys, ledger: Path, tmp_path: Path) -> None:
    with embedded_valkey(tmp_path / "valkey") as section:
        client = connect(section)
        send_all(client, keys, range(3))
        process = start(write_config(tmp_path, section, flush_s=3600, outage_s=0.5))
        wait_for(process.stderr, "continues")
        client.close()
    _, said = process.communicate()
    assert (process.returncode, "does not answer" in said) == (3, True), said
    with embedded_valkey(tmp_path / "valkey") as section:
        client = connect(section)
        assert acknowledged(client, keys.trajectories) == EntryId(0, 0)
        forget_lease(client, keys)
        send_all(client, keys, range(3, 4))
        drain(make_archiver(client, keys, ledger))
        client.close()
    assert_holds(ledger, range(4))


def test_a_server_that_lost_its_memory_is_gone_on_from(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    send_all(client, keys, range(3))
    archiver = make_archiver(client, keys, ledger)
    done = iter([False, False, True])

    def lose_it_once() -> bool:
        if archiver._lease.number and not read_log(ledger).commits:
            archiver._flush(archiver._gather(lambda: True))
            client.flushall()
            send_all(client, keys, range(3, 5))
        return next(done, True)

    archiver.run(lose_it_once)
    assert_holds(ledger, range(5))
    assert str(acknowledged(client, keys.trajectories)) == ids_in(client, keys.trajectories)[-1]


@pytest.mark.parametrize("remove", ["trim", "delete"])
def test_entries_that_left_before_they_were_archived_are_an_error(
    client: redis.Redis, keys: Keys, ledger: Path, remove: str
) -> None:
    send_all(client, keys, range(2))
    drain(make_archiver(client, keys, ledger))
    ids = send_all(client, keys, range(2, 6))
    if remove == "trim":
        client.xtrim(keys.trajectories, minid=ids[2], approximate=False)
    else:
        client.xdel(keys.trajectories, ids[1])
    with pytest.raises(LedgerError, match="left the stream trajectories") as caught:
        drain(make_archiver(client, keys, ledger))
    assert "[ledger] dir" in caught.value.action
    assert len(read_log(ledger).commits) == 1


def test_entries_that_leave_between_reading_and_committing_are_an_error(
    client: redis.Redis, keys: Keys, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone else trims while the archiver runs; it reads what is after the gap, and must not commit it."""
    send_all(client, keys, range(2))
    archiver = make_archiver(client, keys, ledger)
    gather = archiver._gather

    def gather_after_a_trim(stop: Callable[[], bool]) -> Any:
        ids = send_all(client, keys, range(2, 12))
        client.xtrim(keys.trajectories, minid=ids[4], approximate=False)
        return gather(stop)

    monkeypatch.setattr(archiver, "_gather", gather_after_a_trim)
    with pytest.raises(LedgerError, match="left the stream trajectories"):
        drain(archiver)
    assert read_log(ledger).commits == []
