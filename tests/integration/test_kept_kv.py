"""What a swap that keeps KV leaves in vLLM's own prefix cache: nothing that was not computed whole since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.kv_cache_manager")

from lorabridge.rollout.plugin.engine import FORGET, add_engine_methods

BLOCK = 16
PROMPT = [7] * (2 * BLOCK + 4)
SAMPLED = 2 * BLOCK


@pytest.fixture
def manager() -> Any:
    """vLLM's KV manager, with blocks for everybody."""
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


def request_for(name: str) -> Any:
    """A request of an adapter that was loaded from one path, as all that are in flight at a swap are."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        name, list(PROMPT), SamplingParams(max_tokens=99), None, lora_request=LoRARequest("policy", 1, "/loads/1"),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )  # fmt: skip


def compute(manager: Any, request: Any) -> int:
    """Compute everything that a request has; how many tokens of it the cache had already."""
    found, cached, _ = manager.get_computed_blocks(request)
    manager.allocate_slots(request, request.num_tokens - cached, cached, found)
    request.num_computed_tokens = request.num_tokens
    return int(cached)


def decode(manager: Any, request: Any, count: int) -> None:
    for _ in range(count):
        request.append_output_token_ids(9)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1


def swap(manager: Any, running: list[Any]) -> None:
    from vllm.v1.engine.core import EngineCore

    add_engine_methods()
    scheduler = SimpleNamespace(running=running, kv_cache_manager=manager)
    assert getattr(EngineCore, FORGET)(SimpleNamespace(scheduler=scheduler)) == 0


def test_a_request_that_begins_afresh_finds_no_block_that_lies_on_old_kv(manager: Any) -> None:
    kept, other = request_for("kept"), request_for("other")
    for request in (kept, other):
        compute(manager, request)
        decode(manager, request, 2)
    swap(manager, [kept, other])
    decode(manager, kept, SAMPLED)  # new blocks, of new weights, that attend to KV of the old

    # The other is preempted: what it computes again is of the new weights, and leads to the next block's name.
    manager.free(other)
    other.num_computed_tokens = 0
    assert compute(manager, other) == 0
    manager.free(kept)
    kept.num_computed_tokens = 0
    cached = compute(manager, kept)
    assert cached == 2 * BLOCK, "of what is there, only what the other computed whole since the swap may be found"


def test_after_a_swap_the_cache_serves_those_that_begin(manager: Any) -> None:
    kept = request_for("kept")
    compute(manager, kept)
    decode(manager, kept, 2)
    swap(manager, [kept])
    assert compute(manager, request_for("first")) == 0
    assert compute(manager, request_for("second")) == 2 * BLOCK
