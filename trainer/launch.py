"""Start torchrun's ranks and give back their exit code, without torchrun's traceback."""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import psutil

from lorabridge.bridge.stopping import SIGNALS


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``lorabridge.trainer.grpo`` on ``processes`` ranks of this machine; the first failed rank's exit code, or 0.

    The same as ``torchrun --standalone --local-addr localhost --nproc-per-node N -m lorabridge.trainer.grpo ...``. A
    signal ends the ranks where they are, as there is nothing to drain: a version is committed or is not, and a sample
    is acknowledged by the step that used it. The code is then 128 and the signal's number.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The failed rank has said what is wrong in a sentence of its own.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # ranks meet here, not at what this machine's name resolves to, if it does
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # the others are ours
    )
    asked: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        """As torch's own handler, but once, and ranks are sent SIGTERM: Ctrl-C would have each print a traceback."""
        if not asked:
            asked.append(number)
            raise SignalException(f"signal {number}", sigval=signal.SIGTERM)

    for number in SIGNALS:
        signal.signal(number, end)
    try:
        elastic_launch(config, sys.executable)("-m", "lorabridge.trainer.grpo", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        return 128 + (asked[0] if asked else int(stopped.sigval))
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the process is on its way out
        # A signal that came while ranks were being started has torch forget those that it had.
        for left in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                left.kill()
                left.wait()
    return 0
