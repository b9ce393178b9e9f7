"""The archiver: streams -> Parquet files -> commit -> acknowledge -> trim, in this order (law 5).

::

    take the lease -> read the log -> ( gather -> write files -> commit -> acknowledge -> trim )*

It reads from the last ids in the ledger's own commit log, not from where Redis believes it is, so a crash anywhere
leaves no gap and nothing twice: before the commit the entries are read again, after it they are not. Files are named
after the archiver's fencing number, so one that lost its lease without noticing cannot change another's file; which of
two commits counts is decided by creating its name.

A full disk or a Redis that stays away ends it with an error; nothing was acknowledged that is not on disk. Entries that
left a stream before the ledger had them end it too: it never goes on over a gap.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import redis

from lorabridge.bridge.errors import BridgeError, LedgerError, LedgerTaken
from lorabridge.bridge.ledger import tables
from lorabridge.bridge.ledger.again import without_known
from lorabridge.bridge.ledger.commits import COMMITS, Commit, LedgerFile, Log, Stretch, append, read_log, sha256
from lorabridge.bridge.ledger.lease import Lease, Survey
from lorabridge.bridge.status import Status
from lorabridge.bridge.store.files import disk_errors, sync_folder, write_synced
from lorabridge.bridge.stream.connection import now_ms
from lorabridge.bridge.stream.groups import ensure_group, raise_floor
from lorabridge.bridge.stream.keys import LEDGER_GROUP, TRAINER_GROUP, Keys, Reply
from lorabridge.bridge.stream.trim import EntryId, trim_floor

LEASE_S = 10.0
LISTEN_S = 60.0
_READ_AT_ONCE = 64  # entries of each stream
_FLUSH_BYTES = 64 * 1024 * 1024
_PAUSE_S = 0.05  # so that a trickle does not become a read per entry
_LAST_S = 5.0
_LONGEST_WAIT_S = 1.0  # under the client's socket timeout, and how soon a signal is seen

# Groups that read a stream from its beginning; until they exist nothing of it is trimmed.
_REQUIRED = {
    "announce": (LEDGER_GROUP,),
    "trajectories": (LEDGER_GROUP, TRAINER_GROUP),
    "events": (LEDGER_GROUP,),
}

_LISTENED = ("announce", "events")

_log = logging.getLogger("lorabridge.archiver")


class Batch:
    """Entries that were read and are not yet in the ledger, by the stream's short name."""

    def __init__(self) -> None:
        self.entries: dict[str, list[tuple[str, tables.Fields]]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self.entries.values()))

    def add(self, stream: str, entries: list[tuple[bytes, tables.Fields]]) -> None:
        self.entries.setdefault(stream, []).extend((entry.decode(), fields) for entry, fields in entries)
        self.bytes += sum(len(body) for _, fields in entries for body in fields.values())

    @property
    def stretches(self) -> dict[str, Stretch]:
        """What of each stream it holds."""
        return {
            stream: Stretch(first=some[0][0], last=some[-1][0], entries=len(some))
            for stream, some in self.entries.items()
        }


