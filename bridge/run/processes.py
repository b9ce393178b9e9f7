"""The processes of a run: started, watched and stopped, with nothing left behind (see ``guard``)."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

from lorabridge.bridge.errors import ProcessDied
from lorabridge.bridge.run.guard import KILL

LATER_S = 1.5
MOST_RESTARTS, RESTARTS_WITHIN_S = 10, 300.0
_TICK_S = 0.05
_TAIL_BYTES = 64 * 1024
_LINE = 300
_OWN_CODES = range(2, 11)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FAILURE = re.compile(r"(?:^|\s)(?:\w+\.)*\w*(?:Error|Exception|Killed)\b.{0,4}: ")
_OWN = re.compile(r"^lorabridge: (?P<sentence>.+)$")


class Guarded:
    """One command behind its guard, in a process group of its own. If this process dies, it ends.

    Ctrl-C does not reach it. A session of its own would keep that away as well, but Linux shares out the cores among
    sessions first (``sched_autogroup``): where a generator keeps all of them busy, a worker in another session, which
    has little to do, was seen to wait for its turn three quarters of the time.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
    ) -> None:  # fmt: skip
        """Start it. ``output`` is where it writes to; None: where this process does."""
        self._guard = subprocess.Popen(
            [sys.executable, "-P", "-m", "lorabridge.bridge.run.guard", *command],
            stdin=subprocess.PIPE, stdout=output, stderr=output, bufsize=0, process_group=0, env=environment,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Process id of the guard; the command and all it starts are its descendants."""
        return self._guard.pid

    @property
    def code(self) -> int | None:
        """Exit code, 128 + n if signal n ended it; None while it runs."""
        code = self._guard.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        self._guard.terminate()

    def kill(self) -> None:
        """Kill it and all it started."""
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(KILL)
        except (BrokenPipeError, ValueError):
            pass  # it has ended

    def wait(self) -> None:
        """Wait until it and all it started are gone."""
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()


class Child:
    """One process of the run, guarded, its output in ``log``.

    Attributes:
        name: what people call it.
        log: where its output goes.
        asked: whether it was asked to stop.
        restarts: when it was started again, seconds of the monotonic clock.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str],
        ends_with: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Start it. ``ends_with`` are exit codes of a proper end; none: it runs until it is asked to stop."""
        self.name, self.log = name, log
        self.asked = False
        self.restarts: list[float] = []
        self._command, self._environment = list(command), dict(environment)
        self._ends_with = ends_with
        log.parent.mkdir(parents=True, exist_ok=True)
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as output:
            self._from = output.tell()
            self._guarded = Guarded(self._command, self._environment, output)

    def restart(self) -> None:
        """Start it again, once it has ended: the same command, the same log."""
        self.wait()
        self.restarts.append(time.monotonic())
        self._start()

    @property
    def pid(self) -> int:
        """Process id of its guard; the process and all it starts are its descendants."""
        return self._guarded.pid

    @property
    def code(self) -> int | None:
        """Exit code, 128 + n if signal n ended it; None while it runs."""
        return self._guarded.code

    @property
    def failed(self) -> bool:
        """Whether it ended when it should not have, or not as it should have."""
        return self.code is not None and not self.asked and self.code not in self._ends_with

    def ask_to_stop(self) -> None:
        """Send SIGTERM, once."""
        if not self.asked:
            self.asked = True
            self._guarded.terminate()

    def kill(self) -> None:
        """Kill it and all it started."""
        self.asked = True
        self._guarded.kill()

    def wait(self) -> None:
        """Wait until it and all it started are gone."""
        self._guarded.wait()

    def output(self) -> str:
        """The end of what it wrote since it started."""
        with self.log.open("rb") as log:
            log.seek(max(self._from, self.log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")


def stop(stages: Sequence[Sequence[Child]], *, within_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
    """Stop children stage by stage: SIGTERM, wait, kill. Each stage leaves ``LATER_S`` to each one after it.

    When ``hurry()`` turns true, what is left is killed at once.
    """
    deadline = time.monotonic() + within_s
    try:
        for number, stage in enumerate(stages):
            until = deadline - LATER_S * (len(stages) - number - 1)
            for child in stage:
                child.ask_to_stop()
            while any(child.code is None for child in stage) and time.monotonic() < until and not hurry():
                time.sleep(_TICK_S)
            for child in stage:
                child.kill()
    finally:
        everyone = [child for stage in stages for child in stage]
        for child in everyone:
            child.kill()
        for child in everyone:
            child.wait()


def may_restart(code: int, restarts: Sequence[float], now: float) -> bool:
    """Whether a process that ended with ``code`` is started again: a signal ended it, and not time after time lately.

    One that ended by itself has said what is wrong, and would say it again. ``restarts`` are times on the clock of
    ``now``, in seconds.
    """
    lately = sum(now - at < RESTARTS_WITHIN_S for at in restarts)
    return code > 128 and lately < MOST_RESTARTS


def died(child: Child) -> ProcessDied:
    """The error for a child that ended when it should not have: its exit code is the child's, if that is a documented
    one, so that a wrong password is exit code 3 whoever noticed it."""
    code, words = child.code, last_words(child.output())
    error = ProcessDied(
        f"{child.name} ended ({_ending(code)}): {words or 'it wrote nothing'}", action=f"Its log is {child.log}"
    )
    if code is not None and code in _OWN_CODES:
        error.exit_code = code
    return error


def last_words(output: str, most: int = 2) -> str:
    """The lines of a log that say why its process ended, at most ``most`` of them, or the last one."""
    lines = [line for raw in output.splitlines() if (line := _COLOUR.sub("", raw).strip())]
    own = [found["sentence"] for line in lines if (found := _OWN.match(line))]
    telling = [line for line in dict.fromkeys(lines) if _FAILURE.search(line)]
    return " / ".join(line[:_LINE] for line in own[-1:] or telling[-most:] or lines[-1:])


def _ending(code: int | None) -> str:
    if code is not None and code > 128:
        return f"killed by signal {code - 128}"
    return f"exit code {code}"
