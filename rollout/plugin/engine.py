"""Two methods for EngineCore, called by name through the engine's own utility channel.

They run in the engine's process, between steps, while the scheduler is paused.
"""

from __future__ import annotations

import time
from typing import Any

FORGET = "lorabridge_forget_prefixes"
ABORT = "lorabridge_abort_adapter"
MISSING = "lorabridge_missing"


def add_engine_methods() -> None:
    """Entry point of ``vllm.general_plugins``."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, FORGET, _forget_prefixes)
    setattr(EngineCore, ABORT, _abort_adapter)
    setattr(EngineCore, MISSING, _missing)


def _forget_prefixes(self: Any) -> int:
    """Forget which prefixes are cached, while running requests keep their KV; how many requests began again.

    A request that waits must not start on prefix blocks of the old weights. One that was caught inside its prompt
    would have a prompt computed under two adapters with no sampled token to show for it, so it begins again.
    """
    from vllm.v1.core.block_pool import BlockHashToBlockMap

    scheduler = self.scheduler
    begun_again = 0
    for request in [r for r in scheduler.running if r.num_output_tokens == 0]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        begun_again += 1
    pool = scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
    return begun_again


def _abort_adapter(self: Any, lora_int_id: int) -> int:
    """End every request of one adapter, telling its client so; how many there were."""
    from vllm.v1.request import RequestStatus

    ids = [r.request_id for r in self.scheduler.requests.values() if _adapter_of(r) == lora_int_id]
    aborted = self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
    self._send_abort_outputs(aborted)
    return len(ids)


def _adapter_of(request: Any) -> int | None:
    return request.lora_request.lora_int_id if request.lora_request else None


def _missing(self: Any) -> list[str]:
    """What ``kv = "keep"`` leans on and this engine does not have."""
    try:
        from vllm.v1.core.block_pool import BlockHashToBlockMap  # noqa: F401
    except ImportError:
        return ["vllm.v1.core.block_pool.BlockHashToBlockMap"]
    parts = (
        "scheduler.running",
        "scheduler._preempt_request",
        "scheduler.prev_step_scheduled_req_ids",
        "scheduler.kv_cache_manager.block_pool.blocks",
        "scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block",
        "scheduler.kv_cache_manager.block_pool.cached_block_hashes_by_block",
    )
    return [part for part in parts if not _has(self, part)]


def _has(root: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(root, name):
            return False
        root = getattr(root, name)
    return True
