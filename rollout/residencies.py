"""The residency records of one generator, as its worker learns them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from lorabridge.bridge.residency import Residency, epochs_between

Report = Callable[[Residency, dict[str, float]], Awaitable[None]]


class Source(Protocol):
    """Who has the records (``lorabridge.rollout.generator.Generator``)."""

    async def residencies(self, after: int) -> list[Residency]: ...


class Residencies:
    """Records by label. Each is reported before it is used, so that a trajectory never comes before its evidence.

    Args:
        source: asked when a label is new.
        report: told of every record that is new, with the milliseconds of its swap's phases if they are known.
    """

    def __init__(self, source: Source, report: Report) -> None:
        self._source, self._report = source, report
        self._records: dict[str, Residency] = {}
        self._newest: dict[str, int] = {}  # instance -> the epoch up to which all are known
        self._lock = asyncio.Lock()

    async def learn(self, record: Residency, swap_ms: dict[str, float] | None = None) -> None:
        """The generator is at ``record``: it and everything before it become known. Raises ``GeneratorError``."""
        async with self._lock:
            known = self._newest.get(record.instance, -1)
            if record.epoch > known + 1:
                await self._ask(record.instance, known)
            await self._add(record, swap_ms or {})

    async def of(self, labels: Sequence[str]) -> Mapping[str, Residency]:
        """Every record known. The generator is asked first if one of ``labels``, or of the epochs between them, is not.

        Raises:
            GeneratorError: the generator cannot be asked.
        """
        async with self._lock:
            for instance in {_instance(label) for label, _ in epochs_between(labels) if label not in self._records}:
                await self._ask(instance, self._newest.get(instance, -1))
        return self._records

    async def _ask(self, instance: str, known: int) -> None:
        records = await self._source.residencies(known)
        if known >= 0 and any(record.instance != instance for record in records):
            records = await self._source.residencies(-1)  # it restarted: its epochs began again
        for record in records:
            await self._add(record, {})

    async def _add(self, record: Residency, swap_ms: dict[str, float]) -> None:
        if record.label in self._records:
            return
        await self._report(record, swap_ms)
        self._records[record.label] = record
        self._newest[record.instance] = max(record.epoch, self._newest.get(record.instance, -1))


def _instance(label: str) -> str:
    return label.rpartition(":")[0]
