"""A store in a folder: one machine, or a file system that several share.

::

    adapters/sha256/<hex>/adapter_config.json, adapter_model.safetensors
    policies/<name>/<version>.json
    policies/<name>/epochs/<n>
    policies/<name>/lock

Adapters are staged beside their place, synced, read back, and renamed into it. Manifests are created by hard link,
which fails if the name exists. The lock makes "is my epoch the newest, and is this the next version?" and the commit
one action.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorabridge.bridge import codec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE, adapter_digest, hex_of
from lorabridge.bridge.errors import DigestMismatch, DigestMissing, StoreError, TooLarge, VersionTaken
from lorabridge.bridge.manifest import Manifest, check_policy_name
from lorabridge.bridge.store.files import create, disk_errors, make_folder, sync_folder, write_synced
from lorabridge.bridge.store.order import check_commit

_MAX_CONFIG = 1 << 20


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
        size = len(adapter.tensors)
        if size > self.max_bytes:
            raise TooLarge(f"an adapter of {size} bytes is over the store's {self.max_bytes}", action=_RAISE_LIMIT)
        digest = adapter.digest
        place = self._folder(digest)
        staged = place.parent / f".{uuid.uuid4().hex}"
        try:
            with disk_errors(f"adapter {digest}"):
                make_folder(place.parent)
                if place.is_dir() and self._is_whole(place, digest):
                    sync_folder(place.parent)
                    return digest
                staged.mkdir()
                write_synced(staged / CONFIG_FILE, adapter.config)
                write_synced(staged / TENSORS_FILE, adapter.tensors)
                sync_folder(staged)
                self._read(staged, digest)
                self._rename(staged, place, digest)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return digest

    def read(self, digest: str) -> Adapter:
        return self._read(self._folder(digest), digest)

    def fetch(self, digest: str, into: Path) -> Path:
        place = into / hex_of(digest)
        if place.is_dir() and self._is_whole(place, digest):
            return place
        adapter = self.read(digest)  # if this machine's copy went bad, the store decides
        staged = into / f".{uuid.uuid4().hex}"
        try:
            with disk_errors(f"adapter {digest}"):
                staged.mkdir(parents=True)
                for name, body in ((CONFIG_FILE, adapter.config), (TENSORS_FILE, adapter.tensors)):
                    (staged / name).write_bytes(body)
                    (staged / name).chmod(0o444)
                self._rename(staged, place, digest)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return place

    def _rename(self, staged: Path, place: Path, digest: str) -> None:
        """Give a staged adapter its name; one that stands there already is repaired if it is bad."""
        try:
            staged.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            if not self._is_whole(place, digest):
                for name in (CONFIG_FILE, TENSORS_FILE):
                    (staged / name).replace(place / name)
                sync_folder(place)
        sync_folder(place.parent)

    def _is_whole(self, folder: Path, digest: str) -> bool:
        try:
            self._read(folder, digest)
        except (DigestMismatch, DigestMissing, TooLarge):
            return False
        return True

    def _folder(self, digest: str) -> Path:
        return self.root / "adapters" / "sha256" / hex_of(digest)

    def _read(self, folder: Path, digest: str) -> Adapter:
        """Cap the sizes, then read, then compare the digest; parse nothing."""
        bodies = []
        for name, limit in ((CONFIG_FILE, _MAX_CONFIG), (TENSORS_FILE, self.max_bytes)):
            try:
                with (folder / name).open("rb") as stream:
                    size = os.fstat(stream.fileno()).st_size
                    if size > limit:
                        raise TooLarge(f"{name} of {digest} has {size} bytes, over {limit}", action=_RAISE_LIMIT)
                    bodies.append(stream.read(limit + 1))
            except FileNotFoundError as error:
                raise DigestMissing(
                    f"{digest} is not in {self.url}",
                    action="Check [store] url, or publish the adapter again",
                ) from error
        config, tensors = bodies
        found = adapter_digest(config, [tensors])
        if found != digest:
            raise DigestMismatch(
                f"the bytes stored as {digest} have the digest {found}",
                action="The file is corrupt or was changed: restore it, or publish the adapter again",
            )
        return Adapter(config=config, tensors=tensors)

    # Order

    def allocate_epoch(self, policy: str) -> int:
        with self._lock(policy):
            epoch = self._epoch(policy) + 1
            if not create(self._policy(policy) / "epochs" / str(epoch), b""):
                raise StoreError(f"epoch {epoch} of {policy} appeared under our lock", action="Start the trainer again")
            return epoch

    def commit(self, manifest: Manifest) -> None:
        policy = manifest.policy
        if not self._folder(manifest.digest).is_dir():
            raise DigestMissing(f"{manifest.digest} is not in {self.url}", action="Put the bytes before the name")
        with self._lock(policy):
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
            raise DigestMissing(f"{policy} has no version {version} in {self.url}", action="Check the policy's name")
        return found

    def _find(self, policy: str, version: int) -> Manifest | None:
        file = self._file(policy, version)
        try:
            found = codec.decode_json(Manifest, file.read_bytes())
        except FileNotFoundError:
            return None
        if (found.policy, found.version) != (policy, version):
            raise VersionTaken(f"{file} holds {found.policy} version {found.version}", action="Restore the store")
        return found

    def _newest(self, policy: str) -> int:
        return max((int(f.stem) for f in self._policy(policy).glob("*.json") if f.stem.isdigit()), default=0)

    def _epoch(self, policy: str) -> int:
        folder = self._policy(policy) / "epochs"
        return max((int(f.name) for f in folder.glob("*") if f.name.isdigit()), default=0)

    def _policy(self, policy: str) -> Path:
        return self.root / "policies" / check_policy_name(policy)

    def _file(self, policy: str, version: int) -> Path:
        return self._policy(policy) / f"{version}.json"

    @contextmanager
    def _lock(self, policy: str) -> Iterator[None]:
        folder = self._policy(policy)
        with disk_errors(str(folder)):
            make_folder(folder)
            handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


_RAISE_LIMIT = "Raise [store] max_adapter_bytes if it should be this large"
