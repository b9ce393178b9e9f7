"""What the plugin asks of vLLM's objects, on stand-ins for them: every rank is looked at, and what is out is out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lorabridge.rollout.plugin.vllm_engine import PlacementFailed, VllmEngine

RIGHT: dict[str, Any] = {"resident": True, "applied": 2, "different": [], "unplaced": []}


class Vllm:
    """``OpenAIServingModels`` and the engine's client in one; ``answers`` are the ranks' to each question."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.answers: dict[str, list[Any]] = {"lorabridge_attest": [RIGHT, RIGHT], "lorabridge_forget": [None, None]}
        self.held: list[set[int]] = [set(), set()]
        self.stuck: set[int] = set()
        self.aborted: list[int] = []
        self.fails: str | None = None
        self.engine_core = self

    async def load_lora_adapter(self, load: Any) -> Any:
        number = len(self.lora_requests) + 1
        for rank in self.held:
            rank.add(number)
        if self.fails:
            return SimpleNamespace(error=SimpleNamespace(message=self.fails))
        self.lora_requests[load.lora_name] = SimpleNamespace(lora_int_id=number, load_inplace=load.load_inplace)
        return "Success"

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [sorted(rank) for rank in self.held] if name == "lorabridge_resident" else self.answers[name]

    async def call_utility_async(self, name: str, lora_int_id: int) -> None:
        self.aborted.append(lora_int_id)

    async def remove_lora(self, lora_int_id: int) -> None:
        for rank in self.held:
            rank -= {lora_int_id} - self.stuck


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    name = "vllm.entrypoints.serve.lora.protocol"
    module = ModuleType(name)
    module.LoadLoRAAdapterRequest = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return Vllm()


@pytest.fixture
def engine(vllm: Vllm) -> VllmEngine:
    return VllmEngine(vllm, vllm)


async def test_a_placed_adapter_is_not_read_from_disk_at_every_step(vllm: Vllm, engine: VllmEngine) -> None:
    await engine.place("p", Path("/loads/1"))
    assert vllm.lora_requests["p"].load_inplace is False


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({"resident": False}, "rank 1: the adapter is in no slot"),
        (RIGHT | {"different": ["q_proj"]}, "rank 1: the slot of q_proj held something else"),
        (RIGHT | {"unplaced": ["lm_head"]}, "rank 1: no module of the model takes lm_head"),
        (RIGHT | {"applied": 0}, "rank 1: the adapter changes no module"),
    ],
)
async def test_one_rank_that_keeps_the_old_one_is_enough(
    seen: dict[str, Any], says: str, vllm: Vllm, engine: VllmEngine
) -> None:
    vllm.answers["lorabridge_attest"] = [RIGHT, seen]
    with pytest.raises(PlacementFailed, match=says):
        await engine.place("p", Path("/loads/1"))


@pytest.mark.parametrize(
    ("seen", "says"), [({"resident": False}, "in no slot"), ({"resident": True, "changed": ["q"]}, "has changed")]
)
async def test_one_rank_whose_slot_changed_is_enough(
    seen: dict[str, Any], says: str, vllm: Vllm, engine: VllmEngine
) -> None:
    await engine.place("p", Path("/loads/1"))
    vllm.answers["lorabridge_unchanged"] = [{"resident": True, "changed": []}] * 2
    await engine.attest("p")
    vllm.answers["lorabridge_unchanged"] = [{"resident": True, "changed": []}, seen]
    with pytest.raises(PlacementFailed, match=f"rank 1: .*{says}"):
        await engine.attest("p")


async def test_what_is_removed_is_out_of_every_rank_and_its_requests_have_ended(vllm: Vllm, engine: VllmEngine) -> None:
    for name in ("p", "q"):
        await engine.place(name, Path("/loads/1"))
    await engine.remove("p")
    assert (vllm.held, vllm.aborted, set(vllm.lora_requests)) == ([{2}, {2}], [1], {"q"})


async def test_a_load_that_failed_late_leaves_nothing_in_the_engine(vllm: Vllm, engine: VllmEngine) -> None:
    vllm.fails = "a shape does not fit"
    with pytest.raises(PlacementFailed, match="a shape does not fit"):
        await engine.place("p", Path("/loads/1"))
    assert vllm.held == [{1}, {1}]
    await engine.remove("p")
    assert vllm.held == [set(), set()]


async def test_an_adapter_that_does_not_leave_one_rank_is_said_so(vllm: Vllm, engine: VllmEngine) -> None:
    await engine.place("p", Path("/loads/1"))
    vllm.stuck = {1}
    with pytest.raises(PlacementFailed, match="still holds the adapter of p"):
        await engine.remove("p")
