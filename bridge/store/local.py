"""A store in a folder: one machine, or a file system that several share.

::

    adapters/sha256/<hex>/adapter_config.json, adapter_model.safetensors
    adapters/lock
    removed/sha256/<hex>
    policies/<name>/<version>.json
    policies/<name>/epochs/<n>
    policies/<name>/lock

Adapters are staged beside their place, synced, read back, and renamed into it. Manifests are created by hard link,
which fails if the name exists. The policy's lock makes "is my epoch the newest, and is this the next version?" and the
commit one action. The adapters' lock keeps retention out of a put, and makes "is its adapter there?" and the commit one
action; retention renames an adapter away under it and deletes it afterwards.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from lorabridge.bridge import codec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE
from lorabridge.bridge.errors import StoreError, VersionTaken
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import adapter_files
from lorabridge.bridge.store.adapter_files import check_size, folder_source, give_name
from lorabridge.bridge.store.files import create, disk_errors, make_folder, sync_folder, write_synced
from lorabridge.bridge.store.order import check_commit
from lorabridge.bridge.store.remote import (
    HEX,
    adapter_name,
    decode_manifest,
    epoch_name,
    manifest_name,
    no_version,
    removed_name,
)

_LEAVING = ".leaving."


class LocalStore:
    """See the module."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes

    @property
    def url(self) -> str:
        return self.root.as_uri()

    # Adapters

    def put(self, adapter: Adapter) -> str:
        check_size("an adapter", len(adapter.tensors), self.max_bytes)
        digest = adapter.digest
        place = self._folder(digest)
        staged = place.parent / f".{uuid.uuid4().hex}"
        try:
            with disk_errors(f"adapter {digest}"), self._lock(self.root / "adapters", fcntl.LOCK_SH):
                make_folder(place.parent)
                if adapter_files.is_whole(digest, folder_source(place), self.max_bytes):
                    sync_folder(place.parent)
                    return digest
                staged.mkdir()
                write_synced(staged / CONFIG_FILE, adapter.config)
                write_synced(staged / TENSORS_FILE, adapter.tensors)
                sync_folder(staged)
                adapter_files.verify(digest, folder_source(staged), self.max_bytes)
                give_name(staged, place, digest, self.max_bytes)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return digest

    def read(self, digest: str) -> Adapter:
        try:
            return adapter_files.read(digest, folder_source(self._folder(digest)), self.max_bytes)
        except FileNotFoundError as error:
            raise adapter_files.missing(digest, self.url, self._removed(digest).exists()) from error

    def fetch(self, digest: str, into: Path) -> Path:
        try:
            return adapter_files.fetch(digest, folder_source(self._folder(digest)), self.max_bytes, into)
        except FileNotFoundError as error:
            raise adapter_files.missing(digest, self.url, self._removed(digest).exists()) from error

    def adapters(self) -> dict[str, int]:
        home = self.root / "adapters" / "sha256"
        places = [place for place in home.iterdir() if HEX.fullmatch(place.name)] if home.is_dir() else []
        return {f"sha256:{place.name}": _size(place) for place in places}

    def remove(self, digests: Collection[str], spare: Callable[[], Collection[str]]) -> list[str]:
        home = self.root / "adapters" / "sha256"
        with disk_errors(str(self.root / "removed")), self._lock(self.root / "adapters", fcntl.LOCK_EX):
            spared = spare()
            gone = sorted(digest for digest in set(digests) if digest not in spared and self._folder(digest).is_dir())
            for digest in gone:
                create(self._removed(digest), b"")
                place = self._folder(digest)
                place.rename(home / f"{_LEAVING}{uuid.uuid4().hex}")
            if gone:
                sync_folder(home)
        for place in home.glob(f"{_LEAVING}*"):  # those of a removal that was killed as well
            shutil.rmtree(place, ignore_errors=True)
        return gone

    def _folder(self, digest: str) -> Path:
        return self.root / adapter_name(digest)

    def _removed(self, digest: str) -> Path:
        return self.root / removed_name(digest)

    # Order

    def policies(self) -> list[str]:
        home = self.root / "policies"
        return sorted(place.name for place in home.iterdir() if place.is_dir()) if home.is_dir() else []

    def allocate_epoch(self, policy: str) -> int:
        with self._lock(self._policy(policy), fcntl.LOCK_EX):
            epoch = self._epoch(policy) + 1
            if not create(self.root / epoch_name(policy, epoch), b""):
                raise StoreError(f"epoch {epoch} of {policy} appeared under our lock", action="Start the trainer again")
            return epoch

    def commit(self, manifest: Manifest) -> None:
        policy, digest = manifest.policy, manifest.digest
        with self._lock(self._policy(policy), fcntl.LOCK_EX), self._lock(self.root / "adapters", fcntl.LOCK_SH):
            if not self._folder(digest).is_dir():
                raise adapter_files.missing(digest, self.url, self._removed(digest).exists())
            there = self._find(policy, manifest.version)
            if not check_commit(manifest, there, self._newest(policy), self._epoch(policy)):
                return
            if not create(self._file(policy, manifest.version), codec.encode_json(manifest)):
                raise VersionTaken(
                    f"{policy} version {manifest.version} appeared under our lock",
                    action="Does the store's file system support flock?",
                )

    def newest(self, policy: str) -> Manifest | None:
        version = self._newest(policy)
        return self.manifest(policy, version) if version else None

    def manifest(self, policy: str, version: int) -> Manifest:
        found = self._find(policy, version)
        if found is None:
            raise no_version(policy, version, self.url)
        return found

    def _find(self, policy: str, version: int) -> Manifest | None:
        try:
            body = self._file(policy, version).read_bytes()
        except FileNotFoundError:
            return None
        return decode_manifest(body, policy, version, self.url)

    def _newest(self, policy: str) -> int:
        return max((int(f.stem) for f in self._policy(policy).glob("*.json") if f.stem.isdigit()), default=0)

    def _epoch(self, policy: str) -> int:
        folder = self._policy(policy) / "epochs"
        return max((int(f.name) for f in folder.glob("*") if f.name.isdigit()), default=0)

    def _policy(self, policy: str) -> Path:
        return self._file(policy, 1).parent

    def _file(self, policy: str, version: int) -> Path:
        return self.root / manifest_name(policy, version)

    @contextmanager
    def _lock(self, folder: Path, kind: int) -> Iterator[None]:
        with disk_errors(str(folder)):
            make_folder(folder)
            handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, kind)
            yield
        finally:
            os.close(handle)


def _size(folder: Path) -> int:
    """Bytes of a folder's files; of one that is being removed, those that are still there."""
    size = 0
    for name in (CONFIG_FILE, TENSORS_FILE):
        try:
            size += (folder / name).stat().st_size
        except FileNotFoundError:
            pass
    return size
