"""The swap: proven before served (law 10), one path per load (law 4), on record before it is labelled (law 3).

In flight, a policy has one slot, called as the policy is: the engine pauses, the slot changes under the samples, and
they go on. Pinned, every digest has a slot of its own: the new one goes in beside the old one without a pause, new
samples get it, and the old one leaves when its last sample has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from lorabridge.bridge.canary import Judgement
from lorabridge.bridge.errors import BridgeError, SlotsBusy, SwapFailed
from lorabridge.bridge.residency import KvMode, Served, SwapMode
from lorabridge.bridge.sections import BASE_NAME
from lorabridge.rollout.plugin.instance import Instance, quarantined, slot_of
from lorabridge.rollout.plugin.vllm_engine import PlacementFailed
from lorabridge.rollout.wire import ScoreRequest, Scores, SwapReply, SwapRequest

log = logging.getLogger("lorabridge.plugin")
Pinned = dict[str, tuple[Served, ...]]


class Outdated(Exception):
    """The request names another instance or epoch than this one, or an old lease: its sender must look again."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How one swap is done: the slot it is about, and whether the engine pauses for it."""

    mode: SwapMode
    policy: str
    wanted: Served
    kv: KvMode
    healing: bool

    @property
    def name(self) -> str:
        return self.policy if self.mode == "in_flight" else self.wanted.digest

    @property
    def pauses(self) -> bool:
        return self.mode == "in_flight" or self.healing


