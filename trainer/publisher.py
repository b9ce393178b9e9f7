"""Law 1 in one function: bytes before names.

serialise -> hash -> put (durable, read back) -> commit (the store decides the order) -> move the head and announce.
``publish`` copies the tensors and returns; everything else happens in one thread beside the training thread, in order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import redis

from lorabridge.bridge.adapter import Adapter, largest_rank, module_names
from lorabridge.bridge.base_shapes import Shapes
from lorabridge.bridge.canary import Canary
from lorabridge.bridge.digest import parse_config
from lorabridge.bridge.errors import BridgeError
from lorabridge.bridge.events import Published, event_fields
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.servable import check_adapter
from lorabridge.bridge.store import Store
from lorabridge.bridge.stream.head import move_head, repair_head
from lorabridge.bridge.stream.kept import Kept
from lorabridge.bridge.stream.keys import Keys

log = logging.getLogger("lorabridge.trainer")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer stands in a policy's line when it starts."""

    policy: str
    run: str
    epoch: int
    newest: Manifest | None


def take_over(client: redis.Redis, keys: Keys, store: Store, policy: str, run: str) -> Line:
    """Become the policy's trainer: older ones can commit no more, and Redis's head is the store's.

    Raises:
        HeadConflict: Redis and the store name different heads.
    """
    epoch = store.allocate_epoch(policy)
    return Line(policy=policy, run=run, epoch=epoch, newest=repair_head(client, keys, store, policy))


class Publisher:
    """Publishes the versions of one policy, in order, beside the training thread.

    Args:
        serialise: makes the adapter of what ``publish`` was given; runs in the publisher's thread.
        kept: is given what is announced and reported.
        canary_every: publishes between canaries, the first included; 0: none.
        retain: removes old adapters that nobody uses, after each publish; their digests.
        shapes: the base's modules, which every adapter is checked against.
        max_rank: largest LoRA rank the servers take.
        now_ms: the stream's clock.

    Attributes:
        canary: makes the canary of what ``publish`` was given, with a seed; runs in the publisher's thread. None: no
            version has one.
    """

    def __init__(
        self, *, line: Line, client: redis.Redis, keys: Keys, store: Store, base: Fingerprint, shapes: Shapes,
        max_rank: int, serialise: Callable[[Any], Adapter], now_ms: Callable[[], int], kept: Kept | None = None,
        canary_every: int = 0, retain: Callable[[], Collection[str]] = tuple,
    ) -> None:  # fmt: skip
        self._line, self._client, self._keys, self._store = line, client, keys, store
        self._base, self._shapes, self._max_rank = base, shapes, max_rank
        self._serialise, self._now_ms = serialise, now_ms
        self._kept = Kept(keys) if kept is None else kept
        self._newest = line.newest
        self.canary: Callable[[Any, str], Canary | None] | None = None
        self._canary_every, self._published = canary_every, 0
        self._retain = retain
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._pending: list[Future[Manifest | None]] = []
        self._failed = False
        self._queued = line.newest.version if line.newest else 0

    def publish(self, tensors: Any, step: int, since: float) -> int:
        """Queue a version and return its number.

        Args:
            tensors: what ``serialise`` takes; the caller must not write to it any more.
            step: optimizer steps taken.
            since: ``time.perf_counter()`` when the training thread began to be held for this publish.

        Raises:
            BridgeError: an earlier publish failed.
        """
        self.check()
        blocked_ms = (time.perf_counter() - since) * 1000
        self._pending.append(self._thread.submit(self._in_turn, tensors, step, blocked_ms))
        self._queued += 1
        return self._queued

    def check(self) -> None:
        """Raise what an earlier publish failed with."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def close(self) -> None:
        """Wait for what is queued. Raises what it failed with."""
        self._thread.shutdown(wait=True)
        self.check()

    def abandon(self) -> None:
        """Publish nothing more of what is queued: training has failed."""
        self._failed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _in_turn(self, tensors: Any, step: int, blocked_ms: float) -> Manifest | None:
        """Publish, unless a version before this one could not be: the line has no gaps."""
        if self._failed:
            return None
        try:
            return self._publish(tensors, step, blocked_ms)
        except BaseException:
            self._failed = True
            raise

    def _make_canary(self, tensors: Any, seed: str) -> Canary | None:
        due = self._canary_every and self._published % self._canary_every == 0
        return self.canary(tensors, seed) if due and self.canary else None

    def _publish(self, tensors: Any, step: int, blocked_ms: float) -> Manifest:
        phases = {"blocked": blocked_ms}
        started = time.perf_counter()

        def lap(name: str) -> None:
            nonlocal started
            now = time.perf_counter()
            phases[name], started = (now - started) * 1000, now

        adapter = self._serialise(tensors)
        lap("serialise")
        header = check_adapter(adapter, self._max_rank, self._shapes)
        lap("check")
        digest = self._store.put(adapter)
        lap("store")
        line, before = self._line, self._newest
        canary = self._make_canary(tensors, digest)
        lap("canary")
        manifest = Manifest(
            policy=line.policy,
            version=before.version + 1 if before else 1,
            digest=digest,
            parent=before.digest if before else None,
            base=self._base,
            rank=largest_rank(parse_config(adapter.config)),
            targets=module_names(header),
            dtype=next(iter(header.values())).dtype,
            step=step,
            epoch=line.epoch,
            run=line.run,
            created_ms=self._now_ms(),
            size=len(adapter.tensors),
            canary=canary,
        )
        self._store.commit(manifest)
        self._newest = manifest
        self._published += 1
        lap("commit")
        move_head(self._client, self._keys, manifest, self._kept)
        lap("announce")
        names = (manifest.policy, manifest.version, manifest.digest)
        log.info("policy=%s version=%d digest=%s step=%d published", *names, step)
        happening = Published(policy=names[0], version=names[1], digest=names[2], step=step, phases_ms=phases)
        self._kept.send(self._client, self._keys.events, event_fields("trainer", self._now_ms(), happening))
        self._remove_old()
        return manifest

    def _remove_old(self) -> None:
        """What cannot be removed now can be at the next publish: training does not end for it."""
        try:
            removed = self._retain()
        except BridgeError as error:
            log.warning("old adapters stay for now: %s", error.diagnostics())
            return
        if removed:
            log.info("removed %d old adapters", len(removed))
