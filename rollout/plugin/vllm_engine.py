"""The only file of the plugin that knows vLLM's objects: what a swap needs of the engine, in our words."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lorabridge.bridge.canary import Logprobs
from lorabridge.bridge.residency import KvMode
from lorabridge.rollout.plugin.engine import ABORT, FORGET, LABEL, MISSING, RESTARTS


class PlacementFailed(Exception):
    """The adapter did not get into the slot, or what is in the slot is not the adapter. ``str`` says what was seen."""


class Engine(Protocol):
    """What a swap needs; ``VllmEngine`` is the real one."""

    async def pause(self, kv: KvMode) -> None: ...

    async def place(self, name: str, folder: Path) -> None:
        """Put the adapter into the slot called ``name`` and attest it. Raises ``PlacementFailed``."""
        ...

    async def attest(self, name: str) -> None:
        """Is the slot what it was when it was placed? Raises ``PlacementFailed``."""
        ...

    async def abort(self, name: str) -> None:
        """End the slot's requests, telling their clients so."""
        ...

    async def remove(self, name: str) -> None:
        """End the slot's requests, take its adapter out and free its memory. Raises ``PlacementFailed`` if it stays."""
        ...

    async def forget_prefixes(self) -> None: ...

    async def label(self, label: str) -> None: ...

    async def score(self, name: str | None, sequences: Sequence[Sequence[int]]) -> Logprobs:
        """Logprobs of each token after those before it, from the second on, with the slot's adapter or with none."""
        ...

    async def resume(self) -> None: ...


class VllmEngine:
    """vLLM 0.32: ``AsyncLLM`` and ``OpenAIServingModels``."""

    def __init__(self, client: Any, models: Any) -> None:
        self._client, self._models = client, models

    async def missing(self) -> list[str]:
        """What this engine lacks that ``kv = "keep"`` leans on."""
        missing: list[str] = await self._client.engine_core.call_utility_async(MISSING)
        return missing

    async def pause(self, kv: KvMode) -> None:
        # pause_generation does the same and then sleeps for 20 ms.
        await self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=kv == "recompute")

    async def place(self, name: str, folder: Path) -> None:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        load = LoadLoRAAdapterRequest(lora_name=name, lora_path=str(folder), load_inplace=True)
        answer = await self._models.load_lora_adapter(load)
        if not isinstance(answer, str):
            raise PlacementFailed(f"vLLM did not load it: {answer.error.message}")
        request = self._models.lora_requests[name]
        request.load_inplace = False  # else every request re-reads the adapter from disk at every step
        for rank, seen in enumerate(await self._client.collective_rpc(
            "lorabridge_attest", args=(request.lora_int_id, str(folder))
        )):  # fmt: skip
            if not seen["resident"]:
                raise PlacementFailed(f"rank {rank}: the adapter is in no slot")
            if seen["unplaced"]:
                raise PlacementFailed(f"rank {rank}: no module of the model takes {seen['unplaced'][0]}")
            if not seen["applied"]:
                raise PlacementFailed(f"rank {rank}: the adapter changes no module")
            if seen["different"]:
                raise PlacementFailed(f"rank {rank}: the slot of {seen['different'][0]} held something else")

    async def attest(self, name: str) -> None:
        request = self._models.lora_requests.get(name)
        if request is None:
            raise PlacementFailed("vLLM does not know it any more")
        if request.load_inplace:
            raise PlacementFailed("vLLM would read it from disk again at every step")
        for rank, seen in enumerate(await self._client.collective_rpc(
            "lorabridge_unchanged", args=(request.lora_int_id,)
        )):  # fmt: skip
            if not seen["resident"]:
                raise PlacementFailed(f"rank {rank}: the adapter is in no slot")
            if seen["changed"]:
                raise PlacementFailed(f"rank {rank}: the slot of {seen['changed'][0]} has changed since it was proven")

    async def abort(self, name: str) -> None:
        request = self._models.lora_requests.get(name)
        if request is not None:
            await self._abort(request)

    async def remove(self, name: str) -> None:
        request = self._models.lora_requests.pop(name, None)
        if request is not None:
            await self._abort(request)
        # A load that failed late has left an adapter in the engine that no name leads to.
        for lora_int_id in await self._strays():
            await self._client.remove_lora(lora_int_id)
            await self._client.collective_rpc("lorabridge_forget", args=(lora_int_id,))
        if left := await self._strays():
            raise PlacementFailed(f"the engine still holds the adapter of {name} (id {min(left)})")

    async def _strays(self) -> set[int]:
        """Adapters that some rank holds and no name leads to."""
        known = {request.lora_int_id for request in self._models.lora_requests.values()}
        held: list[list[int]] = await self._client.collective_rpc("lorabridge_resident")
        return {lora_int_id for resident in held for lora_int_id in resident} - known

    async def _abort(self, request: Any) -> None:
        await self._client.engine_core.call_utility_async(ABORT, request.lora_int_id)

    async def forget_prefixes(self) -> None:
        await self._client.engine_core.call_utility_async(FORGET)

    async def label(self, label: str) -> None:
        await self._client.engine_core.call_utility_async(LABEL, label)

    async def score(self, name: str | None, sequences: Sequence[Sequence[int]]) -> Logprobs:
        adapter = self._models.lora_requests[name] if name is not None else None
        return tuple(await asyncio.gather(*(self._score(list(ids), adapter) for ids in sequences)))

    async def _score(self, ids: list[int], adapter: Any) -> tuple[float, ...]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
        name = f"lorabridge-score-{uuid.uuid4().hex}"
        async for output in self._client.generate(
            {"prompt_token_ids": ids}, parameters, request_id=name, lora_request=adapter
        ):
            last = output
        return tuple(float(at[token].logprob) for at, token in zip(last.prompt_logprobs[1:], ids[1:], strict=True))

    async def restarts(self, request_ids: list[str]) -> list[list[int] | None]:
        """For each request that has ended: after how many sampled tokens its KV was computed afresh."""
        found: list[list[int] | None] = await self._client.engine_core.call_utility_async(RESTARTS, request_ids)
        return found

    async def resume(self) -> None:
        await self._client.resume_generation()
