"""A store in an object store, through fsspec: S3 and what speaks its protocol.

There is no lock and no rename. Order comes from creating an object only if it is not there (S3's ``If-None-Match: *``):

- **epochs** are numbered objects, each with a token of the one who created it.
- **commit** reads the newest version, then the newest epoch, then creates the next version. A trainer that was
  overtaken between the last two still gets that one version in; it is on the line like any other, below every version
  of the trainer that overtook it, whose first commit finds the version taken and has to go on top (``commit_next``).
  It cannot get in a second one.
- **put** uploads the tensors, reads them back, and uploads the configuration last: without it an adapter is not there.
- **remove** (retention) leaves a mark, then looks whether a version names the adapter, then deletes. A commit creates
  its version, then looks for the mark. Whatever the order, one of the two sees the other: no version loses its adapter
  without the commit being told. A mark whose owner died is taken over an hour later.

An answer that is lost does not matter: whoever does not know whether it created an object reads it.
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from lorabridge.bridge import codec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE, adapter_digest
from lorabridge.bridge.errors import BridgeError, ConfigError, DigestMissing, StoreError, VersionTaken
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import adapter_files
from lorabridge.bridge.store.adapter_files import capped, check_size, match
from lorabridge.bridge.store.order import check_commit, last
from lorabridge.bridge.store.remote import (
    HEX,
    ReadOnlyStore,
    RemoteReader,
    adapter_name,
    epoch_name,
    manifest_name,
    removed_name,
)

if TYPE_CHECKING:
    from lorabridge.bridge.store import Store

# Filesystems whose exclusive create is one request that the server decides. fsspec's default looks first, then writes.
_EXCLUSIVE = frozenset({"s3", "s3a", "memory"})
_READ_BYTES = 8 << 20  # per request
_SETTLE_S, _PAUSE_S = 30.0, 0.2
_DEAD_S = 3600.0


def open_objects(url: str, max_bytes: int) -> Store:
    """The store at an fsspec URL; read only where fsspec cannot create exclusively.

    Raises:
        ConfigError: fsspec does not know the URL, or what it needs is not installed.
    """
    try:
        import fsspec

        fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = "pip install 'lorabridge[s3]'" if url.startswith("s3") else "Install what it names"
        raise ConfigError(f"[store] url {url!r}: {error}", action=extra) from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"[store] url {url!r}: {error}", action="Give a folder, s3://bucket/prefix, or http(s)://host/path"
        ) from error
    shelf = ObjectShelf(fs, root.rstrip("/"), url.rstrip("/"))
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols <= _EXCLUSIVE:
        return ObjectStore(shelf, max_bytes)
    return ReadOnlyStore(shelf, max_bytes, f"fsspec's {min(protocols)!r} may overwrite what another has just created")


class ObjectShelf:
    """Objects under one prefix of an fsspec filesystem."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs, self._root, self.url = fs, root, url

    def blocks(self, name: str, limit: int) -> Iterator[bytes]:
        with self._errors(), self._fs.open(self._path(name), "rb", block_size=_READ_BYTES) as stream:
            if (size := getattr(stream, "size", None)) is not None:
                check_size(f"{self.url}/{name}", size, limit)
            yield from capped(f"{self.url}/{name}", iter(lambda: stream.read(adapter_files.BLOCK), b""), limit)

    def get(self, name: str, limit: int) -> bytes | None:
        body = self._start(name, limit + 1)
        if body is not None:
            check_size(f"{self.url}/{name}", len(body), limit)
        return body

    def holds(self, name: str) -> bool:
        return self._start(name, 1) is not None

    def _start(self, name: str, count: int) -> bytes | None:
        """The first ``count`` bytes, None if it is not there: one request either way, and no more bytes than that."""
        try:
            with self._errors():
                try:
                    return bytes(self._fs.cat_file(self._path(name), start=0, end=count))
                except OSError as error:
                    if error.errno == errno.EINVAL:  # what S3 says of a range of an empty object
                        return b""
                    raise
        except FileNotFoundError:
            return None

    def write(self, name: str, body: bytes, *, create: bool = False) -> None:
        """Write an object whole. Raises ``FileExistsError`` with ``create`` if it is there, and ``StoreError``."""
        try:
            with self._errors():
                self._fs.pipe_file(self._path(name), body, mode="create" if create else "overwrite")
        except FileNotFoundError as error:
            raise StoreError(f"{self.url}: {error}", action="Create the bucket, or correct [store] url") from error

    def delete(self, name: str) -> None:
        try:
            with self._errors():
                self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            pass

    def sizes(self, name: str) -> dict[str, int]:
        """Bytes of every object under ``name/``, by the rest of its name."""
        start = self._path(name) + "/"
        with self._errors():
            found: dict[str, dict[str, Any]] = self._fs.find(start, detail=True)
        return {path.partition(start)[2]: info["size"] for path, info in found.items()}

    def folders(self, name: str) -> list[str]:
        """Names of the folders in ``name``."""
        try:
            with self._errors():
                found = self._fs.ls(self._path(name), detail=True)
        except FileNotFoundError:
            return []
        return sorted(info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Every library behind fsspec has errors of its own; what is no answer becomes a ``StoreError``."""
        try:
            yield
        except (BridgeError, FileNotFoundError, FileExistsError):
            raise
        except PermissionError as error:
            raise StoreError(
                f"{self.url} refuses: {error}",
                action="Check the credentials and that they may list the bucket: without that S3 hides what is missing",
            ) from error
        except Exception as error:
            raise StoreError(
                f"{self.url}: {type(error).__name__}: {error}",
                action="Check the endpoint and the credentials (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ~/.aws)",
            ) from error


class _Mark(msgspec.Struct, frozen=True):
    """Left by who removes an adapter; ``at_s`` is seconds since 1970 on its clock."""

    owner: str
    at_s: float


class ObjectStore(RemoteReader):
    """See the module."""

    _shelf: ObjectShelf

    def __init__(self, shelf: ObjectShelf, max_bytes: int) -> None:
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
