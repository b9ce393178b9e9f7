"""The archiver on a real Valkey: laws 5 and 6, and one archiver at a time."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import pyarrow.parquet as pq
import pytest
import redis

from lorabridge.bridge import codec
from lorabridge.bridge.errors import DiskFull, LedgerCorrupt, LedgerError, LedgerTaken
from lorabridge.bridge.events import Event, Quarantine
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.ledger import archiver as archiver_module
from lorabridge.bridge.ledger.archiver import Archiver
from lorabridge.bridge.ledger.commits import Commit, check_file, read_log
from lorabridge.bridge.ledger.lease import Lease
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.settings import RedisSection
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.embedded import embedded_valkey
from lorabridge.bridge.stream.groups import GroupReader
from lorabridge.bridge.stream.keys import BODY, LEDGER_GROUP, TRAINER_GROUP, Keys
from lorabridge.bridge.stream.trim import EntryId
from lorabridge.bridge.trajectory import Group, Sampling, Span, Trajectory, Turn

LEASE_S = 60.0  # nothing here waits for one to run out, except where a test says so


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSection]:
    with embedded_valkey(tmp_path_factory.mktemp("valkey")) as section:
        yield section


@pytest.fixture
def client(server: RedisSection) -> Iterator[redis.Redis]:
    client = connect(server)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def keys() -> Keys:
    return Keys("run")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def make_group(number: int) -> Group:
    span = Span(policy="policy", version=1, digest="sha256:d", epoch=1, start=0, end=2, kv="fresh")
    turn = Turn(
        prompt_ids=(1, 2), token_ids=(3, 4), logprobs=(-0.25, -1.5), mask=(1, 1), spans=(span,), finish_reason="stop"
    )
    return Group(
        group=number,
        attempt=1,
        worker="w",
        trajectories=tuple(
            Trajectory(
                run="run", policy="policy", group=number, attempt=1, index=index, environment="e", prompt="p", base="b",
                turns=(turn,), sampling=Sampling(), seed=1, logprobs_mode="processed_logprobs", dtype="float32",
                generator="g", instance="i", reward=1.0, rewards={"exact": 1.0}, advantage=0.0, times_ms={"sampled": 1},
            )
            for index in range(2)
        ),
    )  # fmt: skip


def make_manifest(version: int) -> Manifest:
    base = Fingerprint(checkpoint="c", tokenizer="t", template="m")
    return Manifest(
        policy="policy", version=version, digest=f"sha256:{version}", parent=None, base=base, rank=1, targets=("q",),
        dtype="F32", step=version, epoch=1, run="run", created_ms=1, size=1,
    )  # fmt: skip


def send(client: redis.Redis, stream: str, record: codec.Record) -> str:
    """The entry's id."""
    return cast(bytes, client.xadd(stream, {BODY: codec.encode(record)})).decode()


def send_all(client: redis.Redis, keys: Keys, numbers: range) -> list[str]:
    """A group, a version and an event for each number; ids of the groups' entries."""
    for number in numbers:
        send(client, keys.announce, make_manifest(number + 1))
        happening = Quarantine(subject=str(number), reason="r")
        send(client, keys.events, Event(source="s", at_ms=number, happening=happening))
    return [send(client, keys.trajectories, make_group(number)) for number in numbers]


def make_archiver(
    client: redis.Redis, keys: Keys, ledger: Path, lease_s: float = LEASE_S, entries: int = 512, listen_s: float = 0
) -> Archiver:
    return Archiver(client, keys, ledger, flush_entries=entries, flush_s=60, lease_s=lease_s, listen_s=listen_s)


def drain(archiver: Archiver) -> None:
    """Archive what is there, and stop."""
    archiver.run(lambda: archiver._lease.number > 0)


def forget_lease(client: redis.Redis, keys: Keys) -> None:
    """As if the time of a dead archiver's lease were over."""
    client.delete(keys.archiver)


