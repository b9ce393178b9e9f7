"""Ctrl-C as a fact to be looked at, rather than an exception in the middle of anything."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Within this block Ctrl-C, SIGTERM and a closed terminal are counted; ``check`` is where they take effect.

    So nothing is cut short between starting a process and knowing of it, and a second Ctrl-C does not cut short the
    stopping that the first began.
    """

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # After an interrupt the process is on its way out: one more Ctrl-C, even while Python shuts down, is not
            # to change how it ends.
            signal.signal(number, signal.SIG_IGN if self._count else handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was an interrupt."""
        if self._count:
            raise KeyboardInterrupt

    def hurry(self) -> bool:
        """Whether there was a second one: the user does not want to wait."""
        return self._count > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
