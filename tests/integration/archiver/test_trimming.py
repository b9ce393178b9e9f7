"""Law 5 at the archiver: what somebody still needs is not trimmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from lorabridge.bridge.stream.keys import Keys
from tests.archives import (
    assert_holds,
    drain,
    finish_all,
    ids_in,
    make_archiver,
    send_all,
)
from tests.groups import reader_of


@pytest.mark.parametrize(
    ("taken", "finished"), [(0, []), (2, []), (3, [0]), (3, [1, 2]), (4, [0, 1, 3]), (4, [0, 1, 2, 3])]
)
def test_nothing_that_the_trainer_has_not_finished_is_trimmed(
    client: redis.Redis, keys: Keys, ledger: Path, taken: int, finished: list[int]
) -> None:
    ids = send_all(client, keys, range(5))
    reader = reader_of(client, keys, "t0")
    read = [reader.read(block_ms=1) for _ in range(taken)]
    assert [entry[0] for entry in read if entry] == ids[:taken]
    reader.finish([ids[at] for at in finished])
    drain(make_archiver(client, keys, ledger))
    oldest = min(at for at in range(5) if at not in finished)
    assert ids_in(client, keys.trajectories) == ids[oldest:]
    assert ids_in(client, keys.announce) == []
    restarted, again = reader_of(client, keys, "t0"), []
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
