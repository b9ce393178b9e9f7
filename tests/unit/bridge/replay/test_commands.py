"""The commands: what they print, and what they exit with. Ledger and scorer are stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from typer import Typer

from lorabridge.bridge import cli
from lorabridge.bridge.events import Event, Resident
from lorabridge.bridge.residency import Residency, Served
from lorabridge.bridge.trajectory import Trajectory

if TYPE_CHECKING:
    from tests.unit.bridge.replay.conftest import Case

ID = "run/3.1/0"


@pytest.fixture
def run(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run whose ledger holds one trajectory, and the residency records of its epochs."""
    from lorabridge.bridge.ledger import reader
    from lorabridge.bridge.replay import commands, scorer

    case.recorded = (case.turn((2, 2, "fresh"), (3, 4, "kept")),)

    class FakeLedger:
        def __init__(self, folder: Path) -> None:
            assert folder == tmp_path / "ledger"

        def trajectories(self) -> Iterator[Trajectory]:
            yield case.trajectory(*case.recorded)

        def trajectory(self, id: str) -> Trajectory:
            assert id == ID
            return next(self.trajectories())

        def events(self, kind: type[object]) -> Iterator[Event]:
            assert kind is Resident
            for epoch in (2, 3):
                residency = Residency(
                    generator="generator", instance="instance", epoch=epoch, kv="keep", at_ms=0,
                    serves={"policy": Served(version=epoch, digest=case.digests[epoch - 1])},
                )  # fmt: skip
                yield Event(source="generator", at_ms=0, happening=Resident(residency=residency, swap_ms={}))

    def build() -> Typer:
        app = Typer(pretty_exceptions_enable=False)
        app.command("audit")(commands.audit)
        app.add_typer(commands.replay, name="replay")
        return app

    monkeypatch.setattr(reader, "Ledger", FakeLedger)
    monkeypatch.setattr(scorer, "Scorer", lambda folder, store: case.scorer)
    monkeypatch.setattr(cli, "build", build)
    text = f'[run]\ndir = "{tmp_path}"\n[store]\nurl = "{case.store.root}"\n[model]\npath = "{tmp_path}"\n'
    (tmp_path / "config.toml").write_text(text)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON object on the last line."""
    return msgspec.json.decode(capsys.readouterr().out.splitlines()[-1], type=dict[str, Any])


def test_an_audit_answers_with_exactly_these_keys(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["audit", "--run", str(run), "--json"]) == 0
    assert list(answer(capsys)) == [
        "trajectories", "tokens", "confirmed", "indistinct", "refuted", "unverifiable", "discriminated", "max_error",
    ]  # fmt: skip
    assert cli.run(["audit", "--run", str(run), "--sample", "1", "--seed", "5"]) == 0
    assert "6 sampled tokens" in capsys.readouterr().out


def test_a_refuted_token_makes_the_answer_no(case: Case, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds = case.scorer.versions
    ds[case.digests[2]], ds[case.digests[3]] = 4, 3  # the engine sampled with version 4 what it called version 3
    case.recorded = (case.turn((2, 2, "fresh"), (3, 4, "kept")),)
    ds[case.digests[2]], ds[case.digests[3]] = 3, 4
    assert cli.run(["audit", "--run", str(run), "--json"]) == 1
    out, err = capsys.readouterr()
    assert msgspec.json.decode(out)["refuted"] == 4
    assert "4 are refuted" in err
    assert cli.run(["replay", "verify", ID, "--run", str(run), "--json"]) == 1
    found = answer(capsys)
    assert found["verdict"] == "refuted"
    assert [span["verdict"] for span in found["spans"]] == ["confirmed", "refuted"]
    assert cli.run(["replay", "verify", ID, "--run", str(run)]) == 1


def test_verify_answers_for_each_span(case: Case, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", "verify", ID, "--run", str(run), "--json"]) == 0
    found = answer(capsys)
    assert (found["id"], found["verdict"]) == (ID, "confirmed")
    assert found["spans"][1] == {
        "turn": 0, "policy": "policy", "version": 3, "digest": case.digests[2], "kv": "kept", "start": 2, "end": 6,
        "tokens": 4, "discriminated": 4, "max_error": 0.0, "verdict": "confirmed", "reasons": {},
    }  # fmt: skip


def test_show_prints_the_whole_record(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["replay", "show", ID, "--run", str(run), "--json"]) == 0
    found = answer(capsys)
    assert found["id"] == ID
    assert msgspec.convert({**found, "id": None}, Trajectory).id == ID
    assert cli.run(["replay", "show", ID, "--run", str(run)]) == 0
    assert "[7][8]" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["nobody/has-this", "/no/such/folder"])
def test_without_its_model_a_trajectory_is_shown_in_numbers_and_not_audited(
    model: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().partition("[model]")[0] + f'[model]\npath = "{model}"\n')
    assert cli.run(["replay", "show", ID, "--run", str(run)]) == 0
    assert "[7][8]" in capsys.readouterr().out
    assert cli.run(["audit", "--run", str(run)]) == 6
    assert "base model" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_a_usage_error(run: Path, tmp_path: Path) -> None:
    assert cli.run(["audit", "--run", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("command", [["audit"], ["replay", "show"], ["replay", "verify"]])
def test_help_holds_examples(command: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*command, "--help"]) == 0
    assert "Examples" in capsys.readouterr().out
