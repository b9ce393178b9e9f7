"""What a look at a run says about it: each thing that can be wrong is a problem with something to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from lorabridge.bridge.errors import BridgeError, DigestMismatch, GeneratorUnreachable
from lorabridge.bridge.residency import Residency
from lorabridge.bridge.run_record import RunRecord
from lorabridge.bridge.stream.head import Head
from lorabridge.rollout import findings
from lorabridge.rollout.findings import Finding
from lorabridge.rollout.survey import judge
from lorabridge.rollout.wire import EngineFacts, GeneratorState
from tests.factories import BASE, digest_of, make_manifest, make_residency, make_run_record

URL = "http://generator"
FACTS = EngineFacts(
    base=BASE, dtype="float32", logprobs_mode="processed_logprobs", max_lora_rank=8, max_loras=2, max_model_len=64
)
INFO = {"redis_version": "7.0.15", "aof_enabled": 1, "maxmemory": 0, "maxmemory_policy": "noeviction"}
GONE = GeneratorUnreachable("it does not answer", action="Start it")


def worst(found: Iterable[Finding]) -> dict[str, str]:
    """What is not ok, by check; everything that asks for something says what."""
    listed = list(found)
    assert all(finding.action for finding in listed if finding.level == "problem")
    return {finding.check: finding.level for finding in listed if finding.level != "ok"}


@pytest.mark.parametrize(
    ("info", "offset_ms", "wrong"),
    [
        ({}, 0, {}),
        ({"valkey_version": "9.1.2"}, -1500, {}),
        ({"redis_version": "6.2.1"}, 0, {"version": "problem"}),
        ({"aof_enabled": 0}, 0, {"persistence": "note"}),
        ({"maxmemory": 10**9, "maxmemory_policy": "allkeys-lru"}, 0, {"memory": "problem"}),
        ({"maxmemory_policy": "volatile-ttl"}, 0, {"memory": "problem"}),
        ({}, 60_000, {"clock": "note"}),
    ],
)
def test_a_redis_that_could_lose_something_is_a_problem(
    info: dict[str, Any], offset_ms: int, wrong: dict[str, str]
) -> None:
    assert worst(findings.of_redis(INFO | info, offset_ms)) == wrong


@pytest.mark.parametrize(
    ("mine", "wrong"),
    [
        (make_run_record(epoch=0, groups_ahead=1), {}),
        (make_run_record(seed=1), {"joins the run": "problem"}),
        (make_run_record(environment=digest_of("other code")), {"joins the run": "problem"}),
        (GONE, {"joins the run": "problem"}),
    ],
    ids=["the same", "another seed", "other task code", "it cannot be told"],
)
def test_a_configuration_that_would_not_be_let_in_is_a_problem(
    mine: RunRecord | BridgeError, wrong: dict[str, str]
) -> None:
    assert worst([findings.of_joining(make_run_record(), mine)]) == wrong


def test_streams_that_nobody_archives_are_a_problem() -> None:
    assert worst(findings.of_streams(0, True, make_run_record())) == {}
    assert worst(findings.of_streams(findings.BACKLOG + 1, True, make_run_record())) == {"backlog": "problem"}
    assert worst(findings.of_streams(0, False, None)) == {"record": "note", "archiver": "note"}


@pytest.mark.parametrize(
    ("mirrored", "verified", "wrong"),
    [
        (Head(3, digest_of("adapter 3")), None, {}),
        (Head(2, digest_of("adapter 2")), None, {"line": "problem"}),
        (None, None, {"line": "problem"}),
        (Head(4, digest_of("adapter 4")), None, {"line": "problem"}),
        (Head(3, digest_of("other")), None, {"line": "problem"}),
        (Head(3, digest_of("adapter 3")), DigestMismatch("bad bytes", action="Restore"), {"bytes": "problem"}),
    ],
)
def test_a_line_on_which_store_and_redis_differ_is_a_problem(
    mirrored: Head | None, verified: BridgeError | None, wrong: dict[str, str]
) -> None:
    assert worst(findings.of_line(make_manifest(3), mirrored, verified)) == wrong


def state(residency: Residency | None = None, quarantine: str | None = None, **facts: Any) -> GeneratorState:
    return GeneratorState(
        residency=residency or make_residency(4, 3), quarantine=quarantine, running=2,
        facts=msgspec.structs.replace(FACTS, **facts),
    )  # fmt: skip


def look(
    given: GeneratorState | BridgeError, attested: Any = None, run: RunRecord | None = None
) -> dict[str, str]:  # fmt: skip
    return worst(
        findings.of_generator(
            URL, given, attested if attested is not None else {"policy": None}, run or make_run_record(),
            make_manifest(3), "float32", "keep", "worker",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "attested", "wrong"),
    [
        (state(), None, {}),
        (GONE, None, {"plugin": "problem"}),
        (state(quarantine="the slot held something else"), None, {"quarantine": "problem"}),
        (state(), {"policy": "rank 1: the slot of q_proj has changed"}, {"slots": "problem"}),
        (state(), GONE, {"slots": "problem"}),
        (state(make_residency(4, 2)), None, {"head": "problem"}),
        (state(make_residency(4, 3, policy="other")), None, {"head": "problem"}),
        (state(dtype="bfloat16"), None, {"fits the run": "problem"}),
        (state(logprobs_mode="raw_logprobs"), None, {"fits the run": "problem"}),
        (state(max_lora_rank=4), None, {"fits the run": "problem"}),
        (state(base=msgspec.structs.replace(BASE, template=digest_of("x"))), None, {"fits the run": "problem"}),
        (state(make_residency(4, 3, "recompute")), None, {"kv": "note"}),
    ],
)
def test_each_thing_that_can_be_wrong_with_a_generator_is_named(
    given: GeneratorState | BridgeError, attested: Any, wrong: dict[str, str]
) -> None:
    assert look(given, attested) == wrong


def test_room_on_the_disk_is_said_and_too_little_is_a_problem() -> None:
    assert findings.of_disk("/runs", 10**12).level == "ok"
    assert findings.of_disk("/runs", 10**8).level == "problem"


HEADS = {"policy": Head(3, digest_of("adapter 3"))}


@pytest.mark.parametrize(
    ("given", "health", "behind"),
    [
        (state(), "in", 0),
        (state(make_residency(4, 1)), "behind", 2),
        (state(make_residency(4, 3, policy="other")), "empty", None),
        (state(quarantine="wrong slot"), "out", 0),
        (GONE, "out", None),
    ],
)
def test_a_generator_is_in_behind_empty_or_out(
    given: GeneratorState | BridgeError, health: str, behind: int | None
) -> None:
    seen = judge(URL, given, HEADS, "policy", "worker")
    assert seen.health == health
    assert bool(seen.why) == (health == "out")
    assert (seen.serves["policy"].behind if "policy" in seen.serves else None) == behind
    other = seen.serves.get("other")
    assert other is None or other.behind is None  # its head is not known here
