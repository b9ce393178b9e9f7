"""Going back: an older version's adapter becomes the newest version. The line only ever goes forward (law 2)."""

from __future__ import annotations

import msgspec
import redis

from lorabridge.bridge.errors import StoreError
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import Store
from lorabridge.bridge.store.line import commit_next
from lorabridge.bridge.stream.connection import now_ms
from lorabridge.bridge.stream.head import move_head, repair_head
from lorabridge.bridge.stream.keys import Keys


def roll_back(client: redis.Redis, keys: Keys, store: Store, policy: str, version: int) -> tuple[Manifest, bool]:
    """Make the adapter of ``version`` the head of its line again; the head, and whether it was moved.

    A new version is committed that is the old one but for its place in the line: number, parent, epoch, run and time.
    Its ``step`` stays the old one's, as that is when these weights were read; so lag is counted from there. It takes a
    new trainer epoch: a trainer that runs has gone on from weights that are no longer wanted, and its next commit fails
    with ``StaleTrainer``. A head that has these bytes already is left alone, and so is its trainer.

    Raises:
        DigestMissing: no such version, or its adapter is gone (retention may have removed it).
        DigestMismatch: its adapter went bad.
        HeadConflict: Redis and the store name different heads.
        StaleTrainer: another trainer took over in this very moment; the line is as it wants it.
    """
    target = store.manifest(policy, version)
    store.read(target.digest)
    head = repair_head(client, keys, store, policy)
    if head is not None and head.digest == target.digest:
        return head, False
    epoch, created_ms = store.allocate_epoch(policy), now_ms(client)

    def on(newest: Manifest | None) -> Manifest:
        if newest is None:
            raise StoreError(f"{policy} lost its versions meanwhile", action="Is the store being deleted?")
        return msgspec.structs.replace(
            target,
            version=newest.version + 1,
            parent=newest.digest,
            epoch=epoch,
            run=keys.run_id,
            created_ms=created_ms,
        )

    manifest = commit_next(store, policy, on)
    move_head(client, keys, manifest)
    return manifest, True
