"""Reading a ledger: the log first, then every file against its digest, then its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lorabridge.bridge.errors import LedgerError
from lorabridge.bridge.events import Event, Happening
from lorabridge.bridge.ledger import tables
from lorabridge.bridge.ledger.commits import LedgerFile, check_file, read_log
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.trajectory import Trajectory

# What makes two rows of a table the same thing sent twice; the first counts (law 6). Events have no identity.
_IDENTITY = {"trajectories": "id", "manifests": "policy, version, digest"}

_QUARANTINED = """
CREATE VIEW quarantined AS
SELECT at_ms, source, subject, reason FROM events WHERE kind = 'quarantine'
UNION ALL
SELECT CAST(split_part(entry, '-', 1) AS BIGINT), 'archiver', stream || ' ' || entry, reason FROM unreadable
"""


class Ledger:
    """A ledger as it was when it was opened; later commits are not seen.

    Raises:
        LedgerError: there is no ledger in ``dir``, or nothing in it yet.
        LedgerCorrupt: a commit is missing, cut short or changed. Every read raises it for its files.
        SchemaUnknown: written by a release whose ledgers this one does not read.
    """

    def __init__(self, dir: Path) -> None:
        self.dir = dir
        self.commits = tuple(read_log(dir).commits)
        if not self.commits:
            problem = "has no commit yet" if dir.is_dir() else "is not there"
            raise LedgerError(
                f"the ledger {dir} {problem}", action="Check its path, and that `lorabridge archiver` ran"
            )

    def trajectories(self, *, ids: Collection[str] | None = None) -> Iterator[Trajectory]:
        """Every trajectory once, in the stream's order; with ``ids``, those of them that are there."""
        wanted = None if ids is None else pa.array(list(ids), pa.string())
        seen: set[str] = set()
        for table in self._read("trajectories"):
            rows = table if wanted is None else table.filter(pc.is_in(table["id"], wanted))
            for trajectory in tables.trajectories(rows):
                if trajectory.id not in seen:
                    seen.add(trajectory.id)
                    yield trajectory

    def trajectory(self, id: str) -> Trajectory:
        """The trajectory ``id``, which may be cut at either end as long as it names one.

        Raises:
            LedgerError: none has that id, or several have.
        """
        every = [name.as_py() for table in self._read("trajectories", ["id"]) for name in table["id"]]
        return next(self.trajectories(ids=[match(id, every)]))

    def manifests(self) -> list[Manifest]:
        """Every announced version once, in the stream's order."""
        every = (manifest for table in self._read("manifests") for manifest in tables.manifests(table))
        return list({(each.policy, each.version, each.digest): each for each in every}.values())

    def events(self, kind: type[Happening] | None = None) -> Iterator[Event]:
        """Every event in the stream's order, or those whose happening is a ``kind``."""
        for table in self._read("events"):
            rows = table if kind is None else table.filter(pc.equal(table["kind"], tables.kind_of(kind)))
            yield from tables.events(rows)

    def connection(self) -> duckdb.DuckDBPyConnection:
        """DuckDB in memory, with views over exactly the committed files, each checked.

        ``trajectories``, ``manifests``, ``events`` and ``unreadable`` are the tables (see
        ``lorabridge.bridge.ledger.tables``; ``group`` is a word of SQL and needs quotes), what was sent twice being
        there once. ``quarantined`` (at_ms, source, subject, reason) is every sample and entry that was set aside.
        """
        connection = duckdb.connect(":memory:")
        for table in tables.SCHEMAS:
            paths = [self.dir / file.path for file in self._files(table) if check_file(self.dir, file)]
            if paths:
                connection.execute(_view(table, paths))
            else:
                connection.register(f"no_{table}", tables.SCHEMAS[table].empty_table())
                connection.execute(f"CREATE VIEW {table} AS SELECT * FROM no_{table}")
        connection.execute(_QUARANTINED)
        return connection

    def _files(self, table: str) -> list[LedgerFile]:
        return [file for commit in self.commits for file in commit.files if file.table == table]

    def _read(self, table: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Rows of each file. What is parsed is what was checked: both are the bytes in memory."""
        for file in self._files(table):
            yield pq.read_table(pa.BufferReader(check_file(self.dir, file)), columns=columns)


def _view(table: str, paths: Sequence[Path]) -> str:
    """SQL of a view over some files."""
    quoted = ("'" + str(path.absolute()).replace("'", "''") + "'" for path in paths)
    files = f"[{', '.join(quoted)}]"
    if table not in _IDENTITY:
        return f"CREATE VIEW {table} AS SELECT * FROM read_parquet({files})"
    return (
        f"CREATE VIEW {table} AS SELECT * EXCLUDE (filename, file_row_number) "
        f"FROM read_parquet({files}, filename = true, file_row_number = true) QUALIFY row_number() OVER "
        f"(PARTITION BY {_IDENTITY[table]} ORDER BY filename, file_row_number) = 1"
    )


def match(wanted: str, ids: Iterable[str]) -> str:
    """The one of ``ids`` that ``wanted`` names: itself, else its end after a ``/``, else its beginning or end.

    Raises:
        LedgerError: none does, or several do.
    """
    every = dict.fromkeys(ids)
    if wanted in every:
        return wanted
    found = [id for id in every if id.endswith(f"/{wanted}")] or [
        id for id in every if id.startswith(wanted) or id.endswith(wanted)
    ]
    if not found:
        raise LedgerError(
            f"no trajectory {wanted!r} among the {len(every)} of the ledger",
            action="An id is <run>/<group>.<attempt>/<index>; is the archiver behind, or is this another run's ledger?",
        )
    if len(found) > 1:
        few = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise LedgerError(f"{wanted!r} names {len(found)} trajectories: {few}", action="Give more of the id")
    return found[0]
