"""Off-policy lag: optimizer steps between the step a token's manifest was made at and the step that trained on it.

Lag 0 means that a token was sampled by the version trained from. All of it is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from lorabridge.bridge.trajectory import Span


class LagSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Token-weighted lag of some tokens, in optimizer steps."""

    tokens: int
    total: int
    largest: int

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0


def token_lags(spans: Sequence[Span], steps: Mapping[tuple[str, int], int], trained_at: int) -> list[tuple[int, int]]:
    """(lag, tokens) of each span.

    Args:
        spans: of one trajectory.
        steps: optimizer step that each (policy, version) was made at.
        trained_at: optimizer steps taken before the step that trains on the tokens.

    Raises:
        ValueError: a version was made later than that, so the steps are not those of the trainer that made it.
    """
    lags = [(trained_at - steps[span.policy, span.version], span.end - span.start) for span in spans]
    if any(lag < 0 for lag, _ in lags):
        made_at = trained_at - min(lags)[0]
        raise ValueError(f"a version made at step {made_at} cannot be trained on after {trained_at} steps")
    return lags


def summarise(lags: Iterable[tuple[int, int]]) -> LagSummary:
    """Sum up (lag, tokens) pairs."""
    tokens = total = largest = 0
    for lag, count in lags:
        tokens += count
        total += lag * count
        largest = max(largest, lag)
    return LagSummary(tokens=tokens, total=total, largest=largest)


def too_old(lags: Sequence[tuple[int, int]], limit: int) -> bool:
    """Whether a trajectory holds a token of more than ``limit`` steps of lag."""
    return any(lag > limit for lag, _ in lags)
