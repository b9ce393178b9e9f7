"""Law 6 at the archiver: redelivery is harmless, and what cannot be read stops nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import redis

from lorabridge.bridge import codec
from lorabridge.bridge.errors import LedgerCorrupt
from lorabridge.bridge.ledger.commits import Commit, read_log
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.stream.keys import BODY, LEDGER_GROUP, TRAINER_GROUP, Keys
from tests.archives import (
    assert_holds,
    drain,
    make_archiver,
    make_group,
    raw_rows,
    send,
    send_all,
)
from tests.groups import reader_of


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
    reader_of(client, keys, "t0")
    names = {group["name"].decode() for group in client.xinfo_groups(keys.trajectories)}
    assert names == {LEDGER_GROUP, TRAINER_GROUP}
