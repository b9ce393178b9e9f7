"""What ``kv = "keep"`` leans on in vLLM is looked for by name, and what is not there is named."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lorabridge.rollout.plugin.engine import _missing

POOL = "vllm.v1.core.block_pool"


@pytest.fixture
def block_pool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for vLLM's module, and for the packages it is in."""
    module = ModuleType(POOL)
    module.BlockHashToBlockMap = dict  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, POOL, module)
    return module


def engine() -> SimpleNamespace:
    """As much of an EngineCore as a swap that keeps KV touches."""
    pool = SimpleNamespace(blocks=[], cached_block_hash_to_block={}, cached_block_hashes_by_block={})
    scheduler = SimpleNamespace(
        running=[],
        _preempt_request=print,
        prev_step_scheduled_req_ids=set(),
        kv_cache_manager=SimpleNamespace(block_pool=pool),
    )
    return SimpleNamespace(scheduler=scheduler)


def test_an_engine_that_has_everything_lacks_nothing(block_pool: ModuleType) -> None:
    assert _missing(engine()) == []


@pytest.mark.parametrize("part", ["running", "_preempt_request", "prev_step_scheduled_req_ids"])
def test_a_part_of_the_scheduler_that_is_gone_is_named(part: str, block_pool: ModuleType) -> None:
    lacking = engine()
    delattr(lacking.scheduler, part)
    assert _missing(lacking) == [f"scheduler.{part}"]


def test_a_block_pool_that_is_gone_is_named(block_pool: ModuleType) -> None:
    lacking = engine()
    del lacking.scheduler.kv_cache_manager.block_pool.blocks
    assert _missing(lacking) == ["scheduler.kv_cache_manager.block_pool.blocks"]
    del block_pool.BlockHashToBlockMap
    assert _missing(engine()) == [f"{POOL}.BlockHashToBlockMap"]
