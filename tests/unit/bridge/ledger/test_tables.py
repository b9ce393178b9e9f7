from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorabridge.bridge import codec
from lorabridge.bridge.canary import Canary, Judgement
from lorabridge.bridge.events import Consumed, Dropped, Event, Happening, Judged, Published, Quarantine, Resident
from lorabridge.bridge.fingerprint import Fingerprint, Traits
from lorabridge.bridge.ledger import tables
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import Residency, Served
from lorabridge.bridge.stream.keys import BODY
from lorabridge.bridge.trajectory import Group, Sampling, Span, Trajectory, Turn

unhurried = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
text = st.text(max_size=8)
int64 = st.integers(-(2**63), 2**63 - 1)
count = st.integers(0, 2**31 - 1)
real = st.floats(allow_nan=False)
single = st.floats(width=32, allow_nan=False)

spans = st.builds(
    Span, policy=text, version=int64, digest=text, epoch=int64, start=count, end=count,
    kv=st.sampled_from(["fresh", "kept"]),
)  # fmt: skip
turns = st.builds(
    Turn,
    prompt_ids=st.lists(count, max_size=4).map(tuple),
    token_ids=st.lists(count, max_size=4).map(tuple),
    logprobs=st.lists(single, max_size=4).map(tuple),
    mask=st.lists(st.integers(0, 1), max_size=4).map(tuple),
    spans=st.lists(spans, max_size=2).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
)
samplings = st.builds(
    Sampling, temperature=real, top_p=real, top_k=int64, min_p=real, repetition_penalty=real, max_tokens=int64
)
trajectories = st.builds(
    Trajectory, run=text, policy=text, group=int64, attempt=int64, index=int64, environment=text, prompt=text,
    base=text, turns=st.lists(turns, max_size=2).map(tuple), sampling=samplings, seed=int64, logprobs_mode=text,
    dtype=text, generator=text, instance=text, reward=real, rewards=st.dictionaries(text, st.none() | real, max_size=3),
    advantage=real, times_ms=st.dictionaries(text, int64, max_size=3), purpose=st.sampled_from(["train", "eval"]),
)  # fmt: skip
groups = st.builds(
    Group, group=int64, attempt=int64, worker=text,
    trajectories=st.lists(trajectories, min_size=1, max_size=2).map(tuple),
)  # fmt: skip
logprobs = st.lists(st.lists(st.floats(-1e3, 0), max_size=2).map(tuple), max_size=2).map(tuple)
canaries = st.builds(
    Canary, sequences=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=2).map(tuple), max_size=2).map(tuple),
    adapter=logprobs, base=logprobs, dtype=text,
)  # fmt: skip
traits = st.builds(
    Traits, config=text, weights=count, tokens=st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    template=count,
)  # fmt: skip
manifests = st.builds(
    Manifest, policy=text, version=int64, digest=text, parent=st.none() | text,
    base=st.builds(Fingerprint, checkpoint=text, tokenizer=text, template=text, traits=st.none() | traits), rank=count,
    targets=st.lists(text, max_size=3).map(tuple), dtype=text, step=int64, epoch=int64, run=text, created_ms=int64,
    size=int64, canary=st.none() | canaries, consumed=st.none(), schema=st.just(1),
)  # fmt: skip

HAPPENINGS: list[Happening] = [
    Resident(
        residency=Residency(
            generator="g", instance="i", epoch=3, kv="keep", serves={"p": Served(version=2, digest="d")}, at_ms=9
        ),
        swap_ms={"load": 1.5},
    ),
    Consumed(
        policy="p", step=4, trajectories=("r/1.1/0", "r/1.1/1"), tokens=10, lag_total=12, lag_max=3, lag_s=0.5,
        reward=0.25,
    ),
    Dropped(policy="p", trajectories=("r/2.1/0",), reason="too old"),
    Quarantine(subject="r/3.1/0", reason="no residency record"),
    Published(policy="p", version=2, digest="d", step=1, phases_ms={"export": 3.0}),
    Judged(generator="g", label="i:3", judgement=Judgement(
        policy="p", version=2, verdict="match", floor=1e-6, error=2e-6, effect=0.5, smallest=1e-5
    )),
]  # fmt: skip


def _fields(record: codec.Record) -> dict[bytes, bytes]:
    return {BODY: codec.encode(record)}


def _event(happening: Happening) -> Event:
    return Event(source="s", at_ms=7, happening=happening)


@unhurried
@given(st.lists(groups, max_size=3))
def test_trajectories_come_back_as_they_were_sent(sent: list[Group]) -> None:
    built = tables.build("trajectories", [(f"{at}-0", _fields(group)) for at, group in enumerate(sent)])
    assert built.keys() <= {"trajectories"}
    back = list(tables.trajectories(built["trajectories"])) if built else []
    assert back == [trajectory for group in sent for trajectory in group.trajectories]


