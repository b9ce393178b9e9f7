"""Processes of a run as a person or a supervisor has them: started, asked to end, and looked at afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

PROMISED_S = 10.0  # within which every process ends once it is asked to
REACHED_S = 90.0  # within which a process gets where a test wants it, on a machine that does other things as well
ENDED_BY_SIGTERM = 128 + signal.SIGTERM
ENDED_BY_CTRL_C = 128 + signal.SIGINT
ROOT = Path(__file__).parents[1]
_MARK = "TESTED_AS"


class Process:
    """``python -m MODULE ARGUMENTS`` in a process group of its own, its output in ``folder``.

    At the end of the block it is killed if it still runs, and so is what it left behind.
    """

    def __init__(
        self, folder: Path, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:  # fmt: skip
        self._mark = uuid.uuid4().hex
        self.log = folder / f"{module.rpartition('.')[2]}-{self._mark[:6]}.log"
        inherited = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, process_group=0, env={**inherited, **(environment or {}), _MARK: self._mark},
            )  # fmt: skip
        self.began = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def said(self) -> str:
        """What it wrote until now."""
        return self.log.read_text(errors="replace")

    def until(self, holds: Callable[[], bool], what: str = "it to be so") -> None:
        """Wait for something while it runs."""
        deadline = time.monotonic() + REACHED_S
        while not holds():
            assert self.running, f"it ended with {self.code} while {what} was waited for:\n{self.said()}"
            assert time.monotonic() < deadline, f"{what} never came:\n{self.said()}"
            time.sleep(0.02)

    def maps(self) -> bytes:
        """What it has mapped into memory: how far its imports have come."""
        return Path(f"/proc/{self.pid}/maps").read_bytes()

    def started(self, words: str) -> list[psutil.Process]:
        """Those that it started and whose command line says so, guards left out."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                if words in line and "lorabridge.bridge.run.guard" not in line:
                    found.append(process)
        return found

    def until_it_has_ended(self) -> None:
        """Wait for it to end by itself."""
        self._process.wait(REACHED_S)

    def until_nothing_is_left(self) -> None:
        """Wait, as long as is promised, for what it started to end."""
        deadline = time.monotonic() + PROMISED_S
        while left := self.left():
            assert time.monotonic() < deadline, f"it left {[process.cmdline() for process in left]}"
            time.sleep(0.1)

    def until_it_says(self, words: str) -> None:
        self.until(lambda: words in self.said(), repr(words))

    @property
    def code(self) -> int | None:
        """Exit code as a shell sees it: 128 + n if signal n ended it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def freeze(self) -> None:
        """SIGSTOP: what it listens on can be connected to, and nobody answers."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    def end(self, *numbers: int) -> int:
        """Send signals, 0.2 s apart; its exit code. It ends as soon as is promised, says no traceback, leaves nothing.

        Args:
            numbers: signals; none: SIGTERM.
        """
        asked = time.monotonic()
        for place, number in enumerate(numbers or (signal.SIGTERM,)):
            time.sleep(0.2 if place else 0)
            self.ask(number)
        try:
            self._process.wait(PROMISED_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs {PROMISED_S:g} s after it was asked to end:\n{self.said()}") from None
        took, code = time.monotonic() - asked, self.code
        assert took < PROMISED_S
        assert "Traceback" not in self.said(), self.said()
        assert not (left := self.left()), f"it left {[process.cmdline() for process in left]}"
        assert code is not None
        return code

    def left(self) -> list[psutil.Process]:
        """Processes that it started and that still run."""
        return [process for process in psutil.process_iter() if process.pid != self.pid and self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            return bool(process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE)
        return False

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.left():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.kill()


def lorabridge(folder: Path, command: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
    """``lorabridge COMMAND --config FOLDER/run.toml ARGUMENTS``."""
    return Process(
        folder, "lorabridge.bridge.cli", command, "--config", str(folder / "run.toml"), *arguments,
        environment=environment,
    )  # fmt: skip


def signals(*names: str) -> Sequence[int]:
    """Numbers of signals by their names without SIG."""
    return [signal.Signals[f"SIG{name}"] for name in names]
