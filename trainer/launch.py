"""Start torchrun's ranks and give back their exit code, without torchrun's traceback."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Sequence


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Run ``lorabridge.trainer.grpo`` on ``processes`` ranks of this machine; the first failed rank's exit code, or 0.

    The same as ``torchrun --standalone --local-addr localhost --nproc-per-node N -m lorabridge.trainer.grpo ...``.
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
    )
    try:
        elastic_launch(config, sys.executable)("-m", "lorabridge.trainer.grpo", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0
