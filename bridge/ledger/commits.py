"""The commit log: what the ledger holds, as a chain that shows every gap and every changed byte.

::

    <ledger>/commits/<sequence>.json
    <ledger>/<table>/<sequence>-<fence>.parquet

A commit names its files with their digests, how far it reads each stream, and the digest of the commit before it. Its
seal covers its own fields, so that a change to the last commit shows as well. A file that no commit names, left by a
crash, is no part of the ledger.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import ClassVar

import msgspec

from lorabridge.bridge import codec
from lorabridge.bridge.errors import CodecError, LedgerCorrupt, SchemaUnknown
from lorabridge.bridge.store.files import create
from lorabridge.bridge.stream.trim import ZERO, EntryId

COMMITS = "commits"

_NAME = re.compile(r"[0-9]{8,}\.json")
_PATH = re.compile(r"(trajectories|manifests|events|unreadable)/[0-9]{8,}-[0-9]+\.parquet")
_RESTORE = "Restore it from a copy of the ledger; what it held cannot be made again"


class LedgerFile(msgspec.Struct, frozen=True, kw_only=True):
    """A Parquet file of the ledger: ``path`` is relative to its folder, ``size`` in bytes, ``sha256`` in hex."""

    path: str
    table: str
    rows: int
    sha256: str
    size: int


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of a stream, from the id ``first`` to ``last``: so many."""

    first: str
    last: str
    entries: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the ledger.

    Attributes:
        sequence: 1, 2, 3, ...
        previous: sha256 (hex) of the previous commit file's bytes, None for the first.
        files: what was added.
        streams: by short name (``announce``, ``trajectories``, ``events``), what of each stream it holds.
        fence: number of the archiver that wrote it; it never goes down.
        created_ms: milliseconds since 1970, on the stream server's clock.
        seal: sha256 (hex) over this commit's canonical JSON with an empty seal.
    """

    READS_SCHEMAS: ClassVar[tuple[int, ...]] = (1,)

    sequence: int
    previous: str | None
    files: tuple[LedgerFile, ...]
    streams: dict[str, Stretch]
    fence: int
    created_ms: int
    seal: str = ""
    schema: int = 1

    @property
    def sealed(self) -> Commit:
        """This commit with its seal."""
        blank = msgspec.structs.replace(self, seal="")
        return msgspec.structs.replace(self, seal=sha256(codec.encode_json(blank)))


def sha256(body: bytes) -> str:
    """In hex."""
    return hashlib.sha256(body).hexdigest()


def name_of(sequence: int) -> str:
    """A commit file's path in the ledger's folder."""
    return f"{COMMITS}/{sequence:08d}.json"


class Log:
    """A chain of commits, checked as it grows: bytes in, a trusted commit out, or ``LedgerCorrupt``. No I/O."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.tip: str | None = None  # sha256 of the last commit's bytes
        self.fence = 0
        self._cursors: dict[str, EntryId] = {}
        self._archived: dict[str, int] = {}

    @property
    def sequence(self) -> int:
        """Of the next commit."""
        return len(self.commits) + 1

    @property
    def files(self) -> list[LedgerFile]:
        """Every file, in the order of the commits."""
        return [file for commit in self.commits for file in commit.files]

    def cursor(self, stream: str) -> EntryId:
        """Last id of the stream that the ledger holds."""
        return self._cursors.get(stream, ZERO)

    def archived(self, stream: str) -> int:
        """How many entries of the stream the ledger holds."""
        return self._archived.get(stream, 0)

    def accept(self, body: bytes) -> Commit:
        """Add the next commit. Raises as ``check`` does, and the log is as it was."""
        commit = self.check(body)
        self.commits.append(commit)
        self.tip, self.fence = sha256(body), commit.fence
        for stream, some in commit.streams.items():
            self._cursors[stream] = EntryId.parse(some.last)
            self._archived[stream] = self.archived(stream) + some.entries
        return commit

    def check(self, body: bytes) -> Commit:
        """The commit in ``body``, which may be the next.

        Raises:
            LedgerCorrupt: it is not the sealed successor of the commits before.
            SchemaUnknown: written by a release whose ledgers this one does not read.
        """
        name = name_of(self.sequence)
        if not _is_sealed(body):
            raise LedgerCorrupt(f"{name} is cut short or changed: its seal does not fit", action=_RESTORE)
        try:
            commit = codec.decode_json(Commit, body)
            stretches = {
                stream: (EntryId.parse(some.first), EntryId.parse(some.last)) for stream, some in commit.streams.items()
            }
        except SchemaUnknown:
            raise
        except CodecError as error:
            raise LedgerCorrupt(f"{name} is not a commit: {error.problem}", action=_RESTORE) from error
        if problem := self._problem(commit, stretches):
            raise LedgerCorrupt(f"{name} {problem}", action=_RESTORE)
        return commit

    def _problem(self, commit: Commit, stretches: dict[str, tuple[EntryId, EntryId]]) -> str | None:
        if commit.sequence != self.sequence:
            return f"holds commit {commit.sequence}"
        if commit.previous != self.tip:
            return "does not follow the commit before it: one of the two was changed or replaced"
        if commit.fence < self.fence:
            return f"is from archiver {commit.fence}, after archiver {self.fence} had taken over"
        for stream, (first, last) in stretches.items():
            if not self.cursor(stream) < first <= last:
                return f"reads {stream} from {first} to {last}, after {self.cursor(stream)}"
        for file in commit.files:
            if not (_PATH.fullmatch(file.path) and file.path.startswith(f"{file.table}/")):
                return f"names a file outside its tables: {file.path!r}"
        return None


