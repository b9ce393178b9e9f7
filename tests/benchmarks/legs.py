"""The ways to change what a server samples from, each under the same traffic: ours, TRL's and vLLM's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Protocol

import httpx

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import KvMode, SwapMode
from lorabridge.rollout.generator import Generator

Phases = dict[str, float]
_OLD = 5  # TRL unloads the version that is ``max_staleness`` + 1 behind, and ``max_staleness`` is 4


class Leg(Protocol):
    """One way. ``model`` is what a new request names, at ``generator``; ``swaps`` is whether it swaps at all.

    ``drops_kv`` is whether a swap has what is running prefilled again.
    """

    title: str
    generator: Generator
    drops_kv: bool
    swaps: bool

    @property
    def model(self) -> str: ...

    async def begin(self) -> None:
        """Have one version served."""
        ...

    async def swap(self) -> Phases:
        """The next version; milliseconds of each phase in which nothing is sampled, and of ``fetch``, before it."""
        ...

    async def end(self) -> None:
        """Take away what would be in another's way."""
        ...


class Ours:
    """A swap of ours, in flight or pinned; without ``swaps`` it is what the others are compared with."""

    def __init__(
        self, title: str, generator: Generator, versions: Iterator[Manifest], *, mode: SwapMode = "in_flight",
        kv: KvMode | None = None, swaps: bool = True,
    ) -> None:  # fmt: skip
        self.title, self.generator, self.swaps = title, generator, swaps
        self.drops_kv = kv == "recompute"
        self._versions, self._mode, self._kv = versions, mode, kv
        self._policy = ""

    @property
    def model(self) -> str:
        return self._policy

    async def begin(self) -> None:
        await self.swap()

    async def swap(self) -> Phases:
        manifest, state = next(self._versions), await self.generator.state()
        self._policy = manifest.policy
        reply = await self.generator.swap(manifest, state.residency, self._kv, mode=self._mode, fence=state.fence)
        return reply.phases_ms

    async def end(self) -> None:
        return None


class Stock:
    """vLLM's own routes, as their users call them."""

    drops_kv, swaps = False, True

    def __init__(self, title: str, generator: Generator, adapters: Iterator[Path]) -> None:
        self.title, self.generator, self._adapters = title, generator, adapters
        self._client = httpx.AsyncClient(base_url=generator.url, timeout=60)
        self._loaded: list[str] = []

    @property
    def model(self) -> str:
        return self._loaded[-1]

    async def begin(self) -> None:
        await self.swap()

    async def swap(self) -> Phases:
        raise NotImplementedError

    async def end(self) -> None:
        for name in self._loaded:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name})
        self._loaded = []

    async def _load(self, name: str, *, in_place: bool) -> None:
        load = {"lora_name": name, "lora_path": str(next(self._adapters)), "load_inplace": in_place}
        await self._post("/v1/load_lora_adapter", load)

    async def _post(self, path: str, body: object = None) -> None:
        (await self._client.post(path, json=body)).raise_for_status()


class Trl(Stock):
    """TRL 1.16's ``AsyncGRPOTrainer._sync_weight_lora``: a new name per version, loaded while the engine is paused.

    TRL also writes the files while it is paused; here they are there before.
    """

    drops_kv = True
    _version = count(1)

    async def swap(self) -> Phases:
        watch = [time.perf_counter()]
        await self._post("/pause?mode=keep")
        watch.append(time.perf_counter())
        name = f"adapter-v{next(self._version)}"
        await self._load(name, in_place=False)
        self._loaded.append(name)
        watch.append(time.perf_counter())
        await self._post("/resume")
        watch.append(time.perf_counter())
        if len(self._loaded) > _OLD:
            await self._post("/v1/unload_lora_adapter", {"lora_name": self._loaded.pop(0)})
        laps = [(after - before) * 1000 for before, after in pairwise(watch)]
        return dict(zip(("pause", "place", "resume"), laps, strict=True))


class Sticky(Stock):
    """``load_inplace``: the same name, and its flag stays, so that every step reads the adapter again."""

    async def swap(self) -> Phases:
        began = time.perf_counter()
        await self._load("adapter", in_place=True)
        self._loaded = ["adapter"]
        return {"place": (time.perf_counter() - began) * 1000}
