"""The two files of an adapter, wherever they lie: capped before they are read, known by their digest, never parsed.

A source is a function of a file's name and the most bytes it may have; it gives the file in blocks. It raises
``FileNotFoundError`` if there is none, and ``TooLarge`` before it has given more than that.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE, adapter_digest, hex_of
from lorabridge.bridge.errors import DigestMismatch, DigestMissing, TooLarge
from lorabridge.bridge.store.files import disk_errors, sync_folder

Source = Callable[[str, int], Iterator[bytes]]

BLOCK = 1 << 20
_MAX_CONFIG = 1 << 20
_RAISE_LIMIT = "Raise [store] max_adapter_bytes if it should be this large"


def folder_source(folder: Path) -> Source:
    """The files of a folder on this machine."""

    def blocks(name: str, limit: int) -> Iterator[bytes]:
        file = folder / name
        with file.open("rb") as stream:
            check_size(str(file), os.fstat(stream.fileno()).st_size, limit)
            yield from capped(str(file), iter(lambda: stream.read(BLOCK), b""), limit)

    return blocks


def check_size(name: str, size: int, limit: int) -> None:
    """Raise ``TooLarge`` if a file is over its limit, in bytes."""
    if size > limit:
        raise TooLarge(f"{name} has {size} bytes, over the limit of {limit}", action=_RAISE_LIMIT)


def capped(name: str, blocks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """``blocks``, as long as they are within the limit together, whatever size was announced."""
    size = 0
    for block in blocks:
        size += len(block)
        check_size(name, size, limit)
        yield block


def read(digest: str, source: Source, max_bytes: int) -> Adapter:
    """The adapter, in memory once. Raises ``DigestMismatch``, and what ``source`` raises."""
    tensors = BytesIO()
    config = _receive(digest, source, max_bytes, tensors)
    return Adapter(config=config, tensors=tensors.getvalue())


def verify(digest: str, source: Source, max_bytes: int) -> None:
    """Read all of it, a block at a time, and compare. Raises as ``read``."""
    _receive(digest, source, max_bytes, None)


def is_whole(digest: str, source: Source, max_bytes: int) -> bool:
    """Whether it is there with the right bytes."""
    try:
        verify(digest, source, max_bytes)
    except (FileNotFoundError, DigestMismatch, TooLarge):
        return False
    return True


def fetch(digest: str, source: Source, max_bytes: int, into: Path) -> Path:
    """Copy the adapter to ``into/<hex>`` a block at a time, and give it that name if it has that digest.

    A copy that is there and good is enough; one that went bad is replaced.

    Raises:
        DigestMismatch, DiskFull, and what ``source`` raises; nothing is left of it.
    """
    place = into / hex_of(digest)
    if is_whole(digest, folder_source(place), max_bytes):
        return place
    staged = into / f".{uuid.uuid4().hex}"
    try:
        with disk_errors(f"adapter {digest}"):
            staged.mkdir(parents=True)
            with (staged / TENSORS_FILE).open("xb") as tensors:
                config = _receive(digest, source, max_bytes, tensors)
            (staged / CONFIG_FILE).write_bytes(config)
            for name in (CONFIG_FILE, TENSORS_FILE):
                (staged / name).chmod(0o444)
            give_name(staged, place, digest, max_bytes)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return place


def give_name(staged: Path, place: Path, digest: str, max_bytes: int) -> None:
    """Rename a staged folder to its place; an adapter that stands there already is repaired if it is bad."""
    try:
        staged.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        if not is_whole(digest, folder_source(place), max_bytes):
            for name in (CONFIG_FILE, TENSORS_FILE):
                (staged / name).replace(place / name)
            sync_folder(place)
    sync_folder(place.parent)


def match(found: str, digest: str) -> None:
    """Raise ``DigestMismatch`` unless the digest of the bytes is the one they are stored under."""
    if found != digest:
        raise DigestMismatch(
            f"the bytes stored as {digest} have the digest {found}",
            action="The file is corrupt or was changed: restore it, or publish the adapter again",
        )


def missing(digest: str, where: str, removed: bool) -> DigestMissing:
    """The error for an adapter that is not at ``where``, because retention removed it or for another reason."""
    if removed:
        return DigestMissing(
            f"{digest} was removed from {where} by retention ([store] keep)",
            action="Its manifest stays; only the adapter's bytes, published again, could bring it back",
        )
    return DigestMissing(f"{digest} is not in {where}", action="Check [store] url, or publish the adapter again")


def _receive(digest: str, source: Source, max_bytes: int, tensors: BinaryIO | None) -> bytes:
    """Hash both files as they come, the tensors on their way into ``tensors``; the configuration."""
    config = b"".join(source(CONFIG_FILE, _MAX_CONFIG))
    blocks = source(TENSORS_FILE, max_bytes)
    found = adapter_digest(config, blocks if tensors is None else _kept(blocks, tensors))
    match(found, digest)
    return config


def _kept(blocks: Iterator[bytes], file: BinaryIO) -> Iterator[bytes]:
    for block in blocks:
        file.write(block)
        yield block
