"""The store: adapters by digest, and the line of versions of every policy. It holds bytes and decides order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store.address import check_store_url
from lorabridge.bridge.store.local import LocalStore

DEFAULT_MAX_BYTES = 8 * 1024**3


class Store(Protocol):
    """What every backend does; ``tests/contract`` holds each to it.

    A store that can only be read raises ``ConfigError`` from everything else. Every call raises ``StoreError`` where
    a store that is not on this machine does not answer or refuses.
    """

    @property
    def url(self) -> str: ...

    def put(self, adapter: Adapter) -> str:
        """Make the adapter durable, read it back, and return its digest. Idempotent, and repairs bytes gone bad.

        Raises:
            TooLarge: over the store's limit.
            DiskFull: it did not fit; nothing is left under its digest.
        """
        ...

    def fetch(self, digest: str, into: Path) -> Path:
        """Copy the adapter to ``into/<hex>`` on this machine, verified, and return that folder (read only).

        Raises:
            DigestMissing, DigestMismatch, TooLarge, DiskFull.
        """
        ...

    def read(self, digest: str) -> Adapter:
        """The adapter, verified. Raises as ``fetch``."""
        ...

    def allocate_epoch(self, policy: str) -> int:
        """A trainer epoch larger than any before: trainers with an older one can no longer commit.

        Where nothing locks the line, a commit that an older one had begun may still get in, once, before the first
        of the new epoch (``lorabridge.bridge.store.line``).
        """
        ...

    def commit(self, manifest: Manifest) -> None:
        """Put the version on record, if it is the next of its line and its adapter is in the store.

        Committing the same manifest again does nothing.

        Raises:
            StaleTrainer: a later epoch has been allocated.
            VersionTaken: that version exists with other content, or it is not the next.
            DigestMissing: the bytes are not there (law 1).
        """
        ...

    def newest(self, policy: str) -> Manifest | None:
        """The head of the line, None if the policy has no version yet."""
        ...

    def manifest(self, policy: str, version: int) -> Manifest:
        """One version. Raises ``DigestMissing`` if there is none."""
        ...

    def policies(self) -> list[str]:
        """Names of every line, sorted."""
        ...

    def adapters(self) -> dict[str, int]:
        """Bytes of every adapter, by digest."""
        ...

    def remove(self, digests: Collection[str], spare: Callable[[], Collection[str]]) -> list[str]:
        """Remove adapters, but none that ``spare`` names; those that went, sorted. Manifests stay.

        ``spare`` is asked when no commit can slip by unseen any more: a commit that it does not see fails with
        ``DigestMissing`` and does so before anybody hears of the version. Who is reading an adapter meanwhile gets all
        of it or ``DigestMissing``.
        """
        ...


def open_store(url: str, max_bytes: int = DEFAULT_MAX_BYTES) -> Store:
    """The store at ``url``: a folder's path or ``file://`` URL, ``http(s)://`` (read only), else whatever fsspec opens.

    Raises:
        ConfigError: not a URL that a store can have, or what it needs is not installed.
    """
    parts = urlsplit(check_store_url(url))
    if parts.scheme == "file":
        return LocalStore(Path(unquote(parts.path)), max_bytes)
    if len(parts.scheme) < 2:
        return LocalStore(Path(url).absolute(), max_bytes)
    from lorabridge.bridge.store.remote import ReadOnlyStore

    if parts.scheme in ("http", "https"):
        from lorabridge.bridge.store.web import READ_ONLY, WebShelf

        return ReadOnlyStore(WebShelf(url), max_bytes, READ_ONLY)
    from lorabridge.bridge.store.bucket import open_bucket
    from lorabridge.bridge.store.objects import ObjectStore

    bucket = open_bucket(url)
    if bucket.exclusive:
        return ObjectStore(bucket, max_bytes)
    why = f"fsspec's {bucket.protocol!r} may overwrite what another has just created"
    return ReadOnlyStore(bucket, max_bytes, why)
