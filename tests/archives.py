"""What the archiver is given in tests, and what must be in the ledger then."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import redis

from lorabridge.bridge import codec
from lorabridge.bridge.events import Event, Quarantine
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.ledger.archiver import Archiver
from lorabridge.bridge.ledger.commits import check_file, read_log
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.stream.keys import BODY, Keys
from lorabridge.bridge.stream.trim import EntryId
from lorabridge.bridge.trajectory import Group, Sampling, Span, Trajectory, Turn
from tests.groups import reader_of

LEASE_S = 60.0  # nothing here waits for one to run out, except where a test says so


def make_group(number: int) -> Group:
    span = Span(policy="policy", version=1, digest="sha256:d", epoch=1, start=0, end=2, kv="fresh")
    turn = Turn(
        prompt_ids=(1, 2), token_ids=(3, 4), logprobs=(-0.25, -1.5), mask=(1, 1), spans=(span,), finish_reason="stop"
    )
    return Group(
        group=number,
        attempt=1,
        worker="w",
        trajectories=tuple(
            Trajectory(
                run="run", policy="policy", group=number, attempt=1, index=index, environment="e", prompt="p", base="b",
                turns=(turn,), sampling=Sampling(), seed=1, logprobs_mode="processed_logprobs", dtype="float32",
                generator="g", instance="i", reward=1.0, rewards={"exact": 1.0}, advantage=0.0, times_ms={"sampled": 1},
            )
            for index in range(2)
        ),
    )  # fmt: skip


def make_manifest(version: int) -> Manifest:
    base = Fingerprint(checkpoint="c", tokenizer="t", template="m")
    return Manifest(
        policy="policy", version=version, digest=f"sha256:{version}", parent=None, base=base, rank=1, targets=("q",),
        dtype="F32", step=version, epoch=1, run="run", created_ms=1, size=1,
    )  # fmt: skip


def send(client: redis.Redis, stream: str, record: codec.Record) -> str:
    """The entry's id."""
    return cast(bytes, client.xadd(stream, {BODY: codec.encode(record)})).decode()


def send_all(client: redis.Redis, keys: Keys, numbers: range) -> list[str]:
    """A group, a version and an event for each number; ids of the groups' entries."""
    for number in numbers:
        send(client, keys.announce, make_manifest(number + 1))
        happening = Quarantine(subject=str(number), reason="r")
        send(client, keys.events, Event(source="s", at_ms=number, happening=happening))
    return [send(client, keys.trajectories, make_group(number)) for number in numbers]


def make_archiver(
    client: redis.Redis, keys: Keys, ledger: Path, lease_s: float = LEASE_S, entries: int = 512, listen_s: float = 0
) -> Archiver:
    return Archiver(client, keys, ledger, flush_entries=entries, flush_s=60, lease_s=lease_s, listen_s=listen_s)


def drain(archiver: Archiver) -> None:
    """Archive what is there, and stop."""
    archiver.run(lambda: archiver._lease.number > 0)


def forget_lease(client: redis.Redis, keys: Keys) -> None:
    """As if the time of a dead archiver's lease were over."""
    client.delete(keys.archiver)


def raw_rows(ledger: Path, table: str, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """What the committed files hold, before the reader drops what was sent twice."""
    rows = []
    for file in read_log(ledger).files:
        check_file(ledger, file)
        if file.table == table:
            rows += [tuple(row[column] for column in columns) for row in pq.read_table(ledger / file.path).to_pylist()]
    return rows


def assert_holds(ledger: Path, numbers: range) -> None:
    """No gap and no double, in any table."""
    expected = [(f"run/{number}.1/{index}",) for number in numbers for index in range(2)]
    assert raw_rows(ledger, "trajectories", ("id",)) == expected
    assert raw_rows(ledger, "manifests", ("version",)) == [(number + 1,) for number in numbers]
    assert raw_rows(ledger, "events", ("subject",)) == [(str(number),) for number in numbers]
    assert [trajectory for number in numbers for trajectory in make_group(number).trajectories] == list(
        Ledger(ledger).trajectories()
    )


def acknowledged(client: redis.Redis, stream: str) -> EntryId:
    """Last id that the ledger's group says it has."""
    groups = client.xinfo_groups(stream)
    return next(
        (EntryId.parse(group["last-delivered-id"].decode()) for group in groups if group["name"] == b"ledger"),
        EntryId(0, 0),
    )


def ids_in(client: redis.Redis, stream: str) -> list[str]:
    return [entry.decode() for entry, _ in cast(list[tuple[bytes, Any]], client.xrange(stream))]


def finish_all(client: redis.Redis, keys: Keys) -> None:
    """The trainer has trained on everything, so that whatever the ledger acknowledges may go."""
    reader = reader_of(client, keys, "t0")
    while read := reader.read(block_ms=1):
        reader.finish([read[0]])
