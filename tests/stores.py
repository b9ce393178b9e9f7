"""Stores of every kind, what lies in them, and what a trainer does with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.store import local as local_store
from lorabridge.bridge.store.bucket import Bucket
from tests.factories import make_adapter, make_manifest

LIMIT = 64 * 1024


class Place(Protocol):
    """Where a store's bytes lie, for tests that look at them and change them behind its back."""

    def open(self, limit: int = LIMIT) -> Store:
        """The store, as a trainer opens it."""
        ...

    def reader(self, limit: int = LIMIT) -> Store:
        """The same bytes, as a generator opens them."""
        ...

    def files(self) -> dict[str, bytes]:
        """Everything but locks, by name."""
        ...

    def stamps(self) -> dict[str, object]:
        """When each of them was written."""
        ...

    def write(self, name: str, body: bytes) -> None: ...

    def delete(self, name: str) -> None: ...

    def strays(self) -> list[str]:
        """What lies beside the store."""
        ...

    def garble(self, patch: pytest.MonkeyPatch) -> None:
        """From now on the last byte of everything written is another."""
        ...


class FolderPlace:
    """A local store; ``url`` is where a web server serves its folder, if one does."""

    def __init__(self, root: Path, url: str | None = None) -> None:
        self.root, self._url = root, url

    def open(self, limit: int = LIMIT) -> Store:
        return open_store(str(self.root), limit)

    def reader(self, limit: int = LIMIT) -> Store:
        return open_store(self._url or str(self.root), limit)

    def files(self) -> dict[str, bytes]:
        return {name: (self.root / name).read_bytes() for name in self.stamps()}

    def stamps(self) -> dict[str, object]:
        files = (file for file in self.root.rglob("*") if file.is_file() and file.name != "lock")
        return {str(file.relative_to(self.root)): file.stat().st_mtime_ns for file in files}

    def write(self, name: str, body: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(body)

    def delete(self, name: str) -> None:
        (self.root / name).unlink()

    def strays(self) -> list[str]:
        return [name for name in names(self.root.parent) if name != self.root.name]

    def garble(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(local_store, "write_synced", lambda file, body: file.write_bytes(body[:-1] + b"?"))


class ObjectPlace:
    """An object store at ``url``, whose objects ``fs`` has under ``root``."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self.fs, self.root, self.url = fs, root, url

    def open(self, limit: int = LIMIT) -> Store:
        return open_store(self.url, limit)

    def reader(self, limit: int = LIMIT) -> Store:
        return self.open(limit)

    def files(self) -> dict[str, bytes]:
        return {name: self.fs.cat_file(f"{self.root}/{name}") for name in self.stamps()}

    def stamps(self) -> dict[str, object]:
        found = self.fs.find(f"{self.root}/", detail=True).items()
        return {
            path.removeprefix(f"{self.root}/"): info.get("LastModified", info.get("created")) for path, info in found
        }

    def write(self, name: str, body: bytes) -> None:
        self.fs.pipe_file(f"{self.root}/{name}", body)

    def delete(self, name: str) -> None:
        self.fs.rm_file(f"{self.root}/{name}")

    def strays(self) -> list[str]:
        around = self.root.rpartition("/")[0]
        return [path for path in self.fs.find(f"{around}/") if not path.startswith(f"{self.root}/")]

    def garble(self, patch: pytest.MonkeyPatch) -> None:
        write = Bucket.write
        patch.setattr(Bucket, "write", lambda shelf, name, body: write(shelf, name, body[:-1] + b"?"))


def publish(store: Store, version: int = 1, epoch: int = 1, seed: int | None = None, **changes: Any) -> Manifest:
    """What a trainer does: bytes, then their name."""
    digest = store.put(make_adapter(version if seed is None else seed))
    manifest = make_manifest(version, digest, epoch=epoch, **changes)
    store.commit(manifest)
    return manifest


def adapters_in(place: Place) -> set[str]:
    """Names in the folder of adapters."""
    start = "adapters/sha256/"
    return {name.removeprefix(start).partition("/")[0] for name in place.files() if name.startswith(start)}


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
