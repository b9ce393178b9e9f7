"""The rule of the audit: its verdicts part every case, and its claims of power are never empty."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.replay.verdict import (
    EXPLAINED_BY_BOTH,
    EXPLAINED_BY_NEIGHBOUR,
    EXPLAINED_BY_NONE,
    NO_NEIGHBOUR,
    TOLERANCES,
    Verdict,
    divisor,
    judge,
    unscorable,
    worst,
)
from lorabridge.bridge.trajectory import Sampling, Trajectory

TOLERANCE = TOLERANCES["float32"]
# Steps of a quarter of the tolerance around -1, so that every case comes up; and values that are not numbers.
LOGPROBS = st.integers(-12, 12).map(lambda n: -1 + n * TOLERANCE / 4) | st.sampled_from([math.nan, -math.inf])


@given(LOGPROBS, LOGPROBS, st.lists(LOGPROBS, max_size=2))
def test_verdicts_part_every_case(recorded: float, own: float, neighbours: list[float]) -> None:
    judged = judge(recorded, own, neighbours, TOLERANCE)
    explains = abs(own - recorded) <= TOLERANCE
    explained = any(abs(each - recorded) <= TOLERANCE for each in neighbours)
    expected = {
        (True, False): Verdict.CONFIRMED if neighbours else Verdict.INDISTINCT,
        (True, True): Verdict.INDISTINCT,
        (False, False): Verdict.REFUTED,
        (False, True): Verdict.REFUTED,
    }
    assert judged.verdict is expected[explains, explained]
    assert judged.error >= 0
    assert (judged.reason == "") == (judged.verdict is Verdict.CONFIRMED)


@given(LOGPROBS, LOGPROBS, st.lists(LOGPROBS, max_size=2))
def test_discriminated_means_that_one_version_at_most_explains_the_token(
    recorded: float, own: float, neighbours: list[float]
) -> None:
    judged = judge(recorded, own, neighbours, TOLERANCE)
    if judged.verdict is Verdict.CONFIRMED:
        assert judged.discriminated
    if judged.verdict is Verdict.INDISTINCT or not neighbours:
        assert not judged.discriminated
    if judged.discriminated:
        assert sum(abs(each - recorded) <= TOLERANCE for each in [own]) <= 1
        assert not (judged.error <= TOLERANCE and any(abs(each - recorded) <= TOLERANCE for each in neighbours))


@given(LOGPROBS, LOGPROBS, LOGPROBS)
def test_a_wrong_label_is_refuted_where_the_audit_claims_power(before: float, own: float, after: float) -> None:
    """If an honest record would be told apart, the same record under a neighbour's label is refuted."""
    if judge(own, own, [before, after], TOLERANCE).discriminated:
        assert judge(own, after, [own], TOLERANCE).verdict is Verdict.REFUTED
        assert judge(own, before, [own], TOLERANCE).verdict is Verdict.REFUTED


@pytest.mark.parametrize(
    ("recorded", "own", "neighbours", "verdict", "reason", "discriminated"),
    [
        (-1.0, -1.00005, [-2.0, -0.5], Verdict.CONFIRMED, "", True),
        (-1.0, -1.00005, [-2.0, -1.00005], Verdict.INDISTINCT, EXPLAINED_BY_BOTH, False),
        (-1.0, -1.00005, [], Verdict.INDISTINCT, NO_NEIGHBOUR, False),
        (-1.0, -1.2, [-1.0], Verdict.REFUTED, EXPLAINED_BY_NEIGHBOUR, True),
        (-1.0, -1.2, [-3.0], Verdict.REFUTED, EXPLAINED_BY_NONE, True),
        (-1.0, -1.2, [-3.0, -1.2001], Verdict.REFUTED, EXPLAINED_BY_NONE, False),
        (-1.0, -1.2, [], Verdict.REFUTED, EXPLAINED_BY_NONE, False),
    ],
)
def test_cases(
    recorded: float, own: float, neighbours: list[float], verdict: Verdict, reason: str, discriminated: bool
) -> None:
    judged = judge(recorded, own, neighbours, TOLERANCE)
    assert (judged.verdict, judged.reason, judged.discriminated) == (verdict, reason, discriminated)


@pytest.mark.parametrize("own", [-1.0, -math.inf])
def test_what_is_not_a_number_is_refuted_with_an_infinite_error(own: float) -> None:
    recorded = math.nan if own == -1.0 else -math.inf
    assert judge(recorded, own, [-2.0], TOLERANCE).error == math.inf


def trajectory(**changes: object) -> Trajectory:
    plain = Trajectory(
        run="run", policy="policy", group=0, attempt=1, index=0, environment="", prompt="", base="", turns=(),
        sampling=Sampling(), seed=0, logprobs_mode="processed_logprobs", dtype="float32", generator="generator",
        instance="instance", reward=0.0, rewards={}, advantage=0.0, times_ms={},
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "bfloat16"}, "not calibrated for bfloat16"),
        ({"dtype": "float16"}, "not calibrated for float16"),
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs"),
        ({"sampling": Sampling(top_p=0.9)}, "top_p=0.9"),
        ({"sampling": Sampling(top_k=20)}, "top_k=20"),
        ({"sampling": Sampling(min_p=0.1)}, "min_p=0.1"),
        ({"sampling": Sampling(repetition_penalty=1.1)}, "repetition_penalty=1.1"),
    ],
)
def test_what_cannot_be_recomputed_is_named(changes: dict[str, object], word: str) -> None:
    reason = unscorable(trajectory(**changes))
    assert reason is not None and word in reason


def test_neutral_sampling_at_any_temperature_can_be_recomputed() -> None:
    for sampling in (Sampling(), Sampling(temperature=0.3, top_k=0), Sampling(temperature=0)):
        assert unscorable(trajectory(sampling=sampling)) is None


def test_logits_are_divided_as_vllm_does() -> None:
    assert [divisor(t) for t in (0, 1e-6, 0.001, 0.7, 1, 2)] == [1, 1, 0.01, 0.7, 1, 2]


def test_the_worst_verdict_stands_for_all() -> None:
    assert worst([Verdict.CONFIRMED, Verdict.UNVERIFIABLE, Verdict.REFUTED]) is Verdict.REFUTED
    assert worst([Verdict.CONFIRMED, Verdict.UNVERIFIABLE]) is Verdict.UNVERIFIABLE
    assert worst([Verdict.INDISTINCT, Verdict.CONFIRMED]) is Verdict.CONFIRMED
    assert worst([Verdict.INDISTINCT]) is Verdict.INDISTINCT
