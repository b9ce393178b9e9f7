"""Writing files so that they are there whole, or not at all, after any crash."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorabridge.bridge.errors import DiskFull


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn a full disk into ``DiskFull``, naming ``what`` was being written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(f"no room left to write {what}", action="Free some space and run it again") from error
        raise


def write_synced(file: Path, body: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with file.open("xb") as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, and wait until their names are on disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def create(file: Path, body: bytes) -> bool:
    """Create ``file`` whole with ``body``, unless it is there already; whether this call created it.

    Durable on return. A reader never sees a part of it, and of several writers exactly one creates it.
    """
    staged = file.parent / f".{file.name}.{uuid.uuid4().hex}"
    try:
        with disk_errors(str(file)):
            make_folder(file.parent)
            write_synced(staged, body)
            try:
                os.link(staged, file)
            except FileExistsError:
                return False
            sync_folder(file.parent)
        return True
    finally:
        staged.unlink(missing_ok=True)
