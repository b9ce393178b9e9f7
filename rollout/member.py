"""One generator of a fleet, as one worker sees it: what it serves, whether new groups go there, and if not, why.

Whoever holds the generator's lease swaps the head into it; the others follow what it serves. A generator that fails is
out until it has been looked at again from the beginning: instance, facts, residency, head.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from lorabridge.bridge.canary import judge
from lorabridge.bridge.errors import BridgeError, GeneratorUnreachable, Quarantined, SlotsBusy, SwapFailed
from lorabridge.bridge.events import Happening, Judged, Quarantine, Resident
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import Residency
from lorabridge.bridge.stream.lease import Lease
from lorabridge.rollout.generator import Generator, Moved
from lorabridge.rollout.residencies import Residencies
from lorabridge.rollout.routing import Load, Standing, pause_s
from lorabridge.rollout.wire import EngineFacts, GeneratorState

log = logging.getLogger("lorabridge.worker")

LEASE_S = 10.0
LOOK_S = 2.0
_MOVED_S = 0.05
_BUSY_S = 0.1

Report = Callable[[Happening], Awaitable[None]]


class Member:
    """See the module.

    Args:
        check: raises what makes a generator unfit for the run.
        lease: of its one controller.
        room: groups that this worker may have in flight on it.
        report: puts a happening on the stream of events.
        changed: told whenever ``load`` or ``standing`` has changed.

    Attributes:
        facts: what the running instance was started with; set before anything is sampled from it.
        residencies: its records.
    """

    facts: EngineFacts

    def __init__(
        self, *, generator: Generator, policy: str, check: Callable[[GeneratorState], None], lease: Lease, room: int,
        report: Report, changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.generator, self._policy, self._check, self._lease = generator, policy, check, lease
        self._room, self._report, self._changed = room, report, changed
        self.residencies = Residencies(generator, self._resident)
        self._wanted: Manifest | None = None
        self._now: Residency | None = None  # None: it must be looked at
        self._news = asyncio.Event()
        self._out: Exception | None = None
        self._suspected: tuple[Manifest, Quarantined] | None = None  # a version whose canary did not match, and how
        self._said = ""
        self._failures = 0
        self._groups = 0
        self._met = False  # whether it has ever been fit for the run

    @property
    def load(self) -> Load:
        """For routing: it serves nothing while it is out."""
        served = self._now.serves.get(self._policy) if self._now and not self._out else None
        return Load(serves=served.version if served else 0, groups=self._groups, room=self._room)

    @property
    def standing(self) -> Standing:
        return Standing(out=self._out, failures=self._failures)

    def begin_group(self) -> None:
        self._groups += 1
        self._changed()

    def end_group(self, *_: object) -> None:
        self._groups -= 1
        self._changed()

    def want(self, manifest: Manifest) -> None:
        """Serve this from now on."""
        self._wanted = manifest
        self._news.set()

    def suspect(self, error: Exception) -> None:
        """A sample met this: nothing new goes there until it has been looked at again."""
        if self._out is None:
            self._now = None
            self._leave(error)
            self._news.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Keep it at the head until ``stopping``; then give the lease back."""
        try:
            while not stopping.is_set():
                self._news.clear()
                busy = False
                try:
                    busy = await self._attend()
                    wait_s = _BUSY_S if busy else LOOK_S
                except Moved:
                    self._now, wait_s = None, _MOVED_S
                except BridgeError as error:
                    await self._failed(error)
                    wait_s = pause_s(self._failures)
                await self._next(wait_s, look=not busy)
        finally:
            await self._lease.release()

    async def _next(self, wait_s: float, *, look: bool) -> None:
        """Until there is news, or it is time to try again, and to ``look`` at it before."""
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            if look:
                self._now = None

    async def _attend(self) -> bool:
        """Look at it if that is due, hold the lease, swap if there is something to swap.

        Returns:
            Whether it has no slot for the head yet: it goes on with what it serves.
        """
        state, busy = None, False
        if self._now is None:
            state = await self.generator.state()
            self._check(state)
            self.facts, self._met = state.facts, True
            await self.residencies.learn(state.residency)
            self._now = state.residency
        ours = await self._lease.hold(floor=state.fence if state else 0)
        wanted, served = self._next_version(), self._now.serves.get(self._policy)
        behind = wanted and (served is None or (served.version, served.digest) != (wanted.version, wanted.digest))
        if state and state.quarantine and not (ours and wanted):
            raise Quarantined(f"{self.generator.url} is in quarantine: {state.quarantine}", action="See its log")
        if ours and wanted and (behind or (state and state.quarantine)):
            busy = not await self._swap(wanted, self._now)
            if not busy:
                await self._prove(wanted)
        elif ours and wanted and (self._suspected or (state and not _was_judged(state, wanted))):
            await self._prove(wanted)  # once more, or since whoever swapped it in did not come to it
        if self._suspected is not None:
            raise self._suspected[1]
        if wanted is not self._wanted:
            return await self._attend()
        self._enter()
        return busy

    def _next_version(self) -> Manifest | None:
        """The head; for one that is suspected the version that it failed on, unless the head can tell as well."""
        if self._suspected and self._wanted and self._wanted.canary is None:
            return self._suspected[0]
        return self._wanted

    async def _swap(self, manifest: Manifest, now: Residency) -> bool:
        """Have it serve the version; False if samples in flight leave no slot for it yet."""
        try:
            reply = await self.generator.swap(manifest, now, fence=self._lease.number)
        except SlotsBusy:
            return False
        await self.residencies.learn(reply.residency, reply.phases_ms)
        self._now = reply.residency
        if reply.phases_ms:
            phases = " ".join(f"{name}={ms:.1f}ms" for name, ms in reply.phases_ms.items())
            log.info("policy=%s version=%d digest=%s epoch=%s %s", *_names(manifest), reply.residency.label, phases)
        return True

    async def _prove(self, manifest: Manifest) -> None:
        """Hold the generator against the version's canary, if it has one.

        After one that did not match, the generator stays out until one does; see ``_next_version``.
        """
        if manifest.canary is None or self._now is None:
            return
        scores = await self.generator.score(manifest.policy, manifest.canary.sequences)
        judgement = judge(
            manifest.canary, manifest.policy, manifest.version, scores.adapter, scores.base, self.facts.dtype
        )
        await self.generator.judged(judgement)
        await self._report(Judged(generator=self.generator.name, label=scores.label, judgement=judgement))
        log.info("policy=%s version=%d digest=%s canary=%s error=%.2g floor=%.2g effect=%.2g",
                 *_names(manifest), judgement.verdict, judgement.error, judgement.floor, judgement.effect)  # fmt: skip
        self._suspected = None
        if judgement.verdict == "mismatch":
            action = "Are its base model, dtype and vLLM those that the run was measured with?"
            self._suspected = manifest, Quarantined(f"{self.generator.url}: {judgement.reason}", action=action)

    def _enter(self) -> None:
        if self._out is not None:
            log.info("%s is in", self.generator.url)
        self._out, self._said, self._failures = None, "", 0
        self._changed()

    async def _failed(self, error: BridgeError) -> None:
        """Say it, once for each reason; it is out, unless it still serves what it served before, proven again."""
        self._failures += 1
        reason = error.diagnostics()
        if reason != self._said:
            wanted = self._wanted
            log.warning("%s: %s", self.generator.url, reason)
            subject = f"{self.generator.name} {wanted.digest}" if wanted else self.generator.name
            if self._met or not isinstance(error, GeneratorUnreachable):  # else it is still coming up
                await self._report(Quarantine(subject=subject, reason=reason))
            self._said = reason
        self._now = None
        if isinstance(error, SwapFailed):
            try:
                state = await self.generator.state()
                await self.residencies.learn(state.residency)
            except (BridgeError, Moved):
                return self._leave(error)
            if self._policy in state.residency.serves and state.quarantine is None:
                self._now, self._out = state.residency, None
                return self._changed()
        return self._leave(error)

    def _leave(self, error: Exception) -> None:
        self._out = error
        self._changed()

    async def _resident(self, record: Residency, swap_ms: dict[str, float]) -> None:
        await self._report(Resident(residency=record, swap_ms=swap_ms))


def _names(manifest: Manifest) -> tuple[str, int, str]:
    return manifest.policy, manifest.version, manifest.digest


def _was_judged(state: GeneratorState, manifest: Manifest) -> bool:
    """Whether the generator has been held against this version's canary, if it has one."""
    judged = state.canary
    return manifest.canary is None or (
        judged is not None and (judged.policy, judged.version) == (manifest.policy, manifest.version)
    )
