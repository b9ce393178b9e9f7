"""A swapper on a fake engine that writes down what it is asked, and can fail at any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lorabridge.bridge.canary import Logprobs
from lorabridge.bridge.errors import DigestMissing
from lorabridge.bridge.residency import KvMode, Residency, Served, SwapMode
from lorabridge.rollout.plugin.instance import Instance
from lorabridge.rollout.plugin.swap import Swapper
from lorabridge.rollout.plugin.vllm_engine import PlacementFailed
from lorabridge.rollout.wire import SwapRequest
from tests.factories import digest_of


class FakeEngine:
    """A slot per policy; ``failing`` names the calls that raise, by number of the placement or by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.slots: dict[str, str] = {}
        self.paused = False
        self.attested: dict[str, str] = {}
        self.fail_places: set[int] = set()
        self.fail: set[str] = set()
        self.tampered: set[str] = set()
        self.aborted: set[str] = set()
        self.on_label: Callable[[], None] = lambda: None
        self.paths: list[Path] = []
        self.labels: list[str] = []
        self.sampled_unproven = False

    async def pause(self, kv: KvMode) -> None:
        self._call(f"pause {kv}")
        self.paused = True

    async def place(self, policy: str, folder: Path) -> None:
        assert self.paused or policy not in self.slots, "a slot changes only while nothing is sampled"
        number = len(self.paths)
        self.paths.append(folder)
        # A load that fails late leaves a half-loaded slot behind.
        self.slots[policy] = "half"
        self.tampered.discard(policy)
        self._call(f"place {policy}")
        if number in self.fail_places:
            raise PlacementFailed("the slot held something else")
        self.slots[policy] = folder.name

    async def attest(self, policy: str) -> None:
        if policy in self.tampered:
            raise PlacementFailed("the slot has changed since it was proven")

    async def score(self, policy: str | None, sequences: Sequence[Sequence[int]]) -> Logprobs:
        return tuple((-1.0 if policy else -2.0,) * (len(row) - 1) for row in sequences)

    async def abort(self, policy: str) -> None:
        assert self.paused, "else one that has just come would be sampled"
        self.aborted.add(policy)
        self._call(f"abort {policy}")

    async def remove(self, policy: str) -> None:
        self.aborted.add(policy)
        self._call(f"remove {policy}")
        self.slots.pop(policy, None)

    async def forget_prefixes(self) -> None:
        self._call("forget")

    async def label(self, label: str) -> None:
        self._call("label")
        self.on_label()
        self.labels.append(label)

    async def resume(self) -> None:
        self._call("resume")
        self.paused = False
        self.sampled_unproven |= "half" in self.slots.values()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.fail:
            raise RuntimeError(f"{name} failed")


class FakeAdapters:
    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.disk: OSError | None = None
        self.count = 0

    def link(self, digest: str) -> Path:
        if self.disk:
            raise self.disk
        if digest in self.missing:
            raise DigestMissing(f"{digest} is not in the store", action="Publish it")
        self.count += 1
        return Path(f"/loads/{self.count}/{digest}")

    def keep_only(self, digests: set[str]) -> None: ...


class FakeLog:
    """On record, with the labels that the engine had been given by then."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.records: list[Residency] = []
        self.before_label: list[bool] = []

    def append(self, record: Residency) -> None:
        self.before_label.append(record.label not in self.engine.labels)
        self.records.append(record)


class Bench:
    def __init__(self, kv: KvMode = "keep", slots: int = 2, mode: SwapMode = "in_flight") -> None:
        self.engine, self.adapters = FakeEngine(), FakeAdapters()
        self.log = FakeLog(self.engine)
        self.instance = Instance(self.engine, self.adapters, self.log, generator="g", name="i", kv=kv, slots=slots)
        self.swapper = Swapper(self.instance, kv=kv, mode=mode)

    def request(self, version: int, policy: str = "p", **changes: Any) -> SwapRequest:
        request = SwapRequest(
            policy=policy, version=version, digest=digest_of(str(version)), instance="i",
            epoch=self.instance.residency.epoch,
        )  # fmt: skip
        return msgspec.structs.replace(request, **changes)


def served(version: int) -> Served:
    return Served(version=version, digest=digest_of(str(version)))
