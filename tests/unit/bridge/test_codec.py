"""Records come back as they went, and bad bytes are ``CodecError`` and nothing else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge import codec
from lorabridge.bridge.errors import CodecError, SchemaUnknown
from lorabridge.bridge.events import Consumed, Dropped, Event, Happening, Published, Quarantine, Resident
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import Residency
from lorabridge.bridge.run_record import RunRecord
from lorabridge.bridge.trajectory import Group
from tests.factories import digest_of, make_group, make_manifest, make_residency, make_run_record

HAPPENINGS: list[Happening] = [
    Resident(residency=make_residency(1, 1), swap_ms={"load": 3.5}),
    Consumed(policy="policy", step=1, trajectories=("run/0.1/0",), tokens=4, lag_total=2, lag_max=1, lag_s=1.5,
             reward=0.5),
    Dropped(policy="policy", trajectories=("run/0.1/0",), reason="too old"),
    Quarantine(subject="run/0.1/0", reason="no residency record"),
    Published(policy="policy", version=1, digest=digest_of("x"), step=0, phases_ms={"blocked": 1.0}),
]  # fmt: skip
RECORDS: list[Any] = [
    make_manifest(), make_manifest(7, parent=None), make_group(), make_residency(3, 2), make_run_record(),
    *(Event(source="trainer", at_ms=1, happening=happening) for happening in HAPPENINGS),
]  # fmt: skip
KINDS: list[type[Any]] = [Manifest, Group, Residency, RunRecord, Event]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_went(record: Any) -> None:
    assert codec.decode(type(record), codec.encode(record)) == record
    assert codec.decode_json(type(record), codec.encode_json(record)) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_record_reads_the_schema_that_it_writes(record: Any) -> None:
    assert record.schema in type(record).READS_SCHEMAS


@pytest.mark.parametrize("schema", [0, 2, -1, 2**40])
def test_an_unknown_schema_is_refused_whatever_else_the_record_holds(schema: int) -> None:
    for body in ({"schema": schema}, msgspec.to_builtins(make_manifest()) | {"schema": schema}):
        with pytest.raises(SchemaUnknown, match=f"schema {schema}; this release reads 1"):
            codec.decode(Manifest, msgspec.msgpack.encode(body))
        with pytest.raises(SchemaUnknown):
            codec.decode_json(Manifest, msgspec.json.encode(body))


@pytest.mark.parametrize("body", [{}, {"schema": "1"}, {"schema": True}, {"schema": None}, {"schema": 1}, [], None, 1])
def test_a_record_without_a_schema_or_without_fields_is_unreadable(body: object) -> None:
    with pytest.raises(CodecError, match="not a readable Manifest"):
        codec.decode(Manifest, msgspec.msgpack.encode(body))
    with pytest.raises(CodecError, match="not a readable Manifest"):
        codec.decode_json(Manifest, msgspec.json.encode(body))


@pytest.mark.parametrize("field", Manifest.__struct_fields__)
def test_a_missing_field_is_unreadable_unless_it_has_a_default(field: str) -> None:
    body = msgspec.to_builtins(make_manifest())
    del body[field]
    if field in ("canary", "consumed"):
        assert codec.decode(Manifest, msgspec.msgpack.encode(body)) == make_manifest()
    else:
        with pytest.raises(CodecError, match=field):
            codec.decode(Manifest, msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "body",
    [
        b"\x82\xa6schema\x01\xa1x" + b"\x91" * 100_000,
        b"\x82\xa6schema\x01\xactrajectories\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc1",
        b"\xc9\xff\xff\xff\xff\x00",
    ],
)
def test_bytes_made_to_exhaust_the_reader_are_unreadable(body: bytes) -> None:
    with pytest.raises(CodecError):
        codec.decode(Group, body)


@pytest.mark.parametrize(
    "body", [b'{"schema":1,"x":' + b"[" * 100_000, b'{"schema":1e400}', b'{"schema":1,"policy":"\xff"}', b""]
)
def test_json_made_to_exhaust_the_reader_is_unreadable(body: bytes) -> None:
    with pytest.raises(CodecError):
        codec.decode_json(Manifest, body)


def test_a_record_over_the_limit_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    body = codec.encode(make_manifest())
    monkeypatch.setattr(codec, "MAX_RECORD_BYTES", len(body) - 1)
    with pytest.raises(CodecError, match="over the limit"):
        codec.decode(Manifest, body)
    with pytest.raises(CodecError, match="over the limit"):
        codec.decode_json(Manifest, codec.encode_json(make_manifest()))


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_garbage_is_a_codec_error(kind: type[Any], body: bytes) -> None:
    for decode in (codec.decode, codec.decode_json):
        with pytest.raises(CodecError):
            decode(kind, body)


@given(
    st.sampled_from(RECORDS), st.booleans(), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
)  # fmt: skip
def test_changed_or_cut_records_are_read_or_a_codec_error(
    record: Any, as_json: bool, changes: list[tuple[float, int]], cut: float
) -> None:
    body = bytearray(codec.encode_json(record) if as_json else codec.encode(record))
    for at, byte in changes:
        body[min(int(at * len(body)), len(body) - 1)] = byte
    decode = codec.decode_json if as_json else codec.decode
    for changed in (bytes(body), bytes(body[: int(cut * len(body))])):
        try:
            decode(type(record), changed)
        except CodecError:
            pass


def test_canonical_json_has_sorted_keys_and_no_white_space() -> None:
    assert codec.canonical_json({"b": [1, None], "a": {"d": "é", "c": 0.5}}) == (
        '{"a":{"c":0.5,"d":"é"},"b":[1,null]}'.encode()
    )
    assert codec.encode_json(make_manifest()) == json.dumps(
        msgspec.to_builtins(make_manifest()), sort_keys=True, separators=(",", ":")
    ).encode()  # fmt: skip
