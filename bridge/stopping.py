"""How a process ends when it is asked to, by SIGTERM or Ctrl-C, in whatever state it is: within 10 s, and quietly.

=========================== ============================================ ==========================================
it has                      it does                                      exit code
=========================== ============================================ ==========================================
nothing to give back (yet)  it ends at once: ``end_at_once``             130 after Ctrl-C, 143 after SIGTERM
something to finish         it finishes that, and gives back: ``Drain``  0, or that of what went wrong meanwhile
that, and it is stuck       ``DRAIN_S`` later it ends all the same       130 or 143
=========================== ============================================ ==========================================

A process is in the first of these from its first lines on: with Python's own handlers Ctrl-C would be a traceback
wherever it comes, and as the first process of a container it would not hear SIGTERM at all.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN_S = 8.0
ANSWER_S = 3.0
"""How long a call waits for an answer, in a process that must not be kept by a server that hangs."""


def end_at_once(farewell: Callable[[], object] = lambda: None) -> None:
    """From now on a signal ends this process at once, after ``farewell``; in its main thread only."""

    def end(number: int, frame: FrameType | None) -> None:
        farewell()
        os._exit(128 + number)

    for number in SIGNALS:
        signal.signal(number, end)


class Drain:
    """Within this block SIGTERM and Ctrl-C are a wish, to be looked at; in the main thread only.

    From the first one on there are ``DRAIN_S`` seconds until the end of the process, whatever holds it. More of them
    change nothing, and after the block none does if there was one: the process is on its way out.

    Args:
        told: called at each signal, between two instructions of the main thread.
    """

    def __init__(self, told: Callable[[], object] = lambda: None) -> None:
        self._told = told
        self._first: int | None = None
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()  # which a signal's handler may put into
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> bool:
        """Whether there was a signal."""
        return self._first is not None

    @property
    def code(self) -> int:
        """The exit code of a process that could not finish what it had begun: 128 + the first signal's number."""
        assert self._first is not None
        return 128 + self._first

    def __enter__(self) -> Drain:
        threading.Thread(target=self._end_late, name="drain", daemon=True).start()
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.asked() else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = number
        self._numbers.put(number)
        self._told()

    def _end_late(self) -> None:
        number = self._numbers.get()
        time.sleep(DRAIN_S)
        os._exit(128 + number)
