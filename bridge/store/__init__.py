"""The store: adapters by digest, and the line of versions of every policy. It holds bytes and decides order."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store.local import LocalStore

DEFAULT_MAX_BYTES = 8 * 1024**3


class Store(Protocol):
    """What every backend does; ``tests/contract`` holds each to it."""

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
        """A trainer epoch larger than any before: trainers with an older one can no longer commit."""
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


def open_store(url: str, max_bytes: int = DEFAULT_MAX_BYTES) -> Store:
    """The store at ``url``: a folder's path or a ``file://`` URL.

    Raises:
        ConfigError: another kind of URL, or a file on another host (``file://runs/store`` names the host ``runs``).
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(Path(unquote(parts.path)), max_bytes)
    if parts.scheme == "" or len(parts.scheme) == 1:
        return LocalStore(Path(url).absolute(), max_bytes)
    raise ConfigError(f"[store] url {url!r} is not on this machine", action="Give a folder or file:///absolute/path")