class Swapper:
    """The only way that what an instance serves changes.

    Attributes:
        instance: see ``Instance``.
        fence: highest lease number seen; a controller with a lower one has been replaced.
        canary: the last judgement that a worker told of.
        failed: why the last swap was not carried out, None if it was.
    """

    def __init__(self, instance: Instance, *, kv: KvMode, mode: SwapMode = "in_flight") -> None:
        self.instance, self._kv, self._mode = instance, kv, mode
        self._lock = asyncio.Lock()
        self._done: tuple[str, SwapReply] | None = None  # the last swap that was asked for by name, and its answer
        self._leaving: set[asyncio.Task[None]] = set()
        self.fence = 0
        self.canary: Judgement | None = None
        self.failed: str | None = None

    async def swap(self, request: SwapRequest) -> SwapReply:
        """Serve what is asked for. Asking for what is served already does nothing, nor does the same operation again.

        Raises:
            Outdated: another instance or epoch than the request names, or the lease of a replaced controller.
            SlotsBusy: there is room only when samples have ended; nothing was changed.
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
            here, now = self.instance, self.instance.residency
            if request.policy == BASE_NAME:
                raise SwapFailed(f"{BASE_NAME!r} is what the base model is called", action="Name the policy otherwise")
            wanted = Served(version=request.version, digest=request.digest)
            served = request.instance == now.instance and now.serves.get(request.policy) == wanted
            if served and here.quarantine is None:
                return SwapReply(residency=now, phases_ms={})
            if (request.instance, request.epoch) != (now.instance, now.epoch):
                raise Outdated(f"this is {now.label}, not {request.instance}:{request.epoch}")
            try:
                way = self._way(request, wanted)
                self._check_room(way)
                if here.quarantine is None and here.slots.find(way.name):
                    await self._prove(way.name)
                reply = await self._swap(way)
            except BridgeError as error:
                self.failed = f"version {request.version} of {request.policy}: {error.problem}"
                raise
            self.failed = None
            if request.operation:
                self._done = request.operation, reply
            return reply

    def _way(self, request: SwapRequest, wanted: Served) -> Way:
        residency = self.instance.residency
        now: SwapMode | None = None
        if request.policy in residency.serves:
            now = "pinned" if request.policy in residency.pinned else "in_flight"
        mode = request.mode or now or self._mode
        if now is not None and mode != now:
            raise SwapFailed(
                f"{request.policy} is not swapped {mode.replace('_', ' ')} here", action="Restart this generator"
            )
        # After a quarantine nothing of what was there is trusted: no KV, no slot.
        healing = self.instance.quarantine is not None
        kv: KvMode = "recompute" if healing else "keep" if mode == "pinned" else request.kv or self._kv
        return Way(mode=mode, policy=request.policy, wanted=wanted, kv=kv, healing=healing)

    def _check_room(self, way: Way) -> None:
        slots = self.instance.slots
        if way.healing:  # nothing ends by itself while the engine is paused: what is not served any more is taken out
            slots = slots.without_superseded(but=way.name)
        match slots.refusal(way.name):
            case "busy":
                raise SlotsBusy(
                    f"all {slots.capacity} slots have samples in flight",
                    action="It is tried again when some have ended; more [generators] max_loras wait less",
                )
            case "pinned":
                raise SwapFailed(
                    f"all {slots.capacity} slots are taken", action="Raise [generators] max_loras (--max-loras)"
                )

    async def _swap(self, way: Way) -> SwapReply:
        here, watch = self.instance, Stopwatch()
        is_in = way.mode == "pinned" and not way.healing and here.slots.find(way.name) is not None
        path = None if is_in else await here.link(way.wanted.digest)
        watch.lap("fetch")
        failure: PlacementFailed | None = None
        lost: str | None = None
        try:
            if way.pauses:
                await here.engine.pause(way.kv)
            watch.lap("pause")
            serves = dict(here.residency.serves)
            if way.healing:
                for slot in here.slots.held:
                    if slot.superseded and slot.name != way.name:
                        await here.remove(slot.name)
            try:
                if path is not None:
                    await here.place(way.name, way.wanted.digest, path)
                serves[way.policy] = way.wanted
            except PlacementFailed as error:
                failure = error
                lost = await self._put_back(way, serves, error)
            if way.healing:
                await self._renew(serves, way)
            watch.lap("place")
            if way.mode == "in_flight" and way.kv == "keep":
                await here.engine.forget_prefixes()
            await here.enter(serves, self._pinned(way, serves), way.kv)
            watch.lap("label")
            here.judge(lost or here.quarantine)
            if way.pauses:
                await here.engine.resume()
            watch.lap("resume")
        except Exception as error:
            # Nothing is known of the slot any more, so nothing may be sampled.
            reason = f"a swap broke off: {error!r}"
            here.judge(reason)
            await self._stop(way)
            raise quarantined(reason) from error
        here.judge(lost)
        await self._let_leave()
        here.forget_unused()
        if lost is not None:
            raise quarantined(lost)
        if failure is not None:
            raise SwapFailed(
                f"{way.policy} version {way.wanted.version} was not put in place: {failure}",
                action="See the server's log; check that the adapter was trained on this base model",
            ) from failure
        return SwapReply(residency=here.residency, phases_ms=watch.laps_ms)

    async def _stop(self, way: Way) -> None:
        """A swap in flight has paused the engine; one beside what is sampled has not."""
        try:
            if not way.pauses:
                await self.instance.engine.pause("keep")
        except Exception:
            log.exception("the engine cannot be paused; its door is shut")

    def _pinned(self, way: Way, serves: dict[str, Served]) -> Pinned:
        """What is in a slot of the policies that are pinned, what each serves last."""
        here = self.instance
        held: Pinned = dict(here.residency.pinned)
        if way.mode == "pinned" and serves.get(way.policy) == way.wanted:
            others = (each for each in held.get(way.policy, ()) if each.digest != way.wanted.digest)
            held[way.policy] = (*others, way.wanted)
        return {
            policy: tuple(each for each in versions if here.slots.find(each.digest))
            for policy, versions in held.items()
            if policy in serves
        }

    async def _put_back(self, way: Way, serves: dict[str, Served], failure: Exception) -> str | None:
        """After a failed placement: the slot's previous adapter, proven again, or none; ``serves`` is what is served.

        Returns:
            Why this generator must be quarantined, if it must.
        """
        here = self.instance
        lost = None
        if way.mode == "in_flight":
            previous = serves.pop(way.policy, None)
            if previous is not None:
                try:
                    await here.place(way.policy, previous.digest, await here.link(previous.digest))
                    serves[way.policy] = previous
                    return None
                except (PlacementFailed, BridgeError) as error:
                    lost = f"{way.policy}: {failure}; and its previous adapter could not be put back: {error}"
        await here.remove(way.name)
        return lost

    async def _renew(self, serves: dict[str, Served], way: Way) -> None:
        """Place and prove the other slots' adapters again; what cannot be is served no more."""
        here = self.instance
        for slot in here.slots.held:
            if slot.name == way.name:
                continue
            try:
                await here.place(slot.name, slot.digest, await here.link(slot.digest))
            except (PlacementFailed, BridgeError):
                await here.remove(slot.name)
                for policy in slot.policies - {way.policy}:
                    del serves[policy]

    async def _prove(self, name: str) -> None:
        """An epoch is proven at both ends: a slot that changed within it is not just overwritten, nor forgotten."""
        try:
            await self.instance.engine.attest(name)
        except PlacementFailed as error:
            raise quarantined(await self.instance.distrust(name, error)) from error

    # Samples in flight

    def begin(self, policy: str) -> str:
        """A request for a policy that is served begins; what the engine calls the adapter it gets."""
        name = slot_of(self.instance.residency, policy) or policy
        self.instance.slots = self.instance.slots.begin(name)
        return name

    def end(self, name: str) -> None:
        """A request that began on ``name`` has ended; the last one lets a superseded adapter leave."""
        self.instance.slots = self.instance.slots.end(name)
        if self.instance.slots.leaving:
            task = asyncio.get_running_loop().create_task(self._leave())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave(self) -> None:
        async with self._lock:
            await self._let_leave()

    async def _let_leave(self) -> None:
        """Take out what may leave, proven once more; in a quarantine the slots stay as they are, to be looked at."""
        here = self.instance
        while here.quarantine is None and (leaving := here.slots.leaving):
            name = leaving[0].name
            try:
                await here.engine.attest(name)
            except PlacementFailed as error:
                log.error("%s", await here.distrust(name, error))
                return
            try:
                await here.remove(name)
            except PlacementFailed as error:
                here.judge(f"{name}: {error}")

    # Proof

    async def score(self, request: ScoreRequest) -> Scores:
        """Score sequences under a policy that is served; no swap comes in between.

        Raises:
            Outdated: the policy is not served.
            Quarantined: nothing may be sampled.
        """
        async with self._lock:
            here = self.instance
            if here.quarantine is not None:  # the engine may be paused, and only a swap can have it go on
                raise quarantined(here.quarantine)
            name = slot_of(here.residency, request.policy)
            if name is None:
                raise Outdated(f"{request.policy} is not served here")
            adapter = await here.engine.score(name, request.sequences)
            base = await here.engine.score(None, request.sequences)
            return Scores(adapter=adapter, base=base, label=here.residency.label)

    async def judged(self, judgement: Judgement) -> None:
        """Take note of what a canary said; one that does not match quarantines this generator."""
        async with self._lock:
            self.canary = judgement
            if judgement.verdict == "mismatch":
                self.instance.judge(judgement.reason)

    async def attest(self) -> dict[str, str | None]:
        """Is every slot still what it was proven to be? By name of the slot, what was seen if it is not.

        A slot that changed behind our back quarantines this generator: what it is sampling ends, since tokens since the
        last proof cannot be trusted, and no more are sampled until a swap has been proven.
        """
        async with self._lock:
            seen: dict[str, str | None] = {}
            for slot in self.instance.slots.held:
                try:
                    await self.instance.engine.attest(slot.name)
                    seen[slot.name] = None
                except PlacementFailed as error:
                    seen[slot.name] = str(error)
                    await self.instance.distrust(slot.name, error)
            return seen


class Stopwatch:
    """Milliseconds between laps, by name."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps_ms: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps_ms[name] = (now - self._last) * 1000
        self._last = now
