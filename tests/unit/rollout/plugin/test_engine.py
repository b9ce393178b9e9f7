"""What ``kv = "keep"`` leans on in vLLM is looked for by name, and what is not there is named."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lorabridge.rollout.plugin.engine import _is_inside_its_prefill, _label, _missing, _restarts

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
        pause_state=SimpleNamespace(name="UNPAUSED"),
        prev_step_scheduled_req_ids=set(),
        kv_cache_manager=SimpleNamespace(
            block_pool=pool, coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(num_cached_block={})])
        ),
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


class Core(SimpleNamespace):
    """An EngineCore with a scheduler that preempts, and a label."""

    def __init__(self) -> None:
        super().__init__(scheduler=engine().scheduler, label="", preempted=[])
        self.scheduler._preempt_request = self.preempt

    def preempt(self, request: SimpleNamespace, *_: object, **__: object) -> None:
        self.preempted.append(request.request_id)

    def set_weight_version(self, label: str) -> None:
        self.label = label


def request(name: str, sampled: int) -> SimpleNamespace:
    return SimpleNamespace(request_id=f"{name}-01234567", num_output_tokens=sampled)


def test_a_preemption_is_written_down_and_shown_by_the_label() -> None:
    core = Core()
    _label(core, "i:1")
    assert core.label == "i:1"
    core.scheduler._preempt_request(request("a", 5), 0.0, drop_stale_output=False)
    assert (core.label, core.preempted) == ("i:1~1", ["a-01234567"])
    _label(core, "i:2")
    assert core.label == "i:2~1"  # it rises only: tokens before and after a preemption never share a label
    core.scheduler._preempt_request(request("a", 9), 0.0)
    assert core.label == "i:2~2"
    assert _restarts(core, ["a", "b"]) == [[5, 9], []]
    assert _restarts(core, ["a"]) == [[]]


def test_what_a_swap_does_to_requests_is_no_preemption_nor_is_one_without_tokens() -> None:
    core = Core()
    _label(core, "i:1")
    core.scheduler._preempt_request(request("a", 0), 0.0)
    core.scheduler.pause_state.name = "PAUSED_ALL"
    core.scheduler._preempt_request(request("a", 5), 0.0)
    assert core.label == "i:1"
    assert _restarts(core, ["a"]) == [[]]
    assert len(core.preempted) == 2


def test_what_has_been_forgotten_is_not_taken_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorabridge.rollout.plugin.engine._REMEMBERED", 2)
    core = Core()
    _label(core, "i:1")
    for name in "abc":
        core.scheduler._preempt_request(request(name, 1), 0.0)
    assert _restarts(core, ["a", "b", "never"]) == [None, [1], None]


@pytest.mark.parametrize(
    ("sampled", "computed", "inside"), [(0, 0, True), (0, 9, True), (3, 12, False), (3, 11, True), (3, 0, True)]
)
def test_a_request_is_inside_its_prefill_until_all_but_its_last_token_are_computed(
    sampled: int, computed: int, inside: bool
) -> None:
    prompt = 10
    given = SimpleNamespace(num_output_tokens=sampled, num_computed_tokens=computed, num_tokens=prompt + sampled)
    assert _is_inside_its_prefill(given) is inside
