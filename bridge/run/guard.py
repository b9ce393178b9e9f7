"""Runs one command and leaves nothing of it behind, whatever happens to the process that asked for it.

    python -m lorabridge.bridge.run.guard COMMAND...

A guard stands between the supervisor and each process of a run, because none of the plain ways reaches everything:
torchrun gives its workers sessions of their own, vLLM's engine outlives a server that is killed, and a supervisor that
is killed cannot clean up. The guard adopts every orphan of its command (Linux's subreaper), so that all of them stay
its descendants. It hears from its owner through standard input, which closes when the owner dies:

==================== ===================================================================
SIGTERM              is passed on to the command
``k`` on stdin       every descendant is killed now; Python's resource trackers, which
                     remove shared memory, get ``TRACKERS_S`` to do so first
stdin closed         SIGTERM to the command, then after ``GRACE_S`` as for ``k``
the command ends     what it left behind gets ``LEFTOVERS_S`` to go, then is killed
==================== ===================================================================

It exits as the command did; 128 + n if signal n ended it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

KILL = b"k"
GRACE_S = 5.0
LEFTOVERS_S = 1.0
TRACKERS_S = 2.0
_UNKILLABLE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run ``command`` to its end, or to its owner's; its exit code."""
    adopt_orphans()
    signals = _signals()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = _watch(child, signals)
    clear(LEFTOVERS_S if code is not None else 0)
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


def _watch(child: subprocess.Popen[bytes], signals: int) -> int | None:
    """Wait for the command; its exit code, or None if it is to be killed."""
    kill_at, owner = float("inf"), sys.stdin.fileno()
    sources = [signals, owner]
    while (code := _reap(child.pid)) is None:
        left = kill_at - time.monotonic()
        if left <= 0:
            return None
        ready, _, _ = select.select(sources, [], [], min(left, 3600))
        if signals in ready and signal.SIGTERM in os.read(signals, 512):
            os.kill(child.pid, signal.SIGTERM)
        if owner in ready:
            word = os.read(owner, 512)
            if KILL in word:
                return None
            if not word:
                os.kill(child.pid, signal.SIGTERM)
                kill_at = time.monotonic() + GRACE_S
                sources.remove(owner)
    return code


def _reap(pid: int) -> int | None:
    """Collect every descendant that has ended; the exit code of ``pid`` if it is among them."""
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if ended == 0:
            return code
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)


def clear(patience_s: float) -> None:
    """Wait for all descendants of this process to end, ``patience_s`` seconds, then kill them until none is left."""
    began = time.monotonic()
    me = psutil.Process()
    while (waited := time.monotonic() - began) < patience_s + _UNKILLABLE_S:
        _reap(0)
        left = me.children(recursive=True)
        if not left:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess):
                if waited >= patience_s + (TRACKERS_S if _is_tracker(process) else 0):
                    process.kill()
        time.sleep(0.02)


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is there to remove the shared memory of others once they have ended, and then ends by itself."""
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())


def _signals() -> int:
    """A pipe that yields the numbers of the signals that arrive; they have no other effect on this process."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    return read


def adopt_orphans() -> None:
    """From now on what a descendant of this process leaves behind becomes its child (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