def raw_rows(ledger: Path, table: str, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """What the committed files hold, before the reader drops what was sent twice."""
    rows = []
    for file in read_log(ledger).files:
        check_file(ledger, file)
        if file.table == table:
            rows += [tuple(row[column] for column in columns) for row in pq.read_table(ledger / file.path).to_pylist()]
    return rows


def assert_holds(ledger: Path, numbers: range) -> None:
    """No gap and no double, in any table."""
    expected = [(f"run/{number}.1/{index}",) for number in numbers for index in range(2)]
    assert raw_rows(ledger, "trajectories", ("id",)) == expected
    assert raw_rows(ledger, "manifests", ("version",)) == [(number + 1,) for number in numbers]
    assert raw_rows(ledger, "events", ("subject",)) == [(str(number),) for number in numbers]
    assert [trajectory for number in numbers for trajectory in make_group(number).trajectories] == list(
        Ledger(ledger).trajectories()
    )


def acknowledged(client: redis.Redis, stream: str) -> EntryId:
    """Last id that the ledger's group says it has."""
    groups = client.xinfo_groups(stream)
    return next(
        (EntryId.parse(group["last-delivered-id"].decode()) for group in groups if group["name"] == b"ledger"),
        EntryId(0, 0),
    )


def ids_in(client: redis.Redis, stream: str) -> list[str]:
    return [entry.decode() for entry, _ in cast(list[tuple[bytes, Any]], client.xrange(stream))]


def finish_all(client: redis.Redis, keys: Keys) -> None:
    """The trainer has trained on everything, so that whatever the ledger acknowledges may go."""
    reader = GroupReader(client, keys, "t0")
    while read := reader.read(block_ms=1):
        reader.finish([read[0]])


# Law 5: durable before acknowledged


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


# Trimming


@pytest.mark.parametrize(
    ("taken", "finished"), [(0, []), (2, []), (3, [0]), (3, [1, 2]), (4, [0, 1, 3]), (4, [0, 1, 2, 3])]
)
def test_nothing_that_the_trainer_has_not_finished_is_trimmed(
    client: redis.Redis, keys: Keys, ledger: Path, taken: int, finished: list[int]
) -> None:
    ids = send_all(client, keys, range(5))
    reader = GroupReader(client, keys, "t0")
    read = [reader.read(block_ms=1) for _ in range(taken)]
    assert [entry[0] for entry in read if entry] == ids[:taken]
    reader.finish([ids[at] for at in finished])
    drain(make_archiver(client, keys, ledger))
    oldest = min(at for at in range(5) if at not in finished)
    assert ids_in(client, keys.trajectories) == ids[oldest:]
    assert ids_in(client, keys.announce) == []
    restarted, again = GroupReader(client, keys, "t0"), []
    while entry := restarted.read(block_ms=1):
        again.append(entry[0])
    assert again == [ids[at] for at in range(5) if at not in finished]


def test_nothing_is_trimmed_before_there_is_a_trainer(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    ids = send_all(client, keys, range(3))
    drain(make_archiver(client, keys, ledger))
    assert ids_in(client, keys.trajectories) == ids


def test_nothing_that_the_ledger_does_not_have_is_trimmed(
    client: redis.Redis, keys: Keys, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_all(client, keys, range(2))
    finish_all(client, keys)
    archiver = make_archiver(client, keys, ledger)
    commit = archiver._commit
    late: list[str] = []

    def commit_while_more_comes(batch: Any, files: Any) -> bool:
        if not late:
            late.extend(send_all(client, keys, range(2, 4)))
            finish_all(client, keys)
        return commit(batch, files)

    monkeypatch.setattr(archiver, "_commit", commit_while_more_comes)
    trimmed = archiver._trim
    held: list[list[str]] = []

    def trim_and_look(surveys: Any) -> int:
        count = trimmed(surveys)
        held.append(ids_in(client, keys.trajectories))
        return count

    monkeypatch.setattr(archiver, "_trim", trim_and_look)
    drain(archiver)
    assert late in held, "what came later stayed until it was in the ledger too"
    assert held[-1] == []
    assert_holds(ledger, range(4))


def test_who_listens_without_a_group_still_finds_what_was_archived(
    client: redis.Redis, keys: Keys, ledger: Path
) -> None:
    send_all(client, keys, range(2))
    finish_all(client, keys)
    drain(make_archiver(client, keys, ledger, listen_s=3600))
    assert [len(ids_in(client, key)) for key in keys.streams.values()] == [2, 0, 2]
    drain(make_archiver(client, keys, ledger, listen_s=0))
    assert [len(ids_in(client, key)) for key in keys.streams.values()] == [0, 0, 0]


# One archiver at a time


def test_a_second_archiver_is_told_so(client: redis.Redis, keys: Keys, ledger: Path, server: RedisSection) -> None:
    ended = threading.Event()
    first = Archiver(client, keys, ledger, flush_entries=512, flush_s=60, lease_s=2)
    thread = threading.Thread(target=first.run, args=(ended.is_set,))
    thread.start()
    try:
        while not first._lease.number:
            time.sleep(0.01)
        other = connect(server)
        with pytest.raises(LedgerTaken, match="archiver 1 of run run writes it and is alive"):
            drain(make_archiver(other, keys, ledger, lease_s=2))
        other.close()
    finally:
        ended.set()
        thread.join()
    drain(make_archiver(client, keys, ledger))


def test_the_lease_of_a_dead_archiver_runs_out(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    dead = Lease(client, keys, 0.3)
    assert dead.take(0, lambda: False)
    send_all(client, keys, range(1))
    heir = make_archiver(client, keys, ledger)
    drain(heir)
    assert heir._lease.number == 2
    assert_holds(ledger, range(1))
    with pytest.raises(LedgerTaken):
        dead.renew()
    with pytest.raises(LedgerTaken):
        dead.trim(keys.trajectories, EntryId(2**40, 0))


def test_a_lease_that_nobody_took_is_taken_up_again(client: redis.Redis, keys: Keys) -> None:
    lease = Lease(client, keys, LEASE_S)
    assert lease.take(6, lambda: False)
    assert lease.number == 7, "above every number in the ledger, also if Redis forgot"
    client.flushall()
    lease.renew()
    assert client.get(keys.archiver) == b"7"
    lease.release()
    other = Lease(client, keys, LEASE_S)
    assert other.take(0, lambda: False)
    assert other.number == 8
    other.release()
    with pytest.raises(LedgerTaken):
        lease.renew()
    assert not Lease(client, keys, LEASE_S).take(0, lambda: True), "asked to stop before it began"


@pytest.mark.parametrize("first_to_commit", ["the old one", "the new one"])
def test_an_archiver_that_lost_its_lease_without_noticing_does_no_harm(
    client: redis.Redis, keys: Keys, ledger: Path, monkeypatch: pytest.MonkeyPatch, first_to_commit: str
) -> None:
    """Both have written files for the same commit; whoever commits first, there is no gap, no double, no wrong byte."""
    send_all(client, keys, range(2))
    old, new = make_archiver(client, keys, ledger), make_archiver(client, keys, ledger)
    old_commit, new_commit = old._commit, new._commit

    def old_stalls(batch: Any, files: Any) -> bool:
        monkeypatch.setattr(old, "_commit", old_commit)
        forget_lease(client, keys)
        send_all(client, keys, range(2, 3))
        if first_to_commit == "the new one":
            drain(new)
            return old_commit(batch, files)

        def new_stalls(its_batch: Any, its_files: Any) -> bool:
            monkeypatch.setattr(new, "_commit", new_commit)
            assert old_commit(batch, files)
            return new_commit(its_batch, its_files)

        monkeypatch.setattr(new, "_commit", new_stalls)
        drain(new)
        return True

    monkeypatch.setattr(old, "_commit", old_stalls)
    with pytest.raises(LedgerTaken):
        drain(old)
    assert_holds(ledger, range(3))
    assert [commit.fence for commit in read_log(ledger).commits] == (
        [2] if first_to_commit == "the new one" else [1, 2]
    )


# What else can come


def test_redelivery_is_harmless(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    """The same group twice on the stream (law 6): two rows in the files, one trajectory for every reader."""
    for number in (0, 1, 0):
        send(client, keys.trajectories, make_group(number))
    drain(make_archiver(client, keys, ledger))
    send(client, keys.trajectories, make_group(1))
    drain(make_archiver(client, keys, ledger))
    ids = [f"run/{number}.1/{index}" for number in range(2) for index in range(2)]
    assert len(raw_rows(ledger, "trajectories", ("id",))) == 8
    assert [trajectory.id for trajectory in Ledger(ledger).trajectories()] == ids
    connection = Ledger(ledger).connection()
    assert connection.execute("SELECT id FROM trajectories ORDER BY id").fetchall() == [(id,) for id in ids]
    connection.close()


def test_what_cannot_be_read_stops_nothing_and_is_kept(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    for stream in keys.streams.values():
        client.xadd(stream, {BODY: b"junk"})
    client.xadd(keys.trajectories, {"something": "else"})
    send_all(client, keys, range(2))
    drain(make_archiver(client, keys, ledger))
    assert_holds(ledger, range(2))
    assert sorted(row[0] for row in raw_rows(ledger, "unreadable", ("stream",))) == [
        "announce", "events", "trajectories", "trajectories",
    ]  # fmt: skip
    assert {row[0] for row in raw_rows(ledger, "unreadable", ("record",))} >= {b"junk"}


def test_a_file_left_by_a_crash_is_no_part_of_the_ledger(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    (ledger / "trajectories").mkdir(parents=True)
    (ledger / "trajectories" / "00000001-1.parquet").write_bytes(b"half a file")
    (ledger / "trajectories" / "00000002-1.parquet").write_bytes(b"half a file")
    send_all(client, keys, range(1))
    drain(make_archiver(client, keys, ledger))
    assert_holds(ledger, range(1))


@pytest.mark.parametrize("table", ["trajectories", "commits"])
def test_a_file_cut_short_is_corrupt(client: redis.Redis, keys: Keys, ledger: Path, table: str) -> None:
    for number in range(2):
        send_all(client, keys, range(number, number + 1))
        drain(make_archiver(client, keys, ledger))
    file = sorted((ledger / table).iterdir())[0]
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(LedgerCorrupt, match=re.escape(str(file))) as caught:
        list(Ledger(ledger).trajectories())
    assert "Restore" in caught.value.action
    if table == "commits":
        with pytest.raises(LedgerCorrupt):
            drain(make_archiver(client, keys, ledger))
        assert client.get(keys.archiver) is None


def test_commits_name_what_they_hold(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    ids = send_all(client, keys, range(3))
    drain(make_archiver(client, keys, ledger))
    (commit,) = read_log(ledger).commits
    stretch = commit.streams["trajectories"]
    assert (stretch.first, stretch.last, stretch.entries) == (ids[0], ids[-1], 3)
    assert {file.table: file.rows for file in commit.files} == {"trajectories": 6, "manifests": 3, "events": 3}
    assert codec.decode_json(Commit, (ledger / "commits" / "00000001.json").read_bytes()) == commit


def test_the_groups_are_where_the_archiver_and_the_trainer_look(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    drain(make_archiver(client, keys, ledger))
    GroupReader(client, keys, "t0")
    names = {group["name"].decode() for group in client.xinfo_groups(keys.trajectories)}
    assert names == {LEDGER_GROUP, TRAINER_GROUP}
