"""One sentence and a documented exit code for everything that can go wrong; a traceback only when it is asked for."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import typer

from lorabridge.bridge import cli, errors
from lorabridge.bridge.errors import BridgeError

ERRORS = sorted(
    (kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BridgeError)),
    key=lambda kind: kind.__name__,
)


class Fake(EntryPoint):
    """An installed command that is this function."""

    command: Callable[[], Any]

    def load(self) -> Any:
        return self.command


def install(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]) -> None:
    """Make ``command`` the only one installed, as ``try``; ``other`` does nothing."""
    commands = []
    for name, function in (("try", command), ("other", lambda: None)):
        entry = Fake(name, "module:attribute", "lorabridge.commands")
        entry.__dict__["command"] = function
        commands.append(entry)
    monkeypatch.setattr(cli, "entry_points", lambda group: commands)


def fails_with(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_ends_with_its_code_and_one_sentence(
    kind: type[BridgeError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, fails_with(kind("it broke", action="Mend it")))
    assert cli.run(["try"]) == kind.exit_code
    out, err = capsys.readouterr()
    assert err == f"lorabridge: {kind.boundary}: it broke. Mend it\n"
    assert out == ""


def test_every_exit_code_is_documented_where_people_look() -> None:
    documented = {line.split()[0] for line in (errors.__doc__ or "").splitlines() if line[:1].isdigit()}
    assert {str(kind.exit_code) for kind in ERRORS} | {"0", "130", "143"} == documented
    epilog = {part.strip(" .").split()[0] for part in cli._EPILOG.removeprefix("Exit codes:").split(",")}
    assert epilog == documented


def test_what_nobody_foresaw_is_one_line_and_asks_to_be_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LORABRIDGE_DEBUG", raising=False)
    install(monkeypatch, fails_with(ZeroDivisionError("by zero")))
    assert cli.run(["try"]) == 1
    err = capsys.readouterr().err
    assert "unexpected: ZeroDivisionError: by zero" in err
    assert len(err.splitlines()) == 1


def test_the_traceback_is_shown_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORABRIDGE_DEBUG", "1")
    install(monkeypatch, fails_with(errors.StoreError("it broke", action="Mend it")))
    assert cli.run(["try"]) == 4
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (typer.Abort(), 130), (typer.Exit(7), 7), (typer.Exit(), 0), (BrokenPipeError(), 0)],
)
def test_other_ends_of_a_command(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fails_with(error))
    try:
        ended = cli.run(["try"])
    except SystemExit as left:
        ended = int(left.code or 0)
    assert ended == code


def test_a_command_that_returns_a_number_exits_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda: 1)
    assert cli.run(["try"]) == 1
    install(monkeypatch, lambda: None)
    assert cli.run(["try"]) == 0


@pytest.mark.parametrize("args", [[], ["nope"], ["try", "--nope"], ["try", "more"], ["--nope"]])
def test_wrong_usage_is_2_and_shows_no_traceback(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, lambda: None)
    assert cli.run(args) == 2
    out, err = capsys.readouterr()
    assert "Usage" in out + err
    assert "Traceback" not in err
    assert "unexpected:" not in err


def test_a_command_that_cannot_be_loaded_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(self: EntryPoint) -> Any:
        if self.name == "try":
            raise ModuleNotFoundError("No module named 'torch'")
        return lambda: None

    install(monkeypatch, lambda: None)
    monkeypatch.setattr(Fake, "load", missing)
    assert cli.run(["other"]) == 0
    assert cli.run(["try", "--run", "folder", "argument"]) == 2
    assert "`try` cannot be loaded: No module named 'torch'" in capsys.readouterr().err


def test_the_installed_program_says_it_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lorabridge.bridge.cli", "head", "--config", "/nowhere.toml"],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "LORABRIDGE_DEBUG"},
    )
    assert done.returncode == 2
    assert done.stderr == "lorabridge: configuration: no configuration file /nowhere.toml. Check --config\n"
    assert done.stdout == ""
