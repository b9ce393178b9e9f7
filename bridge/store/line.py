"""Going on with a line that another may have gone on with."""

from __future__ import annotations

from collections.abc import Callable

from lorabridge.bridge.errors import VersionTaken
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import Store


def commit_next(store: Store, policy: str, make: Callable[[Manifest | None], Manifest]) -> Manifest:
    """Commit what ``make`` makes of the newest version, on top of whatever that is by then; the committed version.

    Without a lock around the line, a trainer that was just overtaken may get one more version in between the new
    epoch and its first commit. That version counts, and this one follows it.

    Raises:
        StaleTrainer: a later epoch than the manifest's has been allocated.
        VersionTaken: the store refuses the version although the line has not moved.
        DigestMissing: the adapter is not there.
    """
    newest = store.newest(policy)
    while True:
        manifest = make(newest)
        try:
            store.commit(manifest)
            return manifest
        except VersionTaken:
            before, newest = newest, store.newest(policy)
            if newest == before:
                raise
