"""The ledger's tables: what a stream entry becomes as rows, and how rows become values again.

============== ======================================================================================
table          one row per
============== ======================================================================================
trajectories   trajectory of a group on the stream ``trajectories``
manifests      entry of the stream ``announce``
events         entry of the stream ``events``
unreadable     entry of any stream that is not what it should be: kept with its bytes and the reason
============== ======================================================================================

``entry`` is the id of the stream entry a row came from. Logprobs are float32, which is what vLLM computes them in, so
that a trajectory read back equals the one that was sent. An event's ``record`` holds the bytes as they were sent;
``body`` is the same as JSON, and the flat columns what most queries ask for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa

from lorabridge.bridge import codec
from lorabridge.bridge.errors import CodecError
from lorabridge.bridge.events import Event, Happening, Resident
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.stream.groups import decode_group
from lorabridge.bridge.stream.head import decode_announcement
from lorabridge.bridge.stream.keys import BODY
from lorabridge.bridge.trajectory import Trajectory

Fields = dict[bytes, bytes]
Row = dict[str, Any]

UNREADABLE = "unreadable"
TABLE_OF = {"announce": "manifests", "trajectories": "trajectories", "events": "events"}

_SPAN = pa.struct({
    "policy": pa.string(), "version": pa.int64(), "digest": pa.string(), "epoch": pa.int64(),
    "start": pa.int32(), "end": pa.int32(), "kv": pa.string(),
})  # fmt: skip
_TURN = pa.struct({
    "prompt_ids": pa.list_(pa.int32()), "token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32()),
    "mask": pa.list_(pa.int8()), "spans": pa.list_(_SPAN), "finish_reason": pa.string(),
})  # fmt: skip
_SAMPLING = pa.struct({
    "temperature": pa.float64(), "top_p": pa.float64(), "top_k": pa.int64(), "min_p": pa.float64(),
    "repetition_penalty": pa.float64(), "max_tokens": pa.int64(),
})  # fmt: skip
_TRAITS = pa.struct({
    "config": pa.string(), "weights": pa.int64(), "tokens": pa.list_(pa.int32()), "template": pa.int64(),
})  # fmt: skip
_BASE = pa.struct({
    "checkpoint": pa.string(), "tokenizer": pa.string(), "template": pa.string(), "traits": _TRAITS,
})  # fmt: skip

_LOGPROBS = pa.list_(pa.list_(pa.float64()))
_CANARY = pa.struct({
    "sequences": pa.list_(pa.list_(pa.int32())), "adapter": _LOGPROBS, "base": _LOGPROBS, "dtype": pa.string(),
})  # fmt: skip
SCHEMAS: dict[str, pa.Schema] = {
    "trajectories": pa.schema({
        "entry": pa.string(), "id": pa.string(), "worker": pa.string(), "schema": pa.int32(),
        "run": pa.string(), "policy": pa.string(), "group": pa.int64(), "attempt": pa.int64(), "index": pa.int64(),
        "environment": pa.string(), "prompt": pa.string(), "base": pa.string(), "turns": pa.list_(_TURN),
        "sampling": _SAMPLING, "seed": pa.int64(), "logprobs_mode": pa.string(), "dtype": pa.string(),
        "generator": pa.string(), "instance": pa.string(), "reward": pa.float64(),
        "rewards": pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()})), "advantage": pa.float64(),
        "times_ms": pa.list_(pa.struct({"name": pa.string(), "at": pa.int64()})), "purpose": pa.string(),
    }),
    "manifests": pa.schema({
        "entry": pa.string(), "policy": pa.string(), "version": pa.int64(), "digest": pa.string(),
        "parent": pa.string(), "base": _BASE, "rank": pa.int32(), "targets": pa.list_(pa.string()),
        "dtype": pa.string(), "step": pa.int64(), "epoch": pa.int64(), "run": pa.string(), "created_ms": pa.int64(),
        "size": pa.int64(), "canary": _CANARY, "consumed": pa.null(), "schema": pa.int32(),
    }),
    "events": pa.schema({
        "entry": pa.string(), "source": pa.string(), "at_ms": pa.int64(), "kind": pa.string(), "body": pa.string(),
        "policy": pa.string(), "version": pa.int64(), "digest": pa.string(), "step": pa.int64(),
        "trajectories": pa.list_(pa.string()), "tokens": pa.int64(), "lag_total": pa.int64(), "lag_max": pa.int64(),
        "lag_s": pa.float64(), "reward": pa.float64(), "generator": pa.string(), "instance": pa.string(),
        "epoch": pa.int64(), "subject": pa.string(), "reason": pa.string(), "record": pa.binary(),
    }),
    UNREADABLE: pa.schema({"stream": pa.string(), "entry": pa.string(), "reason": pa.string(), "record": pa.binary()}),
}  # fmt: skip


def build(stream: str, entries: Iterable[tuple[str, Fields]]) -> dict[str, pa.Table]:
    """Rows of some entries (id, fields) of one stream, by table; a table without rows is left out."""
    parts: defaultdict[str, list[pa.Table]] = defaultdict(list)
    for entry, fields in entries:
        try:
            table, rows = _CODECS[stream](entry, fields)
            parts[table].append(_table(table, rows))
        except CodecError as error:
            parts[UNREADABLE].append(_table(UNREADABLE, [_unreadable(stream, entry, fields, error.problem)]))
    return {table: pa.concat_tables(some) for table, some in parts.items() if any(len(part) for part in some)}


def trajectories(table: pa.Table) -> Iterator[Trajectory]:
    """The trajectories of some rows, in order."""
    for batch in table.to_batches(max_chunksize=64):
        for row in batch.to_pylist():
            row["rewards"] = {each["name"]: each["value"] for each in row["rewards"]}
            row["times_ms"] = {each["name"]: each["at"] for each in row["times_ms"]}
            yield msgspec.convert(row, Trajectory)


def manifests(table: pa.Table) -> list[Manifest]:
    """The manifests of some rows, in order."""
    return [msgspec.convert(row, Manifest) for row in table.to_pylist()]


def events(table: pa.Table) -> Iterator[Event]:
    """The events of some rows, in order."""
    for record in table.column("record"):
        yield codec.decode(Event, record.as_py())


def kind_of(happening: type[Happening]) -> str:
    """What the column ``kind`` says of such a happening: its tag on the wire."""
    tag = happening.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def _trajectory_rows(entry: str, fields: Fields) -> tuple[str, list[Row]]:
    _body(fields)
    group = decode_group(fields)
    return "trajectories", [
        msgspec.to_builtins(trajectory)
        | {
            "entry": entry,
            "id": trajectory.id,
            "worker": group.worker,
            "schema": group.schema,
            "rewards": [{"name": name, "value": value} for name, value in trajectory.rewards.items()],
            "times_ms": [{"name": name, "at": at} for name, at in trajectory.times_ms.items()],
        }
        for trajectory in group.trajectories
    ]


def _manifest_rows(entry: str, fields: Fields) -> tuple[str, list[Row]]:
    _body(fields)
    return "manifests", [msgspec.to_builtins(decode_announcement(fields)) | {"entry": entry}]


def _event_rows(entry: str, fields: Fields) -> tuple[str, list[Row]]:
    record = _body(fields)
    event = codec.decode(Event, record)
    happening = event.happening
    subject = happening.residency if isinstance(happening, Resident) else happening
    flat = {name: getattr(subject, name) for name in subject.__struct_fields__ if name in _FLAT}
    row = {
        "entry": entry, "source": event.source, "at_ms": event.at_ms, "kind": kind_of(type(happening)),
        "body": codec.encode_json(event).decode(), "record": record,
    }  # fmt: skip
    return "events", [flat | row]


_FLAT = frozenset(SCHEMAS["events"].names) - {"entry", "source", "at_ms", "kind", "body", "record"}
_CODECS: dict[str, Callable[[str, Fields], tuple[str, list[Row]]]] = {
    "announce": _manifest_rows,
    "trajectories": _trajectory_rows,
    "events": _event_rows,
}


def _unreadable(stream: str, entry: str, fields: Fields, reason: str) -> Row:
    record = fields[BODY] if fields.keys() == {BODY} else msgspec.msgpack.encode(list(fields.items()))
    return {"stream": stream, "entry": entry, "reason": reason, "record": record}


def _body(fields: Fields) -> bytes:
    if BODY not in fields:
        raise CodecError("an entry without the field 'body'", action="Look at who wrote it")
    return fields[BODY]


def _table(table: str, rows: list[Row]) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows, schema=SCHEMAS[table])
    except (pa.ArrowException, OverflowError) as error:
        raise CodecError(f"a value that the table {table} cannot hold: {error}", action=_ACTION) from error


_ACTION = "Look at who wrote it; the bytes are kept"
