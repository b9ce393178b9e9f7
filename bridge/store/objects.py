"""A store in an object store, through fsspec: S3 and what speaks its protocol.

There is no lock and no rename. Order comes from creating an object only if it is not there (S3's ``If-None-Match: *``):

- **epochs** are numbered objects, each with a token of the one who created it.
- **commit** reads the newest version, then the newest epoch, then creates the next version. A trainer that was
  overtaken between the last two still gets that one version in; it is on the line like any other, before every version
  of the trainer that overtook it, whose first commit finds the version taken and has to go on top (``commit_next``).
  It cannot get in a second one.
- **put** uploads the tensors, reads them back, and uploads the configuration last: without it an adapter is not there.
  If a removal got in between, it begins again.
- **remove** (retention) leaves a mark, then looks whether a version names the adapter, then deletes. A commit creates
  its version, then looks for the mark. Whatever the order, one of the two sees the other: no version loses its adapter
  without the commit being told. A mark whose owner died is taken over an hour later.

An answer that is lost does not matter: whoever does not know whether it created an object reads it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection

import msgspec

from lorabridge.bridge import codec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE, adapter_digest
from lorabridge.bridge.errors import ConfigError, DigestMissing, StoreError, VersionTaken
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import adapter_files
from lorabridge.bridge.store.adapter_files import check_size, match
from lorabridge.bridge.store.bucket import Bucket
from lorabridge.bridge.store.order import check_commit, last
from lorabridge.bridge.store.remote import (
    HEX,
    RemoteReader,
    adapter_name,
    epoch_name,
    manifest_name,
    removed_name,
)

_SETTLE_S, _PAUSE_S = 30.0, 0.2
_DEAD_S = 3600.0


class _Mark(msgspec.Struct, frozen=True):
    """Left by who removes an adapter; ``at_s`` is seconds since 1970 on its clock."""

    owner: str
    at_s: float


class ObjectStore(RemoteReader):
    """See the module."""

    _shelf: Bucket

    def __init__(self, shelf: Bucket, max_bytes: int) -> None:
        super().__init__(shelf, max_bytes)
        self._epochs: dict[str, int] = {}

    # Adapters

    def put(self, adapter: Adapter) -> str:
        check_size("an adapter", len(adapter.tensors), self.max_bytes)
        digest = adapter.digest
        while True:
            self._settle(digest)
            if adapter_files.is_whole(digest, self._source(digest), self.max_bytes):
                return digest
            if self._upload(adapter, digest):
                return digest

    def _upload(self, adapter: Adapter, digest: str) -> bool:
        """Upload and read back; whether no removal got in between."""
        name = adapter_name(digest)
        self._shelf.write(f"{name}/{TENSORS_FILE}", adapter.tensors)
        try:
            match(adapter_digest(adapter.config, self._source(digest)(TENSORS_FILE, self.max_bytes)), digest)
        except FileNotFoundError:
            return False
        self._shelf.write(f"{name}/{CONFIG_FILE}", adapter.config)
        if (config := self._get(f"{name}/{CONFIG_FILE}")) is not None:
            match(adapter_digest(config, [adapter.tensors]), digest)
        self._settle(digest)
        return self._is_there(digest)

    def adapters(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        whole = set()
        for path, size in self._shelf.sizes("adapters/sha256").items():
            name, _, file = path.partition("/")
            sizes[name] = sizes.get(name, 0) + size
            if file == CONFIG_FILE and HEX.fullmatch(name):
                whole.add(name)
        return {f"sha256:{name}": size for name, size in sizes.items() if name in whole}

    def remove(self, digests: Collection[str], spare: Callable[[], Collection[str]]) -> list[str]:
        abandoned = self._abandoned()
        return [digest for digest in sorted({*digests, *abandoned}) if self._remove(digest, spare, digest in abandoned)]

    def _remove(self, digest: str, spare: Callable[[], Collection[str]], abandoned: bool) -> bool:
        mark = _mark_name(digest)
        body = msgspec.json.encode(_Mark(uuid.uuid4().hex, time.time()))
        if abandoned:
            self._shelf.write(mark, body)
        elif not self._create(mark, body):
            return False  # another is at it
        if digest in spare():
            self._shelf.delete(mark)
            return False
        if there := self._shelf.holds(f"{adapter_name(digest)}/{CONFIG_FILE}"):
            self._shelf.write(removed_name(digest), b"")
            self._shelf.delete(f"{adapter_name(digest)}/{CONFIG_FILE}")
        self._shelf.delete(f"{adapter_name(digest)}/{TENSORS_FILE}")
        self._shelf.delete(mark)
        return there

    def _abandoned(self) -> set[str]:
        """Digests whose removal was begun by someone who died."""
        found = set()
        for name in filter(HEX.fullmatch, self._shelf.sizes("leaving/sha256")):
            body = self._get(f"leaving/sha256/{name}")
            if body is not None and time.time() - msgspec.json.decode(body, type=_Mark).at_s > _DEAD_S:
                found.add(f"sha256:{name}")
        return found

    def _settle(self, digest: str) -> None:
        """Wait until nobody is removing the adapter: it is there for good, or gone, by then."""
        until = time.monotonic() + _SETTLE_S
        while self._shelf.holds(_mark_name(digest)):
            if time.monotonic() > until:
                raise StoreError(
                    f"{digest} is being removed from {self.url}",
                    action="Try again. If `lorabridge store gc` was killed, it ends that an hour later",
                )
            time.sleep(_PAUSE_S)

    # Order

    def policies(self) -> list[str]:
        return self._shelf.folders("policies")

    def allocate_epoch(self, policy: str) -> int:
        epoch = self._epoch(policy) + 1
        while not self._create(epoch_name(policy, epoch), uuid.uuid4().hex.encode()):
            epoch += 1
        if self._create(epoch_name(policy, epoch), uuid.uuid4().hex.encode()):
            raise ConfigError(
                f"[store] url {self.url}: the endpoint overwrites an object that was to be created only if absent",
                action="Use one that honours If-None-Match: * on PUT, or a folder; this one can only be read",
            )
        self._epochs[policy] = epoch
        return epoch

    def commit(self, manifest: Manifest) -> None:
        policy, version = manifest.policy, manifest.version
        self._check_there(manifest.digest)
        newest, there = self._newest(policy), self._find(policy, version)
        epoch = self._epoch(policy)  # after the newest: see check_commit
        wanted = check_commit(manifest, there, newest, epoch)
        if wanted and not self._create(manifest_name(policy, version), codec.encode_json(manifest)):
            raise VersionTaken(
                f"{policy} version {version} was committed by another meanwhile",
                action="Continue the line from the newest",
            )
        self._check_there(manifest.digest)

    def _check_there(self, digest: str) -> None:
        self._settle(digest)
        if not self._is_there(digest):
            raise DigestMissing(
                f"{digest} is not in {self.url}", action="Put the bytes before the name: put it and commit again"
            )

    def _is_there(self, digest: str) -> bool:
        return all(self._shelf.holds(f"{adapter_name(digest)}/{file}") for file in (CONFIG_FILE, TENSORS_FILE))

    def _epoch(self, policy: str) -> int:
        epoch = last(lambda n: self._shelf.holds(epoch_name(policy, n)), self._epochs.get(policy, 0))
        self._epochs[policy] = epoch
        return epoch

    def _create(self, name: str, body: bytes) -> bool:
        """Create an object unless it is there; whether it holds ``body`` now."""
        try:
            self._shelf.write(name, body, create=True)
        except FileExistsError:
            return self._get(name) == body
        except StoreError:  # an answer that was lost, or an endpoint that has other words for "exists"
            found = self._get(name)
            if found is None:
                raise
            return found == body
        return True


def _mark_name(digest: str) -> str:
    return removed_name(digest).replace("removed/", "leaving/", 1)
