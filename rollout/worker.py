"""A rollout worker: claim -> swap -> sample -> reward -> send.

::

    follow:   announce stream ----> newest manifest ----> generator.swap ----> events (resident)
    reconcile (every 10 s): store's head against Redis's head; Redis is repaired, never followed
    sample:   claim -> Sampler.group -> deliver        [concurrency] groups at once; waits for the first swap
                  |-> Unestablished: events (quarantine), the group is released for another attempt
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import redis.asyncio

from lorabridge.bridge import codec
from lorabridge.bridge.errors import GeneratorError, GeneratorUnreachable, Quarantined, SwapFailed
from lorabridge.bridge.events import Event, Happening, Quarantine, Resident
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import Residency
from lorabridge.bridge.stream.groups import Claim, GroupQueue
from lorabridge.bridge.stream.head import decode_announcement
from lorabridge.bridge.stream.keys import Keys, Reply
from lorabridge.bridge.trajectory import Unestablished
from lorabridge.rollout.generator import Generator, Moved
from lorabridge.rollout.sampler import Residencies, Sampler, first_of

log = logging.getLogger("lorabridge.worker")

_RECONCILE_S = 10.0
_IDLE_S = 0.02
_PAUSE_AFTER_FAILURE_S = 1.0
_ATTEMPTS = 5


class Worker:
    """Drives one generator for one policy.

    Args:
        reconcile: makes Redis's head the store's and returns the store's newest manifest; runs in a thread.
        now_ms: the stream's clock.
    """

    def __init__(
        self, *, name: str, policy: str, client: redis.asyncio.Redis, keys: Keys, queue: GroupQueue,
        generator: Generator, residencies: Residencies, sampler: Sampler, concurrency: int,
        reconcile: Callable[[], Manifest | None], now_ms: Callable[[], int],
    ) -> None:  # fmt: skip
        self._name, self._policy, self._client, self._keys, self._queue = name, policy, client, keys, queue
        self._generator, self._residencies, self._sampler = generator, residencies, sampler
        self._concurrency, self._reconcile, self._now_ms = concurrency, reconcile, now_ms
        self._wanted: Manifest | None = None
        self._news = asyncio.Event()
        self._served = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Claim nothing more, give back what is not done, and return from ``run``."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until ``stop``.

        Raises:
            GeneratorError: the generator refuses for good: quarantine, token, no plugin.
            HeadConflict: Redis and the store name different heads.
        """
        # Every loop also looks at ``_stopping``: redis-py can swallow a cancellation while it connects.
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [self._listen(), self._check_head(), self._swap_to_newest(), self._sample()]
                running = [tasks.create_task(loop) for loop in loops]
                await self._stopping.wait()
                for task in running:
                    task.cancel()
        except* asyncio.CancelledError:
            pass
        except* Exception as failed:
            raise first_of(failed) from failed

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

    async def _check_head(self) -> None:
        while not self._stopping.is_set():
            head = await asyncio.to_thread(self._reconcile)
            if head is not None:
                self._hear(head)
            await asyncio.sleep(_RECONCILE_S if self._wanted else 0.2)

    def _hear(self, manifest: Manifest) -> None:
        if manifest.policy == self._policy and (self._wanted is None or manifest.version > self._wanted.version):
            self._wanted = manifest
            self._news.set()

    async def _swap_to_newest(self) -> None:
        now: Residency | None = None
        while not self._stopping.is_set():
            await self._news.wait()
            self._news.clear()
            manifest = self._wanted
            assert manifest is not None
            try:
                now = await self._swap(manifest, now)
                self._served.set()
            except SwapFailed as error:
                # What it serves is as before; another version, or this one later, may do better.
                log.warning("policy=%s version=%d digest=%s not served: %s", *_names(manifest), error.diagnostics())
                await self._report(Quarantine(subject=f"{self._generator.url} {manifest.digest}", reason=str(error)))
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                self._news.set()
            except GeneratorUnreachable as error:
                log.warning("%s", error.diagnostics())
                now = None
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
                self._news.set()
            except Quarantined as error:
                await self._report(Quarantine(subject=self._generator.url, reason=str(error)))
                raise

    async def _swap(self, manifest: Manifest, now: Residency | None) -> Residency:
        while True:
            now = now or (await self._generator.state()).residency
            try:
                reply = await self._generator.swap(manifest, now)
                break
            except Moved:
                now = None
        self._residencies.add(reply.residency)
        if reply.phases_ms:
            phases = " ".join(f"{name}={ms:.1f}ms" for name, ms in reply.phases_ms.items())
            log.info("policy=%s version=%d digest=%s epoch=%s %s", *_names(manifest), reply.residency.label, phases)
            await self._report(Resident(residency=reply.residency, swap_ms=reply.phases_ms))
        return reply.residency

    # Sampling

    async def _sample(self) -> None:
        await self._served.wait()
        room = asyncio.Semaphore(self._concurrency)
        sampling: set[asyncio.Task[None]] = set()

        def done(task: asyncio.Task[None]) -> None:
            sampling.discard(task)
            room.release()

        async with asyncio.TaskGroup() as tasks:
            while not self._stopping.is_set():
                await room.acquire()
                claim = await self._claim()
                if claim is None:
                    room.release()
                    await asyncio.sleep(_IDLE_S)
                    continue
                task = tasks.create_task(self._group(claim))
                sampling.add(task)
                task.add_done_callback(done)
                await asyncio.sleep(0)  # a task that is cancelled before it began would not give its claim back
            for task in sampling:
                task.cancel()

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

    async def _group(self, claim: Claim) -> None:
        try:
            group = await self._sampler.group(claim)
            if not await self._queue.deliver(claim, group):
                log.warning("group=%d attempt=%d came too late; another worker has it", claim.number, claim.attempt)
        except asyncio.CancelledError:
            await asyncio.shield(self._queue.release(claim))
            raise
        except BaseExceptionGroup as failed:
            await self._give_back(claim, first_of(failed))
        except Exception as error:
            await self._give_back(claim, error)

    async def _give_back(self, claim: Claim, error: BaseException) -> None:
        """The group is tried again, or given up after a few attempts; what cannot be tried again ends the worker."""
        if isinstance(error, GeneratorError) and not isinstance(error, GeneratorUnreachable):
            await self._queue.release(claim)
            raise error
        log.warning("group=%d attempt=%d failed: %s", claim.number, claim.attempt, error)
        await self._report(Quarantine(subject=f"group {claim.number} attempt {claim.attempt}", reason=_reason(error)))
        if claim.attempt >= _ATTEMPTS:
            await self._queue.abandon(claim)
        else:
            await self._queue.release(claim)
        await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _report(self, happening: Happening) -> None:
        event = Event(source=self._name, at_ms=self._now_ms(), happening=happening)
        await self._client.xadd(self._keys.events, {"body": codec.encode(event)})


def _names(manifest: Manifest) -> tuple[str, int, str]:
    return manifest.policy, manifest.version, manifest.digest


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, Unestablished) else f"{type(error).__name__}: {error}"
