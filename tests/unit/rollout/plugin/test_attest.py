"""Attestation on a stand-in for vLLM's LoRA manager: whatever else than the right adapter sits in a slot is noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.rollout.plugin.attest import Attest, _sum, matrices

POLICY, OTHER = 1, 2
MODULES = ("q_proj", "qkv", "idle")


def weights(seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        lora_a=[torch.randn(4, 8, generator=draw)], lora_b=[torch.randn(8, 4, generator=draw)]
    )  # fmt: skip


class Module:
    """A layer with two slots; a packed one has several matrices, and one place that nothing is packed into."""

    def __init__(self, packed: int = 1) -> None:
        self.lora_a_stacked = [torch.zeros(2, 4, 8) for _ in range(packed)] + [None]
        self.lora_b_stacked = [torch.zeros(2, 8, 4) for _ in range(packed)]

    def set_lora(self, slot: int, lora_a: list[torch.Tensor], lora_b: list[torch.Tensor]) -> None:
        for stacked, matrix in zip([t for t in self.lora_a_stacked if t is not None], lora_a * 9, strict=False):
            stacked[slot] = matrix
        for stacked, matrix in zip(self.lora_b_stacked, lora_b * 9, strict=False):
            stacked[slot] = matrix


class Manager:
    """Which adapter is in which slot, and a folder that stands for an adapter's seed."""

    def __init__(self) -> None:
        self.modules = {"q_proj": Module(), "qkv": Module(packed=3), "idle": Module()}
        self.lora_index_to_id: list[int | None] = [None, None]
        self.registered: set[int] = set()

    def load(self, lora_int_id: int, seed: int) -> None:
        if lora_int_id not in self.lora_index_to_id:
            self.lora_index_to_id[self.lora_index_to_id.index(None)] = lora_int_id
        slot = self.lora_index_to_id.index(lora_int_id)
        for name in MODULES[:2]:
            given = weights(seed)
            self.modules[name].set_lora(slot, given.lora_a, given.lora_b)

    def _create_merged_loras_inplace(self, fresh: Any) -> None: ...

    def _get_lora_layer_weights(self, fresh: Any, name: str) -> Any:
        return fresh.loras.get(name)


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def attest(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> Attest:
    module = ModuleType("vllm.lora.request")
    module.LoRARequest = lambda name, number, path: int(path)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)

    def fresh(seed: int) -> Any:
        return SimpleNamespace(loras={name: weights(seed) for name in MODULES[: 3 if seed == 99 else 2]} | (
            {"nowhere": weights(seed)} if seed == 98 else {}
        ))  # fmt: skip

    worker = Attest()
    worker.model_runner = SimpleNamespace(
        lora_manager=SimpleNamespace(
            _adapter_manager=manager, _load_adapter=fresh, list_adapters=lambda: manager.registered
        )
    )
    return worker


def test_the_right_adapter_is_right_and_stays_so(attest: Attest, manager: Manager) -> None:
    manager.load(POLICY, 7)
    seen = attest.lorabridge_attest(POLICY, "7")
    assert seen == {"resident": True, "applied": 2, "different": [], "unplaced": []}
    assert attest.lorabridge_unchanged(POLICY) == {"resident": True, "changed": []}
    assert attest.lorabridge_resident() == [POLICY]


def test_an_adapter_that_only_memory_holds_is_resident(attest: Attest, manager: Manager) -> None:
    manager.registered = {POLICY}
    assert attest.lorabridge_resident() == [POLICY]


def test_what_was_proven_of_an_adapter_that_was_taken_out_is_forgotten(attest: Attest, manager: Manager) -> None:
    manager.load(POLICY, 7)
    attest.lorabridge_attest(POLICY, "7")
    attest.lorabridge_forget(POLICY)
    assert attest.lorabridge_unchanged(POLICY) == {"resident": False}


def test_an_adjacent_version_or_an_empty_slot_is_told_from_the_right_one(attest: Attest, manager: Manager) -> None:
    assert attest.lorabridge_attest(POLICY, "7") == {"resident": False}
    manager.load(POLICY, 6)
    assert attest.lorabridge_attest(POLICY, "7")["different"] == ["q_proj", "qkv"]
    manager.lora_index_to_id = [POLICY, None]
    for module in manager.modules.values():
        module.set_lora(0, [torch.zeros(4, 8)], [torch.zeros(8, 4)])
    assert attest.lorabridge_attest(POLICY, "7")["different"] == ["q_proj", "qkv"]


def test_weights_that_no_module_takes_are_named(attest: Attest, manager: Manager) -> None:
    manager.load(POLICY, 98)
    assert attest.lorabridge_attest(POLICY, "98")["unplaced"] == ["nowhere"]


