"""Methods for EngineCore, called by name through the engine's own utility channel. They run in the engine's process,
between steps.

A request that is preempted for lack of KV loses it, and when it goes on everything before is computed under the weights
of that moment. Where that happened is written down, and shown by the engine's label: ``<instance>:<epoch>~<n>``, where
n counts such preemptions, so that a request which lived through one has tokens under two labels.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from typing import Any

FORGET = "lorabridge_forget_prefixes"
ABORT = "lorabridge_abort_adapter"
MISSING = "lorabridge_missing"
LABEL = "lorabridge_label"
RESTARTS = "lorabridge_restarts"

_REMEMBERED = 65_536


def add_engine_methods() -> None:
    """Entry point of ``vllm.general_plugins``."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, LABEL, _label)
    setattr(EngineCore, RESTARTS, _restarts)
    setattr(EngineCore, FORGET, _forget_prefixes)
    setattr(EngineCore, ABORT, _abort_adapter)
    setattr(EngineCore, MISSING, _missing)


class Watch:
    """Where requests lost their KV to others: by external request id, numbers of sampled tokens at those moments."""

    def __init__(self) -> None:
        self.label = ""
        self.count = 0
        self.restarts: OrderedDict[str, list[int]] = OrderedDict()
        self.forgot = False

    def note(self, request_id: str, sampled: int) -> None:
        """A request that had ``sampled`` tokens was preempted."""
        self.count += 1
        self.restarts.setdefault(external(request_id), []).append(sampled)
        if len(self.restarts) > _REMEMBERED:
            self.restarts.popitem(last=False)
            self.forgot = True

    @property
    def shown(self) -> str:
        """The engine's label."""
        return f"{self.label}~{self.count}" if self.count else self.label


def external(request_id: str) -> str:
    """vLLM adds a dash and eight random characters to the id that a client sees."""
    return request_id.rpartition("-")[0]


def _label(self: Any, label: str) -> None:
    """Label tokens from here on; the first call begins to watch the scheduler."""
    watch = _watch(self)
    watch.label = label
    self.set_weight_version(watch.shown)


def _watch(self: Any) -> Watch:
    found: Watch | None = getattr(self, "lorabridge_watch", None)
    if found is not None:
        return found
    watch = self.lorabridge_watch = Watch()
    preempt = self.scheduler._preempt_request

    def preempt_and_note(request: Any, *arguments: Any, **keywords: Any) -> None:
        preempt(request, *arguments, **keywords)
        # While the scheduler is paused it is a swap that does this, and the swap's record says so.
        if request.num_output_tokens and self.scheduler.pause_state.name == "UNPAUSED":
            watch.note(request.request_id, request.num_output_tokens)
            self.set_weight_version(watch.shown)

    self.scheduler._preempt_request = preempt_and_note
    return watch


def _restarts(self: Any, request_ids: list[str]) -> list[list[int] | None]:
    """For each request that has ended: where its KV began afresh, None if that has been forgotten. Told once."""
    watch = _watch(self)
    return [watch.restarts.pop(one, None if watch.forgot else []) for one in request_ids]


def _forget_prefixes(self: Any) -> int:
    """Forget which prefixes are cached, while running requests keep their KV; how many requests began again.

    A request that waits must not start on prefix blocks of the old weights. One that was caught inside its prompt, or
    inside what it computes again after a preemption, would have that computed under two adapters with no sampled token
    to show for it, so it begins again. One that keeps its KV puts nothing into the cache any more: what it computes
    from here on lies on old KV, and would be found by its like, or by itself after a preemption.
    """
    from vllm.v1.core.block_pool import BlockHashToBlockMap

    scheduler = self.scheduler
    begun_again = 0
    for request in [r for r in scheduler.running if _is_inside_its_prefill(r)]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        begun_again += 1
    pool = scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        manager.num_cached_block.update((request.request_id, sys.maxsize) for request in scheduler.running)
    return begun_again


def _is_inside_its_prefill(request: Any) -> bool:
    """One that decodes has everything computed but the token that it sampled last."""
    return bool(request.num_output_tokens == 0 or request.num_computed_tokens < request.num_tokens - 1)


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
        "scheduler.pause_state",
        "scheduler.prev_step_scheduled_req_ids",
        "scheduler.kv_cache_manager.coordinator.single_type_managers",
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
