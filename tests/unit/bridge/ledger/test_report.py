from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lorabridge.bridge.errors import ConfigError, LedgerError
from lorabridge.bridge.events import Consumed, Dropped, Event
from lorabridge.bridge.ledger.commands import By, lag
from lorabridge.bridge.ledger.report import LagReport, LagRow, by_digest, by_generator, by_step
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.toml import to_toml

STEPS = {("policy", 1): 0, ("policy", 2): 1, ("policy", 3): 2}


def _consumed(step: int, *ids: str, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "policy": "policy", "step": step, "trajectories": ids, "tokens": 8, "lag_total": 12, "lag_max": 2, "lag_s": 3.0,
        "reward": 0.5,
    }  # fmt: skip
    return Event(source="trainer", at_ms=5000, happening=Consumed(**(fields | changes)))


def test_by_step_is_what_the_trainer_reported() -> None:
    events = [_consumed(0, "a", lag_total=0, lag_max=0, lag_s=1.0), _consumed(1, "b", "c")]
    assert by_step(events).rows == (
        LagRow(key="0", trajectories=1, tokens=8, mean=0.0, largest=0, seconds=1.0),
        LagRow(key="1", trajectories=2, tokens=8, mean=1.5, largest=2, seconds=3.0),
    )


def test_a_step_taken_again_counts_once() -> None:
    report = by_step([_consumed(0, "a"), _consumed(1, "b"), _consumed(1, "c", "d")])
    assert [(row.key, row.trajectories) for row in report.rows] == [("0", 1), ("1", 2)]


def test_other_events_and_no_tokens_are_no_trouble() -> None:
    dropped = Event(source="s", at_ms=1, happening=Dropped(policy="policy", trajectories=("a",), reason="old"))
    assert by_step([dropped, _consumed(0, tokens=0, lag_total=0)]).rows[0].mean == 0.0
    assert by_digest([dropped], [], STEPS) == LagReport(rows=())


def test_by_digest_weighs_each_adapter_by_the_tokens_it_sampled(make: Any) -> None:
    """Trained after 3 steps: a token of version 1 (step 0) lags 3, of version 2 lags 2, of version 3 lags 1."""
    one = make.trajectory(0, 0, turns=(make.turn((1, 4), (2, 2)), make.turn((2, 6))))
    two = make.trajectory(0, 1, turns=(make.turn((2, 4)),), times_ms={"sampled": 4000})
    report = by_digest([_consumed(3, one.id, two.id)], [one, two], STEPS)
    assert report.missing == 0
    assert report.rows == (
        LagRow(key=f"sha256:{1:064x}", trajectories=1, tokens=4, mean=3.0, largest=3, seconds=3.0),
        LagRow(key=f"sha256:{2:064x}", trajectories=2, tokens=12, mean=2.0, largest=2, seconds=(8 * 3 + 4 * 1) / 12),
    )


def test_by_generator(make: Any) -> None:
    one = make.trajectory(0, 0, turns=(make.turn((1, 1), (3, 3)),))
    two = make.trajectory(0, 1, generator="g1")
    report = by_generator([_consumed(2, one.id), _consumed(4, two.id)], [one, two], STEPS)
    assert [(row.key, row.tokens, row.mean, row.largest) for row in report.rows] == [("g0", 4, 0.5, 2), ("g1", 4, 4, 4)]


def test_what_the_ledger_lacks_is_counted_and_not_guessed(make: Any) -> None:
    unannounced = make.trajectory(0, 1, turns=(make.turn((1, 2), (9, 2)),))
    unused = make.trajectory(0, 2)
    report = by_digest([_consumed(2, "run/7.1/0", unannounced.id)], [unannounced, unused], STEPS)
    assert report == LagReport(rows=(), missing=2)


@pytest.fixture
def run(tmp_path: Path, make: Any) -> Path:
    """The folder of a run of two steps."""
    (tmp_path / "config.toml").write_text(to_toml(Settings()).replace('dir = "runs/run"', f'dir = "{tmp_path}"'))
    one, two = make.trajectory(0, 0), make.trajectory(0, 1, turns=(make.turn((2, 8)),), generator="g1")
    events = [_consumed(0, one.id, tokens=4, lag_total=0, lag_max=0), _consumed(1, two.id, "run/5.1/0")]
    make.commit(
        tmp_path / "ledger",
        {
            "announce": [("1-0", make.fields(make.manifest(1))), ("2-0", make.fields(make.manifest(2)))],
            "trajectories": [("3-0", make.group(one, two))],
            "events": [(f"{4 + at}-0", make.fields(event)) for at, event in enumerate(events)],
        },
    )
    return tmp_path


def test_json_is_one_object(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lag(run, json=True)
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["by"] == "step"
    assert [(row["key"], row["mean"]) for row in answer["rows"]] == [("0", 0.0), ("1", 1.5)]
    lag(run, by=By.digest, json=True)
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["key"][-1], row["mean"]) for row in answer["rows"]] == [("1", 0.0), ("2", 0.0)]
    assert answer["missing"] == 1


def test_people_get_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lag(run, by=By.generator)
    shown = capsys.readouterr().out
    assert "mean lag" in shown
    assert "g1" in shown
    assert "1 consumed trajectories are not in the ledger" in shown


def test_a_picture_of_every_step(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lag(run, plot=tmp_path / "lag.png", json=True)
    assert (tmp_path / "lag.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_no_run_and_a_run_without_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        lag(tmp_path)
    (tmp_path / "config.toml").write_text(f'[run]\ndir = "{tmp_path}"\n')
    with pytest.raises(LedgerError, match="is not there"):
        lag(tmp_path)
