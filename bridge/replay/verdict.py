"""Did this adapter sample this token? The rule of the audit, without I/O.

A logprob is recomputed under the adapter that the token's span names and under the neighbouring versions of its
policy. With ``e`` for the distance between a recomputed and the recorded logprob:

============ =========================================================================================
confirmed    ``e <= tolerance`` under the span's own adapter, and under none of its neighbours
indistinct   ``e <= tolerance`` under its own, and under a neighbour as well (or there is no neighbour)
refuted      ``e > tolerance`` under its own, or one of the two is not a number
unverifiable it cannot be recomputed; the reason says why
============ =========================================================================================

A token is *discriminated* if at most one of the versions compared can explain any record of it: it is confirmed, or it
is refuted and every neighbour is further than twice the tolerance from its own adapter. Where every token is confirmed
or indistinct, the discriminated ones are the confirmed ones. An audit that discriminates nothing has no power: it would
have passed wrong labels too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from lorabridge.bridge.trajectory import Sampling, Trajectory

TOLERANCES = {"float32": 1e-4}
"""Largest distance of two logprobs, in nats, that arithmetic explains, by the engine's dtype.

vLLM and PEFT in float32 on the same weights were 5.1e-5 apart at most, over 331,340 tokens.
"""

LOGPROBS_MODE = "processed_logprobs"
"""The only ``--logprobs-mode`` that records what the sampler used."""

EXPLAINED_BY_BOTH = "a neighbouring version explains it as well"
NO_NEIGHBOUR = "no neighbouring version to tell it from"
EXPLAINED_BY_NEIGHBOUR = "its own version does not explain it, a neighbouring one does"
EXPLAINED_BY_NONE = "neither its own version nor a neighbouring one explains it"

# vLLM samples greedily below the first, and raises what is below the second to it (vllm/sampling_params.py).
_GREEDY, _COLDEST = 1e-5, 1e-2


class Verdict(StrEnum):
    """What the audit says about a token, in words that stand in reports."""

    CONFIRMED = "confirmed"
    INDISTINCT = "indistinct"
    REFUTED = "refuted"
    UNVERIFIABLE = "unverifiable"


class Finding(msgspec.Struct, frozen=True):
    """A verdict reached without recomputing anything: ``verdict`` is refuted or unverifiable."""

    verdict: Verdict
    reason: str


class Judgement(msgspec.Struct, frozen=True):
    """What the audit says about one token.

    ``error`` is the distance of its own recomputed logprob from the recorded one, in nats; infinite if one of them is
    not a number. ``reason`` is empty for a confirmed token.
    """

    verdict: Verdict
    error: float
    discriminated: bool
    reason: str


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of an audit: the last line of ``lorabridge audit --json``.

    Attributes:
        trajectories, tokens: how many were looked at.
        confirmed, indistinct, refuted, unverifiable: tokens; they sum up to ``tokens``.
        discriminated: tokens that could tell versions apart.
        max_error: largest distance from a recorded logprob, in nats; infinite where one is not a number (null in
            JSON), None if nothing was recomputed.
    """

    trajectories: int
    tokens: int
    confirmed: int
    indistinct: int
    refuted: int
    unverifiable: int
    discriminated: int
    max_error: float | None


def judge(recorded: float, own: float, neighbours: Sequence[float], tolerance: float) -> Judgement:
    """The verdict on one token; all logprobs in nats.

    Args:
        recorded: as the engine reported it.
        own: recomputed under the adapter that the token's span names.
        neighbours: recomputed under each neighbouring version.
        tolerance: largest distance that still explains a record.
    """
    error = abs(own - recorded)
    explained = any(abs(other - recorded) <= tolerance for other in neighbours)
    if error <= tolerance:
        if neighbours and not explained:
            return Judgement(Verdict.CONFIRMED, error, True, "")
        return Judgement(Verdict.INDISTINCT, error, False, EXPLAINED_BY_BOTH if neighbours else NO_NEIGHBOUR)
    apart = bool(neighbours) and all(abs(other - own) > 2 * tolerance for other in neighbours)
    reason = EXPLAINED_BY_NEIGHBOUR if explained else EXPLAINED_BY_NONE
    return Judgement(Verdict.REFUTED, math.inf if math.isnan(error) else error, apart, reason)


def unscorable(trajectory: Trajectory) -> str | None:
    """Why this trajectory's logprobs cannot be recomputed exactly, whatever its adapters; None if they can."""
    if trajectory.dtype not in TOLERANCES:
        return f"not calibrated for {trajectory.dtype}"
    if trajectory.logprobs_mode != LOGPROBS_MODE:
        return f"recorded with logprobs mode {trajectory.logprobs_mode}, not {LOGPROBS_MODE}"
    if reshaped := _reshaped(trajectory.sampling):
        return f"sampled with {reshaped}, which the audit does not recompute"
    return None


def divisor(temperature: float) -> float:
    """What vLLM divides logits by: at temperature 0 it reports logprobs of the logits as they are."""
    return 1.0 if temperature < _GREEDY else max(temperature, _COLDEST)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The one verdict on many tokens: refuted if any is, else unverifiable if any is, else confirmed if any is."""
    for verdict in (Verdict.REFUTED, Verdict.UNVERIFIABLE, Verdict.CONFIRMED):
        if verdict in verdicts:
            return verdict
    return Verdict.INDISTINCT


def _reshaped(sampling: Sampling) -> str | None:
    """The first parameter that changes the distribution in another way than temperature does."""
    neutral = {
        "top_p": sampling.top_p >= 1,
        "top_k": sampling.top_k in (-1, 0),
        "min_p": sampling.min_p <= 0,
        "repetition_penalty": sampling.repetition_penalty == 1,
    }
    for name, is_neutral in neutral.items():
        if not is_neutral:
            return f"{name}={getattr(sampling, name)}"
    return None
