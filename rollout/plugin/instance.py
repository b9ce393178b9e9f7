"""One instance of a generator: what is in its slots, which epoch it is at, whether it may sample."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from lorabridge.bridge.errors import Quarantined, SwapFailed
from lorabridge.bridge.residency import KvMode, Residency, Served
from lorabridge.rollout.plugin.vllm_engine import Engine, PlacementFailed
from lorabridge.rollout.slots import Slots


class Adapters(Protocol):
    """Verified adapters on this machine."""

    def link(self, digest: str) -> Path:
        """A path never used before to the adapter, verified. Raises ``StoreError``; blocks."""
        ...

    def keep_only(self, digests: set[str]) -> None:
        """Other adapters may be removed from this machine."""
        ...


class ResidencyLog(Protocol):
    """Where epochs are put on record."""

    def append(self, record: Residency) -> None:
        """Durable on return."""
        ...


class Instance:
    """See the module.

    Attributes:
        residency: the running epoch.
        slots: what is in the engine, requests in flight counted.
        quarantine: why this generator must not sample, or None.
        quarantined_ms: since when, milliseconds since 1970.
    """

    def __init__(
        self, engine: Engine, adapters: Adapters, log: ResidencyLog, *, generator: str, name: str, kv: KvMode,
        slots: int,
    ) -> None:  # fmt: skip
        self.engine, self._adapters, self._log = engine, adapters, log
        self.slots = Slots(capacity=slots)
        self.quarantine: str | None = None
        self.quarantined_ms: int | None = None
        self.residency = Residency(generator=generator, instance=name, epoch=0, kv=kv, serves={}, at_ms=_now_ms())

    async def begin(self) -> None:
        """Label the engine with epoch 0, which serves nothing."""
        self._log.append(self.residency)
        await self.engine.label(self.residency.label)

    async def link(self, digest: str) -> Path:
        """A fresh path to verified bytes. Raises ``StoreError`` or ``SwapFailed``."""
        try:
            return await asyncio.to_thread(self._adapters.link, digest)
        except OSError as error:  # a full disk has an error of its own
            raise SwapFailed(f"{digest} cannot be kept here: {error}", action="See the server's disk") from error

    async def place(self, name: str, digest: str, path: Path) -> None:
        """Put verified bytes into a slot and prove it. Raises ``PlacementFailed``; what is in it then is unknown."""
        await self.engine.place(name, path)
        self.slots = self.slots.put(name, digest)

    async def remove(self, name: str) -> None:
        """Take an adapter out, its requests ended. Raises ``PlacementFailed`` if it is still resident."""
        await self.engine.remove(name)
        self.slots = self.slots.remove(name)

    async def enter(
        self, serves: Mapping[str, Served], pinned: Mapping[str, tuple[Served, ...]], kv: KvMode
    ) -> None:  # fmt: skip
        """Begin the next epoch: on record first, then on every token, and only then for new requests."""
        record = msgspec.structs.replace(
            self.residency, epoch=self.residency.epoch + 1, kv=kv, serves=dict(serves), pinned=dict(pinned),
            at_ms=_now_ms(),
        )  # fmt: skip
        self._log.append(record)
        await self.engine.label(record.label)
        for policy in self.residency.serves.keys() | serves.keys():
            self.slots = self.slots.serve(policy, slot_of(record, policy) or "")
        self.residency = record

    def forget_unused(self) -> None:
        """What is in no slot may be removed from this machine."""
        self._adapters.keep_only(self.slots.digests)

    def judge(self, reason: str | None) -> None:
        """In quarantine for ``reason``, or with None out of it."""
        if reason is None or self.quarantine is None:
            self.quarantined_ms = _now_ms() if reason is not None else None
        self.quarantine = reason

    async def distrust(self, name: str, seen: PlacementFailed) -> str:
        """A slot is not what it was proven to be: nothing more is sampled, and what has tokens from it ends, since
        nobody can say from which one on they are wrong. Returns the reason of the quarantine."""
        reason = self.quarantine or f"{name}: {seen}"
        self.judge(reason)
        await self.engine.pause("keep")
        await self.engine.abort(name)
        return reason


def slot_of(residency: Residency, policy: str) -> str | None:
    """What the engine calls the adapter that new samples of a policy get; None if it is not served."""
    served = residency.serves.get(policy)
    if served is None:
        return None
    return served.digest if policy in residency.pinned else policy


def quarantined(reason: str) -> Quarantined:
    return Quarantined(
        f"it samples nothing: {reason}",
        action="The next swap tries again; if that does not help, restart this generator",
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