@unhurried
@given(st.lists(manifests, max_size=3))
def test_manifests_come_back_as_they_were_sent(sent: list[Manifest]) -> None:
    built = tables.build("announce", [(f"{at}-0", _fields(manifest)) for at, manifest in enumerate(sent)])
    assert (tables.manifests(built["manifests"]) if built else []) == sent


def test_events_come_back_as_they_were_sent() -> None:
    sent = [_event(happening) for happening in HAPPENINGS]
    table = tables.build("events", [(f"{at}-0", _fields(event)) for at, event in enumerate(sent)])["events"]
    assert list(tables.events(table)) == sent
    assert table["kind"].to_pylist() == ["resident", "consumed", "dropped", "quarantine", "published", "judged"]
    assert [json.loads(body)["source"] for body in table["body"].to_pylist()] == ["s"] * 6


def test_every_kind_of_happening_is_tried() -> None:
    assert {type(happening) for happening in HAPPENINGS} == set(Happening.__args__)


@pytest.mark.parametrize(
    ("at", "columns"),
    [
        (0, {"generator": "g", "instance": "i", "epoch": 3, "policy": None}),
        (1, {"policy": "p", "step": 4, "trajectories": ["r/1.1/0", "r/1.1/1"], "lag_total": 12, "lag_s": 0.5}),
        (2, {"trajectories": ["r/2.1/0"], "reason": "too old"}),
        (3, {"subject": "r/3.1/0", "reason": "no residency record"}),
        (4, {"policy": "p", "version": 2, "digest": "d", "step": 1}),
        (5, {"generator": "g", "policy": None}),
    ],
)
def test_flat_columns_of_events(at: int, columns: dict[str, Any]) -> None:
    (row,) = tables.build("events", [("1-0", _fields(_event(HAPPENINGS[at])))])["events"].to_pylist()
    assert {name: row[name] for name in columns} == columns


def test_an_event_with_a_number_that_json_lacks_comes_back_too() -> None:
    consumed = msgspec.structs.replace(HAPPENINGS[1], reward=math.nan)
    table = tables.build("events", [("1-0", _fields(_event(consumed)))])["events"]
    (back,) = tables.events(table)
    assert isinstance(back.happening, Consumed)
    assert math.isnan(back.happening.reward)


def test_every_field_has_a_column() -> None:
    assert set(Trajectory.__struct_fields__) <= set(tables.SCHEMAS["trajectories"].names)
    assert set(Manifest.__struct_fields__) <= set(tables.SCHEMAS["manifests"].names)
    turn = tables.SCHEMAS["trajectories"].field("turns").type.value_type
    for kind, struct in [
        (Turn, turn),
        (Span, turn.field("spans").type.value_type),
        (Sampling, tables.SCHEMAS["trajectories"].field("sampling").type),
        (Fingerprint, tables.SCHEMAS["manifests"].field("base").type),
    ]:
        assert list(kind.__struct_fields__) == [struct.field(at).name for at in range(struct.num_fields)]


_DEEP = b"\x82\xa6schema\x01\xa1x" + b"\x91" * 100_000


@pytest.mark.parametrize("stream", ["announce", "trajectories", "events"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({BODY: b"\xc1"}, "not a readable"),
        ({BODY: b""}, "not a readable"),
        ({BODY: codec.canonical_json({"schema": 1})}, "not a readable"),
        ({BODY: msgspec.msgpack.encode({"schema": 99})}, "of schema 99"),
        ({b"other": b"1"}, "without the field 'body'"),
        ({BODY: _DEEP}, "not a readable"),
    ],
)
def test_what_cannot_be_read_is_kept_with_its_reason(stream: str, fields: dict[bytes, bytes], reason: str) -> None:
    built = tables.build(stream, [("5-1", fields)])
    (row,) = built["unreadable"].to_pylist()
    assert (row["stream"], row["entry"]) == (stream, "5-1")
    assert reason in row["reason"]
    assert row["record"] == fields.get(BODY, msgspec.msgpack.encode([(b"other", b"1")]))
    assert built.keys() == {"unreadable"}


def test_one_that_cannot_be_read_takes_no_other_with_it(make: Any) -> None:
    good = make.group(make.trajectory(0))
    built = tables.build("trajectories", [("1-0", good), ("2-0", {BODY: b"junk"}), ("3-0", good)])
    assert built["trajectories"]["entry"].to_pylist() == ["1-0", "3-0"]
    assert built["unreadable"]["entry"].to_pylist() == ["2-0"]


@pytest.mark.parametrize("change", [{"seed": 2**63}, {"times_ms": {"sampled": 2**64 - 1}}])
def test_a_value_that_no_column_holds_is_kept_as_unreadable(make: Any, change: dict[str, Any]) -> None:
    built = tables.build("trajectories", [("1-0", make.group(make.trajectory(0, **change)))])
    (row,) = built["unreadable"].to_pylist()
    assert "cannot hold" in row["reason"]
