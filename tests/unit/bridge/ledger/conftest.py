"""Values of a run and a ledger on disk, without Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lorabridge.bridge import codec
from lorabridge.bridge.events import Event, Happening
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.ledger import tables
from lorabridge.bridge.ledger.archiver import write_file
from lorabridge.bridge.ledger.commits import Commit, Stretch, append, read_log
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.stream.keys import BODY
from lorabridge.bridge.trajectory import Group, Sampling, Span, Trajectory, Turn

Streams = dict[str, list[tuple[str, dict[bytes, bytes]]]]


def make_turn(*versions: tuple[int, int]) -> Turn:
    """A turn sampled by these (version, tokens), one span each."""
    spans, at = [], 0
    for version, tokens in versions:
        spans.append(
            Span(
                policy="policy", version=version, digest=f"sha256:{version:064x}", epoch=version, start=at,
                end=at + tokens, kv="kept" if at else "fresh",
            )
        )  # fmt: skip
        at += tokens
    return Turn(
        prompt_ids=(1, 2, 3),
        token_ids=tuple(range(at)),
        logprobs=(-0.5,) * at,
        mask=(1,) * at,
        spans=tuple(spans),
        finish_reason="stop",
    )


def make_trajectory(group: int = 0, index: int = 0, **changes: Any) -> Trajectory:
    """Four tokens of version 1, unless ``changes`` say otherwise."""
    fields: dict[str, Any] = {
        "run": "run", "policy": "policy", "group": group, "attempt": 1, "index": index, "environment": "sha256:e",
        "prompt": "sha256:p", "base": "sha256:b", "turns": (make_turn((1, 4)),), "sampling": Sampling(), "seed": 7,
        "logprobs_mode": "processed_logprobs", "dtype": "float32", "generator": "g0", "instance": "i0", "reward": 0.5,
        "rewards": {"exact": 0.5, "unscored": None}, "advantage": -1.0,
        "times_ms": {"claimed": 1000, "sampled": 2000, "rewarded": 2001},
    }  # fmt: skip
    return Trajectory(**(fields | changes))


def make_manifest(version: int = 1, **changes: Any) -> Manifest:
    """Version ``version``, made at optimizer step ``version - 1``."""
    fields: dict[str, Any] = {
        "policy": "policy", "version": version, "digest": f"sha256:{version:064x}", "parent": None,
        "base": Fingerprint(checkpoint="c", tokenizer="t", template="m"), "rank": 8, "targets": ("k_proj", "q_proj"),
        "dtype": "F32", "step": version - 1, "epoch": 1, "run": "run", "created_ms": 1000, "size": 10,
    }  # fmt: skip
    return Manifest(**(fields | changes))


def fields_of(record: codec.Record) -> dict[bytes, bytes]:
    """A stream entry's fields."""
    return {BODY: codec.encode(record)}


def group_fields(*trajectories: Trajectory) -> dict[bytes, bytes]:
    first = trajectories[0]
    return fields_of(Group(group=first.group, attempt=first.attempt, worker="w0", trajectories=trajectories))


def event_fields(happening: Happening, at_ms: int = 5000) -> dict[bytes, bytes]:
    return fields_of(Event(source="trainer", at_ms=at_ms, happening=happening))


def write_commit(ledger: Path, streams: Streams, fence: int = 1) -> Commit:
    """One commit of these entries, as the archiver makes it."""
    log = read_log(ledger)
    parts: dict[str, list[pa.Table]] = {}
    for stream, entries in streams.items():
        for table, rows in tables.build(stream, entries).items():
            parts.setdefault(table, []).append(rows)
    files = []
    for table, some in parts.items():
        (ledger / table).mkdir(parents=True, exist_ok=True)
        path = f"{table}/{log.sequence:08d}-{fence}.parquet"
        files.append(write_file(ledger, path, table, pa.concat_tables(some)))
    commit = Commit(
        sequence=log.sequence, previous=log.tip, files=tuple(files), fence=fence, created_ms=1,
        streams={s: Stretch(first=e[0][0], last=e[-1][0], entries=len(e)) for s, e in streams.items()},
    )  # fmt: skip
    assert append(ledger, log, commit)
    return log.commits[-1]


class Make:
    """The functions above, for tests that cannot import this file."""

    turn = staticmethod(make_turn)
    trajectory = staticmethod(make_trajectory)
    manifest = staticmethod(make_manifest)
    fields = staticmethod(fields_of)
    group = staticmethod(group_fields)
    event = staticmethod(event_fields)
    commit = staticmethod(write_commit)


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make


@pytest.fixture
def ledger(tmp_path: Path, make: type[Make]) -> Path:
    """Three commits: two groups of two, one of them sent twice, and versions 1 and 2, the first announced twice."""
    dir = tmp_path / "ledger"
    first = make.group(make.trajectory(0, 0), make.trajectory(0, 1))
    second = make.group(make.trajectory(1, 0), make.trajectory(1, 1, generator="g1"))
    make.commit(dir, {"announce": [("1-0", make.fields(make.manifest(1)))], "trajectories": [("1-1", first)]})
    make.commit(dir, {"trajectories": [("2-0", second), ("3-0", first)]}, fence=2)
    manifests: list[tuple[str, dict[bytes, bytes]]] = [
        ("4-0", make.fields(make.manifest(1))), ("4-1", make.fields(make.manifest(2))),
    ]  # fmt: skip
    make.commit(dir, {"announce": manifests}, fence=2)
    return dir
