from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorabridge.bridge import codec
from lorabridge.bridge.errors import LedgerCorrupt, SchemaUnknown
from lorabridge.bridge.ledger.commits import (
    Commit,
    LedgerFile,
    Log,
    Stretch,
    append,
    check_file,
    name_of,
    read_log,
    sha256,
)
from lorabridge.bridge.stream.trim import ZERO, EntryId


def _bodies(ledger: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((ledger / "commits").glob("*.json"))]


def _next(log: Log, **changes: Any) -> Commit:
    fields: dict[str, Any] = {
        "sequence": log.sequence, "previous": log.tip, "files": (), "fence": log.fence or 1, "created_ms": 1,
        "streams": {"events": Stretch(first="10-0", last="11-0", entries=2)},
    }  # fmt: skip
    return Commit(**(fields | changes))


def test_a_log_knows_how_far_it_reads_each_stream(ledger: Path) -> None:
    log = read_log(ledger)
    assert [commit.sequence for commit in log.commits] == [1, 2, 3]
    assert log.sequence == 4
    assert log.fence == 2
    assert log.tip == sha256(_bodies(ledger)[-1])
    assert (log.cursor("announce"), log.archived("announce")) == (EntryId(4, 1), 3)
    assert (log.cursor("trajectories"), log.archived("trajectories")) == (EntryId(3, 0), 3)
    assert (log.cursor("events"), log.archived("events")) == (ZERO, 0)
    assert [file.table for file in log.files] == ["manifests", "trajectories", "trajectories", "manifests"]


def test_no_folder_is_an_empty_log(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none").commits == []


def test_files_that_are_no_commits_are_no_part_of_the_log(ledger: Path) -> None:
    (ledger / "commits" / ".00000004.json.1a2b").write_bytes(b"half")
    (ledger / "commits" / "notes.json").write_bytes(b"x")
    assert read_log(ledger).sequence == 4


def test_any_changed_byte_of_any_commit_is_noticed(ledger: Path) -> None:
    """The last commit too, which no other one names: its seal shows it."""
    for at, body in enumerate(bodies := _bodies(ledger)):
        log = Log()
        for before in bodies[:at]:
            log.accept(before)
        for byte in range(len(body)):
            for changed in (body[byte] ^ 1, body[byte] ^ 0x20):
                with pytest.raises(LedgerCorrupt, match=name_of(at + 1).replace(".", r"\.")):
                    log.accept(body[:byte] + bytes([changed]) + body[byte + 1 :])
        log.accept(body)


@pytest.mark.parametrize("sequence", [1, 2, 3])
@pytest.mark.parametrize(
    "damage", [lambda body: body[:-1], lambda body: body[: len(body) // 2], lambda _: b"", lambda body: body + b"\n"]
)
def test_a_commit_of_another_length_is_noticed(ledger: Path, sequence: int, damage: Callable[[bytes], bytes]) -> None:
    file = ledger / name_of(sequence)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(LedgerCorrupt, match=file.name):
        read_log(ledger)


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_missing_commit_is_named(ledger: Path, sequence: int) -> None:
    (ledger / name_of(sequence)).unlink()
    with pytest.raises(LedgerCorrupt, match=f"{name_of(sequence)} is missing"):
        read_log(ledger)


def test_a_commit_replaced_by_another_sound_one_breaks_the_chain(ledger: Path) -> None:
    file = ledger / name_of(2)
    forged = msgspec.structs.replace(codec.decode_json(Commit, file.read_bytes()), created_ms=2)
    file.write_bytes(codec.encode_json(forged.sealed))
    with pytest.raises(LedgerCorrupt, match=r"00000003\.json does not follow"):
        read_log(ledger)


def test_commits_in_each_others_place_are_noticed(ledger: Path) -> None:
    one, two = ledger / name_of(1), ledger / name_of(2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(LedgerCorrupt, match="holds commit 2"):
        read_log(ledger)


_FILE: dict[str, Any] = {"table": "events", "rows": 1, "sha256": "0" * 64, "size": 1}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sequence": 5}, "holds commit 5"),
        ({"previous": None}, "does not follow"),
        ({"previous": "0" * 64}, "does not follow"),
        ({"fence": 1}, "archiver 1, after archiver 2"),
        ({"streams": {"announce": Stretch(first="4-1", last="9-0", entries=2)}}, "after 4-1"),
        ({"streams": {"announce": Stretch(first="9-0", last="8-0", entries=2)}}, "from 9-0 to 8-0"),
        ({"streams": {"events": Stretch(first="x", last="8-0", entries=2)}}, "not a commit"),
        ({"files": (LedgerFile(path="../secret.parquet", **_FILE),)}, "outside its tables"),
        ({"files": (LedgerFile(path="/etc/passwd", **_FILE),)}, "outside its tables"),
        ({"files": (LedgerFile(path="manifests/00000004-1.parquet", **_FILE),)}, "outside its tables"),
    ],
)  # fmt: skip
def test_what_may_not_come_next(ledger: Path, changes: dict[str, Any], problem: str) -> None:
    log = read_log(ledger)
    before = (log.sequence, log.tip, log.fence, log.cursor("announce"))
    commit = _next(log, **changes)
    with pytest.raises(LedgerCorrupt, match=problem):
        log.accept(codec.encode_json(commit.sealed))
    with pytest.raises(LedgerCorrupt, match=problem):
        append(ledger, log, commit)
    assert (log.sequence, log.tip, log.fence, log.cursor("announce")) == before
    assert not (ledger / name_of(4)).exists()


def test_a_commit_without_its_seal_is_refused(ledger: Path) -> None:
    log = read_log(ledger)
    with pytest.raises(LedgerCorrupt, match="seal"):
        log.accept(codec.encode_json(_next(log)))


def test_a_commit_of_another_release_is_not_called_corrupt(ledger: Path) -> None:
    log = read_log(ledger)
    with pytest.raises(SchemaUnknown):
        log.accept(codec.encode_json(_next(log, schema=2).sealed))


def test_of_two_writers_one_commits(ledger: Path) -> None:
    mine, theirs = read_log(ledger), read_log(ledger)
    assert append(ledger, theirs, _next(theirs))
    before = (ledger / name_of(4)).read_bytes()
    assert not append(ledger, mine, _next(mine, created_ms=9))
    assert mine.sequence == 4
    assert (ledger / name_of(4)).read_bytes() == before
    assert read_log(ledger).sequence == 5


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes instead of"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "bytes instead of"),
        (lambda file: file.write_bytes(b""), "0 bytes instead of"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9] + b"x" + file.read_bytes()[-8:]), "was changed"),
    ],
)
def test_a_damaged_file_is_named(ledger: Path, damage: Callable[[Path], None], problem: str) -> None:
    file = read_log(ledger).files[1]
    assert check_file(ledger, file)
    damage(ledger / file.path)
    with pytest.raises(LedgerCorrupt, match=problem) as caught:
        check_file(ledger, file)
    assert file.path in caught.value.problem
    assert "Restore" in caught.value.action