def test_something_left_in_a_module_that_the_adapter_does_not_change_is_noticed(
    attest: Attest, manager: Manager
) -> None:
    manager.load(POLICY, 7)
    manager.modules["idle"].lora_b_stacked[0][0, 3, 3] = 1e-30
    assert attest.lorabridge_attest(POLICY, "7")["different"] == ["idle"]


class Embedding:
    """One tensor for all slots, as vLLM's embeddings and output have it."""

    def __init__(self) -> None:
        self.lora_a_stacked, self.lora_b_stacked = torch.zeros(2, 20, 4), torch.zeros(2, 1, 8, 4)


@pytest.mark.parametrize("slot", [0, 1])
def test_what_is_left_in_an_embedding_is_noticed_in_the_slot_where_it_is(
    slot: int, attest: Attest, manager: Manager
) -> None:
    idle = Embedding()
    manager.modules["idle"] = idle  # type: ignore[assignment]
    for policy, seed in ((POLICY, 7), (OTHER, 5)):
        manager.load(policy, seed)
        assert attest.lorabridge_attest(policy, str(seed))["different"] == []
    idle.lora_b_stacked[slot, 0, 7, 3] = 1e-30
    policies = [POLICY, OTHER]
    assert attest.lorabridge_unchanged(policies[slot])["changed"] == ["idle"]
    assert attest.lorabridge_attest(policies[slot], "7" if slot == 0 else "5")["different"] == ["idle"]
    assert attest.lorabridge_unchanged(policies[1 - slot])["changed"] == []


def test_experts_are_looked_at_whole() -> None:
    w13, w2 = (torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8)), (torch.zeros(2, 3, 4, 16),)
    experts = SimpleNamespace(
        w13_lora_a_stacked=w13, w13_lora_b_stacked=w13, w2_lora_a_stacked=w2, w2_lora_b_stacked=w2,
        lora_a_stacked=[w13[0][0, 0]], lora_b_stacked=[],
    )  # fmt: skip
    assert [tuple(each.shape) for each in matrices(experts)] == [(2, 3, 4, 8)] * 2 + [(2, 3, 4, 16)] + [
        (2, 3, 4, 8)
    ] * 2 + [(2, 3, 4, 16)]


def empty(manager: Manager) -> None:
    for module in manager.modules.values():
        module.set_lora(0, [torch.zeros(4, 8)], [torch.zeros(8, 4)])


def scale_twice(manager: Manager) -> None:
    for module in manager.modules.values():
        module.lora_b_stacked[0][0] *= 2


def one_bit(manager: Manager) -> None:
    matrix = manager.modules["qkv"].lora_b_stacked[2][0].view(torch.int32)
    matrix[5, 2] ^= 1


def swap_two_rows(manager: Manager) -> None:
    matrix = manager.modules["q_proj"].lora_b_stacked[0][0]
    matrix[[0, 1]] = matrix[[1, 0]].clone()


@pytest.mark.parametrize(
    "fault",
    [empty, scale_twice, one_bit, swap_two_rows, lambda manager: manager.load(POLICY, 8)],
    ids=["slot emptied", "scale applied twice", "one bit", "rows exchanged", "another adapter in the slot"],
)
def test_a_slot_that_changed_behind_our_back_is_noticed_without_the_adapter(
    fault: Callable[[Manager], None], attest: Attest, manager: Manager
) -> None:
    manager.load(POLICY, 7)
    manager.load(OTHER, 5)
    attest.lorabridge_attest(POLICY, "7")
    attest.lorabridge_attest(OTHER, "5")
    fault(manager)
    assert attest.lorabridge_unchanged(POLICY)["changed"]
    assert attest.lorabridge_unchanged(OTHER) == {"resident": True, "changed": []}


def test_an_adapter_that_left_its_slot_or_was_never_proven_is_not_resident(attest: Attest, manager: Manager) -> None:
    manager.load(POLICY, 7)
    assert attest.lorabridge_unchanged(POLICY) == {"resident": False}  # missing evidence is a failure
    attest.lorabridge_attest(POLICY, "7")
    manager.lora_index_to_id = [OTHER, None]
    assert attest.lorabridge_unchanged(POLICY) == {"resident": False}


def test_a_wrong_adapter_is_never_counted_as_proven(attest: Attest, manager: Manager) -> None:
    manager.load(POLICY, 6)
    attest.lorabridge_attest(POLICY, "7")  # writes over the slot with what it compared with
    assert attest.lorabridge_unchanged(POLICY) == {"resident": False}


@given(st.integers(0, 31), st.integers(1, 2**31 - 1), st.sampled_from([torch.int16, torch.int32, torch.int64]))
def test_no_change_of_one_element_is_lost_in_a_sum(place: int, change: int, kind: torch.dtype) -> None:
    matrix = torch.arange(32, dtype=kind)
    before = _sum(matrix)
    matrix[place] ^= change & (0x7FFF if kind is torch.int16 else 0x7FFFFFFF) or 1
    assert _sum(matrix) != before