def read_log(ledger: Path) -> Log:
    """The log in a ledger's folder; an empty one if there is none yet.

    Raises:
        LedgerCorrupt: a commit is missing, cut short or changed.
        SchemaUnknown: written by a release whose ledgers this one does not read.
    """
    log = Log()
    for file in sorted((f for f in (ledger / COMMITS).glob("*.json") if _NAME.fullmatch(f.name)), key=_sequence):
        if _sequence(file) != log.sequence:
            raise LedgerCorrupt(f"{ledger / name_of(log.sequence)} is missing, {file.name} is there", action=_RESTORE)
        try:
            log.accept(file.read_bytes())
        except LedgerCorrupt as error:
            raise LedgerCorrupt(f"{ledger}/{error.problem}", action=error.action) from error
    return log


def append(ledger: Path, log: Log, commit: Commit) -> bool:
    """Write ``commit`` as the log's next and add it to ``log``; False, and nothing written, if there is one already.

    Durable on return.

    Raises:
        DiskFull: there is no room for it; nothing was written.
    """
    body = codec.encode_json(commit.sealed)
    log.check(body)  # before it is there for good
    if not create(ledger / name_of(log.sequence), body):
        return False
    log.accept(body)
    return True


def check_file(ledger: Path, file: LedgerFile) -> bytes:
    """The bytes of a file of the ledger, which are those that its commit names.

    Raises:
        LedgerCorrupt: it is missing, cut short or changed.
    """
    place = ledger / file.path
    try:
        body = place.read_bytes()
    except FileNotFoundError as error:
        raise LedgerCorrupt(f"{place} is missing", action=_RESTORE) from error
    if len(body) != file.size:
        raise LedgerCorrupt(f"{place} has {len(body)} bytes instead of {file.size}", action=_RESTORE)
    if sha256(body) != file.sha256:
        raise LedgerCorrupt(f"{place} was changed: its bytes are not those of its commit", action=_RESTORE)
    return body


def _is_sealed(body: bytes) -> bool:
    """Whether the seal fits, whatever the schema: corrupt is told from written by another release."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, object])
    except codec.UNREADABLE:
        return False
    blank = codec.canonical_json({**fields, "seal": ""})
    return codec.canonical_json(fields) == body and fields.get("seal") == sha256(blank)


def _sequence(file: Path) -> int:
    return int(file.stem)
