"""Objects under one URL, through fsspec.

What S3 needs to know it takes from AWS's own environment and files: keys, region, ``AWS_ENDPOINT_URL`` for another
server than Amazon's, ``AWS_RETRY_MODE`` and ``AWS_MAX_ATTEMPTS`` for how long one that is away is waited for.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lorabridge.bridge.errors import BridgeError, ConfigError, StoreError
from lorabridge.bridge.store.adapter_files import BLOCK, capped, check_size

# Filesystems whose exclusive create is one request that the server decides. fsspec's default looks first, then writes.
_EXCLUSIVE = frozenset({"s3", "s3a", "memory"})
_READ_BYTES = 8 << 20  # per request


class Bucket:
    """Objects under one prefix of an fsspec filesystem.

    Attributes:
        exclusive: whether of several that create an object, one is told that it did and the others that it was there.
    """

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs, self._root, self.url = fs, root, url
        self.protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        self.exclusive = self.protocol in _EXCLUSIVE

    def blocks(self, name: str, limit: int) -> Iterator[bytes]:
        with self._errors(), self._fs.open(self._path(name), "rb", block_size=_READ_BYTES) as stream:
            if (size := getattr(stream, "size", None)) is not None:
                check_size(f"{self.url}/{name}", size, limit)
            yield from capped(f"{self.url}/{name}", iter(lambda: stream.read(BLOCK), b""), limit)

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


def open_bucket(url: str) -> Bucket:
    """What fsspec opens at ``url``; nothing is asked of it yet.

    Raises:
        ConfigError: fsspec does not know the URL, or what it needs is not installed.
    """
    try:
        import fsspec

        fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        action = "pip install 'lorabridge[s3]'" if url.startswith("s3") else "Install what it names"
        raise ConfigError(f"[store] url {url!r}: {error}", action=action) from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"[store] url {url!r}: {error}", action="Give a folder, s3://bucket/prefix, or http(s)://host/path"
        ) from error
    return Bucket(fs, root.rstrip("/"), url.rstrip("/"))