class Archiver:
    """Writes one run's ledger.

    Args:
        client: of the run's Redis.
        ledger: the ledger's folder; created if it is not there.
        flush_entries, flush_s: a commit is made of about so many stream entries, or of what came in so many seconds.
        lease_s: how long a dead archiver keeps the next one waiting.
        listen_s: how long announcements and events stay for those who listen without a consumer group.
        clock: seconds, monotonic.
        status: told when it has the ledger.
    """

    def __init__(
        self, client: redis.Redis, keys: Keys, ledger: Path, *, flush_entries: int, flush_s: float,
        lease_s: float = LEASE_S, listen_s: float = LISTEN_S, clock: Callable[[], float] = time.monotonic,
        status: Status | None = None,
    ) -> None:  # fmt: skip
        self._client, self._keys, self._ledger = client, keys, ledger
        self._flush_entries, self._flush_s, self._clock = flush_entries, flush_s, clock
        self._listen_ms = round(listen_s * 1000)
        self._wait_s = min(_LONGEST_WAIT_S, flush_s, lease_s / 4)
        self._lease = Lease(client, keys, lease_s)
        self._names = {key.encode(): stream for stream, key in keys.streams.items()}
        self._chain = Log()
        self._status = status or Status()

    def run(self, stop: Callable[[], bool]) -> None:
        """Archive until ``stop`` says so, then what the streams hold by then, for some seconds at most.

        Raises:
            LedgerTaken: another archiver writes this ledger.
            LedgerCorrupt: the commit log is damaged; nothing was written.
            LedgerError: entries left a stream before they were archived, or there are too many for its last seconds.
            DiskFull: nothing of the failed commit counts; it is read again at the next start.
        """
        _prepare(self._ledger)
        self._status.ready("the ledger, which another archiver may have")
        if not self._lease.take(read_log(self._ledger).fence, stop):
            return
        try:
            self._begin()
            self._archive(stop)
        except (BridgeError, OSError):
            self._lease.release()
            raise  # if it is Redis that failed, the lease runs out by itself
        self._lease.release()

    def _archive(self, stop: Callable[[], bool]) -> None:
        until: float | None = None
        while True:
            if stopping := stop():
                until = until or self._clock() + _LAST_S
            batch = self._gather(stop)
            if len(batch):
                self._flush(batch)
            elif stopping:
                return
            if until is None or self._clock() < until:
                continue
            if not self._is_full(batch):
                return  # only what came just now is left, from those who go on writing: it is the next one's
            raise LedgerError(
                f"told to end, and the streams hold more than is written in {_LAST_S:g} s; the rest is still there",
                action="Start it again: it goes on where it ended",
            )

    def _is_full(self, batch: Batch) -> bool:
        """Whether there is enough for a commit, and perhaps more to come."""
        return len(batch) >= self._flush_entries or batch.bytes >= _FLUSH_BYTES

    def _begin(self) -> None:
        """Read the log under the lease, and acknowledge and trim what a crash may have left undone."""
        self._chain = read_log(self._ledger)
        if self._chain.fence > self._lease.number:
            raise _overtaken(self._chain.fence)
        for key in self._keys.streams.values():
            ensure_group(self._client, key, LEDGER_GROUP)
        self._raise_floor(_last_group(self._ledger, [file for commit in self._chain.commits for file in commit.files]))
        self._trim(self._acknowledge())
        self._status.ready()
        _log.info("archiver %d continues %s at commit %d", self._lease.number, self._ledger, self._chain.sequence)

    def _gather(self, stop: Callable[[], bool]) -> Batch:
        """Enough entries for a commit, or what came in time; an empty batch if nothing did."""
        batch, deadline = Batch(), self._clock() + self._flush_s
        while not self._is_full(batch):
            self._lease.renew()
            stopping, left = stop(), deadline - self._clock()
            came = self._read(batch, 0 if stopping else min(left, self._wait_s))
            if left <= 0 or (stopping and not came):
                break
            if 0 < came < _READ_AT_ONCE and not stopping:
                time.sleep(min(left, _PAUSE_S))
        return batch

    def _read(self, batch: Batch, wait_s: float) -> int:
        """Add what comes next to the batch; how many entries came within ``wait_s``."""
        after = {
            key: batch.entries[stream][-1][0] if stream in batch.entries else str(self._chain.cursor(stream))
            for stream, key in self._keys.streams.items()
        }
        count = max(1, min(_READ_AT_ONCE, (self._flush_entries - len(batch)) // len(after)))
        block = round(wait_s * 1000)
        # BLOCK 0 would wait for ever
        reply = cast(Reply, self._client.xread(cast(Any, after), count=count, block=block if block > 0 else None))
        for key, entries in reply:
            batch.add(self._names[key], entries)
        return sum(len(entries) for _, entries in reply)

    def _flush(self, batch: Batch) -> None:
        """Law 5: files, then the commit, then the acknowledgement."""
        files = self._write(batch)
        self._acknowledge()  # where we stood before: nothing was lost between that and the batch
        if not self._commit(batch, files):
            return
        self._raise_floor(_last_group(self._ledger, files))
        trimmed = self._trim(self._acknowledge())
        rows = ", ".join(f"{file.rows} {file.table}" for file in files) or "no rows"
        _log.info("commit %d: %s; %d entries trimmed", self._chain.sequence - 1, rows, trimmed)

    def _raise_floor(self, last: int) -> None:
        """A server that came back older would hand out numbers again whose trajectories the ledger has."""
        if raise_floor(self._client, self._keys, last + 1):
            _log.warning(
                "the stream server is older than the ledger, which has group %d; groups go on from there", last
            )

    def _write(self, batch: Batch) -> tuple[LedgerFile, ...]:
        parts: dict[str, list[pa.Table]] = {}
        for stream, entries in batch.entries.items():
            entries = without_known(self._ledger, self._chain, stream, entries)
            for table, rows in tables.build(stream, entries).items():
                parts.setdefault(table, []).append(rows)
        name = f"{self._chain.sequence:08d}-{self._lease.number}.parquet"
        if unreadable := sum(map(len, parts.get(tables.UNREADABLE, []))):
            _log.warning("%d entries cannot be read; they are kept in the table %s", unreadable, tables.UNREADABLE)
        return tuple(
            write_file(self._ledger, f"{table}/{name}", table, pa.concat_tables(some))
            for table, some in sorted(parts.items())
        )

    def _commit(self, batch: Batch, files: tuple[LedgerFile, ...]) -> bool:
        """Whether the batch is in the ledger now; if not, another's commit came first and we go on from there."""
        commit = Commit(
            sequence=self._chain.sequence,
            previous=self._chain.tip,
            files=files,
            streams=batch.stretches,
            fence=self._lease.number,
            created_ms=now_ms(self._client),
        )
        if append(self._ledger, self._chain, commit):
            return True
        self._chain = read_log(self._ledger)
        if self._chain.fence > self._lease.number:
            raise _overtaken(self._chain.fence)
        return False

    def _acknowledge(self) -> dict[str, Survey]:
        """Move the ledger's group to what is on disk; how each stream stands.

        Raises:
            LedgerError: entries left a stream before they were archived.
        """
        surveys = {}
        for stream, key in self._keys.streams.items():
            cursor = self._chain.cursor(stream)
            surveys[stream] = survey = self._lease.acknowledge(key, cursor)
            if lost := survey.lost(cursor, self._chain.archived(stream)):
                raise LedgerError(
                    f"at least {lost} entries left the stream {stream} before {self._ledger} had them (it has it up to "
                    f"{cursor})",
                    action="Give [ledger] dir the ledger that this run began with, or start a new run",
                )
        return surveys

    def _trim(self, surveys: dict[str, Survey]) -> int:
        """Drop what everybody has finished; how many entries went."""
        listened = EntryId(max(0, now_ms(self._client) - self._listen_ms), 0)
        trimmed = 0
        for stream, key in self._keys.streams.items():
            floor = trim_floor(surveys[stream].groups, _REQUIRED[stream])
            trimmed += self._lease.trim(key, min(floor, listened) if stream in _LISTENED else floor)
        return trimmed


def _prepare(ledger: Path) -> None:
    with disk_errors(str(ledger)):
        for name in (COMMITS, *tables.SCHEMAS):
            (ledger / name).mkdir(parents=True, exist_ok=True)
        sync_folder(ledger)
        sync_folder(ledger.absolute().parent)


def write_file(ledger: Path, path: str, table: str, rows: pa.Table) -> LedgerFile:
    """Write a file whole and durable; it replaces what a crash left under its name."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    body = sink.getvalue().to_pybytes()
    place = ledger / path
    staged = place.parent / f".{place.name}.{uuid.uuid4().hex}"
    try:
        with disk_errors(str(place)):
            write_synced(staged, body)
            staged.replace(place)
            sync_folder(place.parent)
    finally:
        staged.unlink(missing_ok=True)
    return LedgerFile(path=path, table=table, rows=len(rows), sha256=sha256(body), size=len(body))


def _last_group(ledger: Path, files: Iterable[LedgerFile]) -> int:
    """The largest group number in some files, as Parquet's own statistics have it; -1 if there is none."""
    last = -1
    for file in files:
        if file.table == "trajectories" and file.rows:
            metadata = pq.read_metadata(ledger / file.path)
            column = metadata.schema.names.index("group")
            for number in range(metadata.num_row_groups):
                last = max(last, metadata.row_group(number).column(column).statistics.max)
    return last


def _overtaken(fence: int) -> LedgerTaken:
    return LedgerTaken(f"archiver {fence} has written this ledger meanwhile", action="Let that one run, or stop it")
