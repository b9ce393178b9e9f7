"""The swap: proven before served (law 10), one path per load (law 4), on record before it is labelled (law 3)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Protocol

import msgspec

from lorabridge.bridge.canary import Judgement
from lorabridge.bridge.errors import BridgeError, Quarantined, SwapFailed
from lorabridge.bridge.residency import KvMode, Residency, Served
from lorabridge.bridge.settings import BASE_NAME
from lorabridge.rollout.plugin.vllm_engine import Engine, PlacementFailed
from lorabridge.rollout.wire import ScoreRequest, Scores, SwapReply, SwapRequest


class Outdated(Exception):
    """The request names another instance or epoch than this one, or an old lease: its sender must look again."""


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


class Swapper:
    """What one instance serves, and the only way it changes.

    Attributes:
        residency: the running epoch.
        fence: highest lease number seen; a controller with a lower one has been replaced.
        canary: the last judgement that a worker told of.
        quarantine: why this generator must not sample, or None.
        quarantined_ms: since when, milliseconds since 1970.
    """

    def __init__(
        self, engine: Engine, adapters: Adapters, log: ResidencyLog, *, generator: str, instance: str, kv: KvMode,
        slots: int,
    ) -> None:  # fmt: skip
        self._engine, self._adapters, self._log = engine, adapters, log
        self._slots, self._kv = slots, kv
        self._lock = asyncio.Lock()
        self._done: tuple[str, SwapReply] | None = None  # the last swap that was asked for by name, and its answer
        self.fence = 0
        self.canary: Judgement | None = None
        self.quarantine: str | None = None
        self.quarantined_ms: int | None = None
        self.residency = Residency(generator=generator, instance=instance, epoch=0, kv=kv, serves={}, at_ms=_now_ms())

    async def begin(self) -> None:
        """Label the engine with epoch 0, which serves nothing."""
        self._log.append(self.residency)
        await self._engine.label(self.residency.label)

    async def swap(self, request: SwapRequest) -> SwapReply:
        """Serve what is asked for. Asking for what is served already does nothing, nor does the same operation again.

        Raises:
            Outdated: another instance or epoch than the request names, or the lease of a replaced controller.
            SwapFailed: it is not served; what was served before is served again, or the policy is not served at all.
            Quarantined: neither could be proven; this generator samples nothing until a swap is proven again.
            StoreError: the digest could not be fetched and verified; nothing was paused.
        """
        async with self._lock:
            if self._done and request.operation == self._done[0]:
                return self._done[1]
            if request.fence < self.fence:
                raise Outdated(f"lease {request.fence} has been replaced by {self.fence}")
            self.fence = request.fence
            now = self.residency
            if request.policy == BASE_NAME:
                raise SwapFailed(f"{BASE_NAME!r} is what the base model is called", action="Name the policy otherwise")
            wanted = Served(version=request.version, digest=request.digest)
            served = request.instance == now.instance and now.serves.get(request.policy) == wanted
            if served and self.quarantine is None:
                return SwapReply(residency=now, phases_ms={})
            if (request.instance, request.epoch) != (now.instance, now.epoch):
                raise Outdated(f"this is {now.label}, not {request.instance}:{request.epoch}")
            if len(now.serves.keys() | {request.policy}) > self._slots:
                raise SwapFailed(
                    f"all {self._slots} slots are taken", action="Raise [generators] max_loras (--max-loras)"
                )
            if self.quarantine is None and request.policy in now.serves:
                await self._prove_outgoing(request.policy)
            reply = await self._swap(request.policy, wanted, request.kv or self._kv)
            if request.operation:
                self._done = request.operation, reply
            return reply

    async def _swap(self, policy: str, wanted: Served, kv: KvMode) -> SwapReply:
        watch = Stopwatch()
        path = await self._link(wanted.digest)
        watch.lap("fetch")
        # After a quarantine nothing of what was there is trusted: no KV, no slot.
        healing = self.quarantine is not None
        kv = "recompute" if healing else kv
        failure: PlacementFailed | None = None
        lost: str | None = None
        try:
            await self._engine.pause(kv)
            watch.lap("pause")
            serves = dict(self.residency.serves)
            try:
                await self._engine.place(policy, path)
                serves[policy] = wanted
            except PlacementFailed as error:
                failure = error
                serves, lost = await self._put_back(policy, serves, error)
            if healing:
                serves = await self._renew(serves, policy)
            watch.lap("place")
            if kv == "keep":
                await self._engine.forget_prefixes()
            await self._enter(serves, kv)
            watch.lap("label")
            self._judge(lost or self.quarantine)
            await self._engine.resume()
            watch.lap("resume")
        except Exception as error:
            # Nothing is known of the slot any more, so nothing may be sampled: the engine stays paused.
            reason = f"a swap broke off: {error!r}"
            self._judge(reason)
            raise _quarantined(reason) from error
        self._judge(lost)
        self._adapters.keep_only({served.digest for served in serves.values()})
        if lost is not None:
            raise _quarantined(lost)
        if failure is not None:
            raise SwapFailed(
                f"{policy} version {wanted.version} was not put in place: {failure}",
                action="See the server's log; check that the adapter was trained on this base model",
            ) from failure
        return SwapReply(residency=self.residency, phases_ms=watch.laps_ms)

    async def _link(self, digest: str) -> Path:
        try:
            return await asyncio.to_thread(self._adapters.link, digest)
        except OSError as error:  # a full disk has an error of its own
            raise SwapFailed(f"{digest} cannot be kept here: {error}", action="See the server's disk") from error

    async def _put_back(
        self, policy: str, serves: dict[str, Served], failure: Exception
    ) -> tuple[dict[str, Served], str | None]:
        """After a failed placement: the previous adapter, proven again, or none.

        Returns:
            What is served then, and why this generator must be quarantined, if it must.
        """
        previous = serves.pop(policy, None)
        lost = None
        if previous is not None:
            try:
                await self._engine.place(policy, await self._link(previous.digest))
                return {**serves, policy: previous}, None
            except (PlacementFailed, BridgeError) as error:
                lost = f"{policy}: {failure}; and its previous adapter could not be put back: {error}"
        await self._engine.remove(policy)
        return serves, lost

    async def _renew(self, serves: dict[str, Served], but: str) -> dict[str, Served]:
        """Place and prove the other policies' adapters again; one that cannot be is not served any more."""
        kept = {name: served for name, served in serves.items() if name == but}
        for name, served in serves.items():
            if name == but:
                continue
            try:
                await self._engine.place(name, await self._link(served.digest))
                kept[name] = served
            except (PlacementFailed, BridgeError):
                await self._engine.remove(name)
        return kept

    async def _prove_outgoing(self, policy: str) -> None:
        """An epoch is proven at both ends: a slot that changed within it is not just overwritten."""
        try:
            await self._engine.attest(policy)
        except PlacementFailed as error:
            raise _quarantined(await self._distrust(policy, error)) from error

    async def _distrust(self, policy: str, seen: PlacementFailed) -> str:
        """A slot is not what it was proven to be: nothing more is sampled, and what has tokens from it ends, since
        nobody can say from which one on they are wrong. Returns the reason of the quarantine."""
        reason = self.quarantine or f"{policy}: {seen}"
        self._judge(reason)
        await self._engine.pause("keep")
        await self._engine.abort(policy)
        return reason

    async def score(self, request: ScoreRequest) -> Scores:
        """Score sequences under a policy that is served; no swap comes in between.

        Raises:
            Outdated: the policy is not served.
            Quarantined: nothing may be sampled.
        """
        async with self._lock:
            if self.quarantine is not None:  # the engine may be paused, and only a swap can have it go on
                raise _quarantined(self.quarantine)
            if request.policy not in self.residency.serves:
                raise Outdated(f"{request.policy} is not served here")
            adapter = await self._engine.score(request.policy, request.sequences)
            base = await self._engine.score(None, request.sequences)
            return Scores(adapter=adapter, base=base, label=self.residency.label)

    async def judged(self, judgement: Judgement) -> None:
        """Take note of what a canary said; one that does not match quarantines this generator."""
        async with self._lock:
            self.canary = judgement
            if judgement.verdict == "mismatch":
                self._judge(judgement.reason)

    async def attest(self) -> dict[str, str | None]:
        """Is every slot still what it was proven to be? By policy, what was seen if it is not.

        A slot that changed behind our back quarantines this generator: what it is sampling ends, since tokens since the
        last proof cannot be trusted, and no more are sampled until a swap has been proven.
        """
        async with self._lock:
            seen: dict[str, str | None] = {}
            for policy in self.residency.serves:
                try:
                    await self._engine.attest(policy)
                    seen[policy] = None
                except PlacementFailed as error:
                    seen[policy] = str(error)
                    await self._distrust(policy, error)
            return seen

    def _judge(self, reason: str | None) -> None:
        """In quarantine for ``reason``, or with None out of it."""
        if reason is None or self.quarantine is None:
            self.quarantined_ms = _now_ms() if reason is not None else None
        self.quarantine = reason

    async def _enter(self, serves: dict[str, Served], kv: KvMode) -> None:
        """Begin the next epoch: on record first, then on every token."""
        record = msgspec.structs.replace(
            self.residency, epoch=self.residency.epoch + 1, kv=kv, serves=serves, at_ms=_now_ms()
        )
        self._log.append(record)
        self.residency = record
        await self._engine.label(record.label)


class Stopwatch:
    """Milliseconds between laps, by name."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps_ms: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps_ms[name] = (now - self._last) * 1000
        self._last = now


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _quarantined(reason: str) -> Quarantined:
    return Quarantined(
        f"it samples nothing: {reason}",
        action="The next swap tries again; if that does not help, restart this generator",
    )
