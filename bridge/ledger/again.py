"""Entries that were put on a stream a second time, since the server had forgotten them: is the first in the ledger?"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pyarrow.parquet as pq

from lorabridge.bridge.ledger.commits import Log
from lorabridge.bridge.ledger.tables import TABLE_OF, Fields
from lorabridge.bridge.stream.keys import WAS
from lorabridge.bridge.stream.trim import EntryId

Entry = tuple[str, Fields]


def without_known(ledger: Path, log: Log, stream: str, entries: list[Entry]) -> list[Entry]:
    """``entries`` of a stream without those that came before: into the ledger, or among themselves."""
    earlier = {id for _, fields in entries for id in ids_before(fields)}
    if not earlier:
        return entries
    known = _archived(ledger, log, stream, earlier) | {entry for entry, _ in entries}
    return [(entry, fields) for entry, fields in entries if known.isdisjoint(ids_before(fields))]


def ids_before(fields: Fields) -> list[str]:
    """The ids that an entry had before the server forgot it."""
    return fields.get(WAS, b"").decode(errors="replace").split()


def _archived(ledger: Path, log: Log, stream: str, ids: Collection[str]) -> set[str]:
    """Those of the ids whose entry is in the ledger."""
    oldest = min(map(EntryId.parse, ids))
    late = [
        each for each in log.commits if stream in each.streams and EntryId.parse(each.streams[stream].last) >= oldest
    ]
    files = [file for commit in late for file in commit.files if file.table == TABLE_OF[stream]]
    found = [pq.read_table(ledger / file.path, columns=["entry"])["entry"] for file in files]
    return {id for column in found for id in column.to_pylist() if id in ids}
