"""A rollout worker: claim -> route -> sample -> reward -> send, while every generator is kept at the head.

::

    listen:    announce stream ----> newest manifest ----> members (each swaps it in, one controller per generator)
    reconcile (every 10 s): store's head against Redis's head; Redis is repaired, never followed
    sample:    route -> claim -> Sampler.group -> deliver        several groups at once on each generator
                   |-> the generator went away: it is looked at again, the group goes back
                   |-> anything else: the group is tried again, and given up after a few attempts
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast

import redis.asyncio

from lorabridge.bridge.errors import RolloutsFailed, StreamUnreachable
from lorabridge.bridge.events import Happening, Quarantine, event_fields
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.run_record import RunRecord, check_joins
from lorabridge.bridge.status import Status
from lorabridge.bridge.stream.groups import Claim, GroupQueue
from lorabridge.bridge.stream.head import decode_announcement
from lorabridge.bridge.stream.kept import Kept
from lorabridge.bridge.stream.keys import Keys, Reply
from lorabridge.bridge.trajectory import Unestablished
from lorabridge.rollout.member import Member
from lorabridge.rollout.routing import IN_A_ROW, fate, hopeless, is_of_the_generator, route
from lorabridge.rollout.sampler import Sampler, first_of

log = logging.getLogger("lorabridge.worker")

_RECONCILE_S = 10.0
_IDLE_S = 0.02
_PAUSE_AFTER_FAILURE_S = 1.0
_GIVE_BACK_S = 3.0
_RUNS_OUT = "what this worker holds runs out by itself"


class Worker:
    """Drives the generators of a run for one policy.

    Args:
        run: what the trainer published.
        timeout_s: how long one attempt at a group may take.
        renew_s: how often the leases of groups under way are renewed.
        start_s: how long a generator may take to come up.
        reconcile: makes Redis's head the store's, and returns the store's newest manifest and the run as it is on
            record now; runs in a thread.
        now_ms: the stream's clock.
        status: told whether there is a generator to sample from.

    Attributes:
        members: the fleet; to be set before ``run``.
    """

    def __init__(
        self, *, name: str, run: RunRecord, client: redis.asyncio.Redis, keys: Keys, queue: GroupQueue,
        sampler: Sampler, timeout_s: float, renew_s: float, start_s: float,
        reconcile: Callable[[], tuple[Manifest | None, RunRecord | None]], now_ms: Callable[[], int], status: Status,
    ) -> None:  # fmt: skip
        self._name, self._run, self._client, self._keys, self._queue = name, run, client, keys, queue
        self._sampler, self._timeout_s, self._renew_s, self._start_s = sampler, timeout_s, renew_s, start_s
        self._reconcile, self._now_ms, self._status = reconcile, now_ms, status
        self._kept = Kept(keys)
        self.members: Sequence[Member] = ()
        self._wanted: Manifest | None = None
        self._under_way: set[Claim] = set()
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._served_before = False
        self._given_up_in_a_row = 0
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Claim nothing more, give back what is not done, and return from ``run``, within some seconds."""
        self._stopping.set()

    def changed(self) -> None:
        """A member's load or standing is another."""
        served = any(member.load.serves for member in self.members)
        self._status.ready("" if served else "a generator that serves the policy")
        self._changed.set()

    async def report(self, happening: Happening) -> None:
        """Put it on the stream of events."""
        fields = event_fields(self._name, self._now_ms(), happening)
        await self._kept.send_async(self._client, self._keys.events, fields)

    async def run(self) -> None:
        """Work until ``stop``.

        Raises:
            GeneratorError: no generator ever served, and none will.
            RunMismatch: the trainer came back as another run.
            RolloutsFailed: group after group had to be given up.
            HeadConflict: Redis and the store name different heads.
        """
        loops: list[Callable[[], Awaitable[None]]] = [self._listen, self._check_head, self._renew, self._sample]
        loops += [partial(member.run, self._stopping) for member in self.members]
        running = [asyncio.create_task(self._until_stopped(loop)) for loop in loops]
        try:
            await self._stopping.wait()
        finally:
            await _give_back(running)
        if self._failure is not None:
            raise self._failure

    async def _until_stopped(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Run one loop; its failure stops the worker.

        Every loop also looks at ``_stopping``, since redis-py can swallow a cancellation while it connects.
        """
        try:
            await loop()
        except Exception as failed:
            error = first_of(failed) if isinstance(failed, BaseExceptionGroup) else failed
            if self._stopping.is_set():  # what ends on the way out ends for good; the leases see to the rest
                log.warning("while stopping: %s; %s", error, _RUNS_OUT)
            else:
                self._failure = error
                self._stopping.set()

    # Following the head

    async def _listen(self) -> None:
        """Hear of new versions. Only the newest matters; a missed one is caught by ``_check_head``."""
        last = "$"
        while not self._stopping.is_set():
            reply = cast(Reply, await self._client.xread({self._keys.announce: last}, block=1000))
            for _, entries in reply or []:
                for entry, fields in entries:
                    last = entry.decode()
                    self._hear(decode_announcement(fields))
            await asyncio.sleep(0)  # what was heard is acted on before the next read is sent

    async def _check_head(self) -> None:
        while not self._stopping.is_set():
            try:
                head, run = await asyncio.to_thread(self._reconcile)
            except StreamUnreachable as error:
                log.warning("%s", error.diagnostics())
            else:
                if run is not None and run.epoch > self._run.epoch:
                    self._adopt(run)
                if head is not None:
                    self._hear(head)
            await asyncio.sleep(_RECONCILE_S if self._wanted else 0.2)

    def _adopt(self, run: RunRecord) -> None:
        """A later trainer has taken over the policy."""
        check_joins(run, self._run)
        log.info("trainer epoch %d has taken over from %d", run.epoch, self._run.epoch)
        self._run, self._queue.ahead = run, run.groups_ahead

    def _hear(self, manifest: Manifest) -> None:
        ours = manifest.policy == self._run.policy and manifest.epoch >= self._run.epoch
        if ours and (self._wanted is None or manifest.version > self._wanted.version):
            self._wanted = manifest
            for member in self.members:
                member.want(manifest)

    # Sampling

    async def _sample(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self._stopping.is_set():
                member = await self._room()
                claim = await self._claim()
                if claim is None:
                    await asyncio.sleep(_IDLE_S)
                    continue
                member.begin_group()
                tasks.create_task(self._group(claim, member)).add_done_callback(member.end_group)
                await asyncio.sleep(0)  # a task that is cancelled before it began would not give its claim back

    async def _room(self) -> Member:
        """The member for the next group, as soon as there is one. Raises what makes it hopeless."""
        began = time.monotonic()
        while True:
            self._changed.clear()
            place = route([member.load for member in self.members])
            if place is not None:
                self._served_before = True
                return self.members[place]
            standings = [member.standing for member in self.members]
            reason = hopeless(standings, self._served_before, time.monotonic() - began, self._start_s)
            if reason is not None:
                raise reason
            await self._changed.wait()

    async def _claim(self) -> Claim | None:
        """The next group. If this is cancelled, what the server granted meanwhile is given back at once."""
        claiming = asyncio.ensure_future(self._queue.claim())
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            granted = await claiming
            if granted is not None:
                await self._queue.release(granted)
            raise

    async def _renew(self) -> None:
        """A worker that dies loses its groups to another within one lease, not within the time a group may take."""
        while not self._stopping.is_set():
            if told := await self._kept.tend_async(self._client):
                log.warning("the stream server has come back older: it was told again of %d events", told)
            await asyncio.sleep(self._renew_s)
            await self._queue.renew(list(self._under_way))

    async def _group(self, claim: Claim, member: Member) -> None:
        self._under_way.add(claim)
        try:
            await self._attempt(claim, member)
        finally:
            self._under_way.discard(claim)

    async def _attempt(self, claim: Claim, member: Member) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                group = await self._sampler.group(claim, member)
            if await self._queue.deliver(claim, group):
                self._given_up_in_a_row = 0
            else:
                log.warning("group=%d attempt=%d came too late; another worker has it", claim.number, claim.attempt)
        except asyncio.CancelledError:
            await asyncio.shield(self._queue.release(claim))
            raise
        except BaseExceptionGroup as failed:
            await self._give_back(claim, member, first_of(failed))
        except Exception as error:
            await self._give_back(claim, member, error)

    async def _give_back(self, claim: Claim, member: Member, error: BaseException) -> None:
        """The group goes back, or is given up; see ``routing.fate``."""
        if not isinstance(error, Exception):
            raise error
        reason = _reason(error, self._timeout_s)
        log.warning("group=%d attempt=%d failed: %s", claim.number, claim.attempt, reason)
        if is_of_the_generator(error):
            member.suspect(error)
            return await self._queue.release(claim)
        await self.report(Quarantine(subject=f"group {claim.number} attempt {claim.attempt}", reason=reason))
        if fate(error, claim.failures) == "abandon":
            await self._abandon(claim, reason)
        else:
            await self._queue.release(claim, failed=True)
        return await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _abandon(self, claim: Claim, reason: str) -> None:
        await self._queue.abandon(claim)
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row >= IN_A_ROW:
            raise RolloutsFailed(
                f"{IN_A_ROW} groups in a row were given up, the last because: {reason}",
                action="Correct what it says: the environment, or [rollout] and [generators]",
            )


async def _give_back(running: Sequence[asyncio.Task[None]]) -> None:
    """End the loops. Each gives back what it holds, unless Redis hangs: that is not waited for."""
    for task in running:
        task.cancel()
    done, late = await asyncio.wait(running, timeout=_GIVE_BACK_S)
    if late:
        log.warning("while stopping: Redis does not answer; %s", _RUNS_OUT)
    for task in done:
        if not task.cancelled():
            task.result()


def _reason(error: Exception, timeout_s: float) -> str:
    if isinstance(error, Unestablished):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"not done within {timeout_s:g} s ([rollout] group_timeout_s)"
    return f"{type(error).__name__}: {error}"
