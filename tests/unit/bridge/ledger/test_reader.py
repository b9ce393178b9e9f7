from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorabridge.bridge.errors import LedgerCorrupt, LedgerError
from lorabridge.bridge.events import Consumed, Dropped, Event, Quarantine
from lorabridge.bridge.ledger.commits import read_log
from lorabridge.bridge.ledger.reader import Ledger, match
from lorabridge.bridge.stream.keys import BODY


def test_every_trajectory_once_in_the_streams_order(ledger: Path, make: Any) -> None:
    assert list(Ledger(ledger).trajectories()) == [
        make.trajectory(0, 0), make.trajectory(0, 1), make.trajectory(1, 0), make.trajectory(1, 1, generator="g1"),
    ]  # fmt: skip


def test_those_that_are_asked_for(ledger: Path) -> None:
    ids = {"run/1.1/0", "run/0.1/1", "run/9.1/0"}
    assert [trajectory.id for trajectory in Ledger(ledger).trajectories(ids=ids)] == ["run/0.1/1", "run/1.1/0"]
    assert list(Ledger(ledger).trajectories(ids=[])) == []


@pytest.mark.parametrize("given", ["run/1.1/1", "1.1/1"])
def test_one_by_its_id_or_a_part_of_it(ledger: Path, make: Any, given: str) -> None:
    assert Ledger(ledger).trajectory(given) == make.trajectory(1, 1, generator="g1")


def test_a_part_that_two_ids_have_names_neither(ledger: Path) -> None:
    with pytest.raises(LedgerError, match="names 2 trajectories"):
        Ledger(ledger).trajectory(".1/1")


def test_manifests_once(ledger: Path, make: Any) -> None:
    assert Ledger(ledger).manifests() == [make.manifest(1), make.manifest(2)]


def test_match() -> None:
    ids = ["run/0.1/0", "run/10.1/0", "run/0.1/10", "run/10.1/0"]
    assert match("run/0.1/0", ids) == "run/0.1/0"
    assert match("0.1/0", ids) == "run/0.1/0"
    assert match("10.1/0", ids) == "run/10.1/0"
    assert match("run/10", ids) == "run/10.1/0"
    assert match(".1/10", ids) == "run/0.1/10"
    with pytest.raises(LedgerError, match=r"names 2 trajectories: run/0\.1/0, run/0\.1/10") as several:
        match("run/0", ids)
    assert several.value.action == "Give more of the id"
    with pytest.raises(LedgerError, match="no trajectory 'other'") as none:
        match("other", ids)
    assert "<run>/<group>.<attempt>/<index>" in none.value.action


def test_events_of_one_kind_or_all(tmp_path: Path, make: Any) -> None:
    dropped = Dropped(policy="p", trajectories=("a",), reason="old")
    quarantine = Quarantine(subject="s", reason="r")
    entries = [("1-0", make.event(dropped)), ("2-0", make.event(quarantine)), ("3-0", make.event(dropped))]
    make.commit(tmp_path, {"events": entries})
    ledger = Ledger(tmp_path)
    assert [event.happening for event in ledger.events()] == [dropped, quarantine, dropped]
    assert list(ledger.events(Quarantine)) == [Event(source="trainer", at_ms=5000, happening=quarantine)]
    assert list(ledger.events(Consumed)) == []


def test_duckdb_sees_what_is_committed_and_nothing_else(ledger: Path) -> None:
    (ledger / "trajectories" / "00000009-1.parquet").write_bytes(b"left by a crash")
    connection = Ledger(ledger).connection()
    rows = connection.execute("SELECT id, generator FROM trajectories ORDER BY id").fetchall()
    assert rows == [("run/0.1/0", "g0"), ("run/0.1/1", "g0"), ("run/1.1/0", "g0"), ("run/1.1/1", "g1")]
    assert connection.execute("SELECT version FROM manifests ORDER BY version").fetchall() == [(1,), (2,)]
    assert connection.execute("SELECT count(*) FROM events").fetchall() == [(0,)]
    tokens = connection.execute(
        'SELECT "group", sum(len(t.token_ids)) FROM trajectories, unnest(turns) AS u(t) GROUP BY 1'
    )
    assert sorted(tokens.fetchall()) == [(0, 8), (1, 8)]
    connection.close()


def test_duckdb_sees_what_was_set_aside(tmp_path: Path, make: Any) -> None:
    dir = tmp_path / "it's here"
    quarantine = ("1-0", make.event(Quarantine(subject="run/0.1/0", reason="no record")))
    make.commit(dir, {"events": [quarantine], "trajectories": [("77-3", {BODY: b"junk"})]})
    connection = Ledger(dir).connection()
    rows = connection.execute("SELECT at_ms, source, subject, reason FROM quarantined ORDER BY at_ms").fetchall()
    connection.close()
    assert rows[1] == (5000, "trainer", "run/0.1/0", "no record")
    assert rows[0][:3] == (77, "archiver", "trajectories 77-3")
    assert "not a readable Group" in rows[0][3]


def test_no_ledger_or_an_empty_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is not there") as missing:
        Ledger(tmp_path / "none")
    assert missing.value.action
    (tmp_path / "commits").mkdir()
    with pytest.raises(LedgerError, match="has no commit yet"):
        Ledger(tmp_path)


@pytest.mark.parametrize(
    "read",
    [
        lambda ledger: list(ledger.trajectories()),
        lambda ledger: ledger.trajectory("run/0.1/0"),
        lambda ledger: ledger.connection(),
    ],
)
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(file.read_bytes()[:-9] + b"x" + file.read_bytes()[-8:]),
    ],
)
def test_no_row_is_read_from_a_damaged_file(
    ledger: Path, damage: Callable[[Path], None], read: Callable[[Ledger], object]
) -> None:
    file = ledger / read_log(ledger).files[2].path
    damage(file)
    with pytest.raises(LedgerCorrupt, match=file.name):
        read(Ledger(ledger))
