"""One archiver writes a ledger at a time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from lorabridge.bridge.errors import LedgerTaken
from lorabridge.bridge.ledger.archiver import Archiver
from lorabridge.bridge.ledger.commits import read_log
from lorabridge.bridge.ledger.lease import Lease
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.status import Status
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.stream.trim import EntryId
from tests.archives import (
    LEASE_S,
    assert_holds,
    drain,
    forget_lease,
    make_archiver,
    send_all,
)


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


def test_it_is_ready_once_the_ledger_is_its_own(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    dead, status, ended = Lease(client, keys, 0.5), Status(), threading.Event()
    assert dead.take(0, lambda: False)
    heir = Archiver(client, keys, ledger, flush_entries=512, flush_s=0.1, lease_s=2, status=status)
    thread = threading.Thread(target=heir.run, args=(ended.is_set,))
    thread.start()
    try:
        answers = {status.answer("/readyz")}
        while (200, "ready") not in answers:
            assert thread.is_alive()
            answers.add(status.answer("/readyz"))
            time.sleep(0.01)
        assert (503, "waits for the ledger, which another archiver may have") in answers
        assert heir._lease.number == 2
    finally:
        ended.set()
        thread.join()


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
