"""Adapters on the generator's machine, and the record of its epochs: the plugin's files."""

from __future__ import annotations

import errno
import os
import shutil
from itertools import count
from pathlib import Path

from lorabridge.bridge import codec
from lorabridge.bridge.digest import hex_of
from lorabridge.bridge.residency import Residency
from lorabridge.bridge.store import Store
from lorabridge.bridge.store.files import disk_errors

# vLLM may read an adapter's path again for as long as a request names it, so the last few stay.
_STAY = 4


class LocalAdapters:
    """Verified copies of the store's adapters under ``root``, and a fresh link to one for every load.

    vLLM keys its prefix cache and its requests by path: a path that was used once is never used again (law 4).
    """

    def __init__(self, store: Store, root: Path) -> None:
        self._store, self._copies, self._links = store, root / "adapters", root / "loads"
        self._links.mkdir(parents=True)
        self._numbers = count(1)
        self._recent: list[str] = []

    def link(self, digest: str) -> Path:
        folder = self._store.fetch(digest, self._copies)
        link = self._links / f"{next(self._numbers)}-{hex_of(digest)[:12]}"
        link.symlink_to(folder, target_is_directory=True)
        self._recent = [*(d for d in self._recent if d != digest), digest]
        return link

    def keep_only(self, digests: set[str]) -> None:
        leaving = [d for d in self._recent[:-_STAY] if d not in digests]
        for digest in leaving:
            folder = self._copies / hex_of(digest)
            for link in self._links.iterdir():
                if link.readlink() == folder:
                    link.unlink()
            shutil.rmtree(folder, ignore_errors=True)
        self._recent = [d for d in self._recent if d not in leaving]


class FileLog:
    """Residency records, appended and synced to a file of JSON lines, and kept in memory for those who ask."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self.records: list[Residency] = []

    def append(self, record: Residency) -> None:
        line = codec.encode_json(record) + b"\n"
        with disk_errors(str(self._file)), self._file.open("ab", buffering=0) as log:
            end = log.seek(0, os.SEEK_END)
            try:
                if log.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(log.fileno())
            except OSError:
                log.truncate(end)  # half a line would spoil the next
                raise
        self.records.append(record)
