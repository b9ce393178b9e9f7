"""Lag as the ledger shows it: by optimizer step as the trainer reported it, by digest or generator from the spans.

Lag counts optimizer steps, weighted by sampled tokens (``lorabridge.bridge.lag``). All of it is pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import msgspec

from lorabridge.bridge.events import Consumed, Event
from lorabridge.bridge.lag import LagSummary, summarise, token_lags
from lorabridge.bridge.trajectory import Trajectory


class LagRow(msgspec.Struct, frozen=True, kw_only=True):
    """Lag of some tokens that were trained on.

    Attributes:
        key: the step (optimizer steps taken before it), the digest or the generator.
        trajectories, tokens: how many.
        mean, largest: in optimizer steps, ``mean`` weighted by tokens.
        seconds: from sampled to trained, mean.
    """

    key: str
    trajectories: int
    tokens: int
    mean: float
    largest: int
    seconds: float


class LagReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rows in the order that the run came to them, and how many consumed trajectories they leave out.

    ``missing`` are not in the ledger (the archiver may be behind), or name a version that was never announced.
    """

    rows: tuple[LagRow, ...]
    missing: int = 0


def by_step(events: Iterable[Event]) -> LagReport:
    """One row per optimizer step. A step that was taken again, after a resume, counts as it was taken last."""
    rows: dict[tuple[str, int], LagRow] = {}
    for event in sorted(events, key=lambda each: each.at_ms):
        if isinstance(taken := event.happening, Consumed):
            rows.pop((taken.policy, taken.step), None)
            rows[taken.policy, taken.step] = LagRow(
                key=str(taken.step),
                trajectories=len(taken.trajectories),
                tokens=taken.tokens,
                mean=LagSummary(tokens=taken.tokens, total=taken.lag_total, largest=taken.lag_max).mean,
                largest=taken.lag_max,
                seconds=taken.lag_s,
            )
    return LagReport(rows=tuple(rows.values()))


def by_digest(
    events: Iterable[Event], trajectories: Iterable[Trajectory], steps: Mapping[tuple[str, int], int]
) -> LagReport:
    """One row per adapter that sampled a consumed token. ``steps``: step that each (policy, version) was made at."""
    return _by(lambda trajectory, at: trajectory.spans[at].digest, events, trajectories, steps)


def by_generator(
    events: Iterable[Event], trajectories: Iterable[Trajectory], steps: Mapping[tuple[str, int], int]
) -> LagReport:
    """One row per generator. Arguments as for ``by_digest``."""
    return _by(lambda trajectory, at: trajectory.generator, events, trajectories, steps)


class _Gathered:
    """What adds up to a row."""

    def __init__(self) -> None:
        self.lags: list[tuple[int, int]] = []
        self.trajectories: set[str] = set()
        self.token_ms = 0

    def row(self, key: str) -> LagRow:
        summary = summarise(self.lags)
        return LagRow(
            key=key,
            trajectories=len(self.trajectories),
            tokens=summary.tokens,
            mean=summary.mean,
            largest=summary.largest,
            seconds=self.token_ms / summary.tokens / 1000,
        )


def _by(
    key: Callable[[Trajectory, int], str], events: Iterable[Event], trajectories: Iterable[Trajectory],
    steps: Mapping[tuple[str, int], int],
) -> LagReport:  # fmt: skip
    trained = _trained(events)
    missing = set(trained)
    rows: defaultdict[str, _Gathered] = defaultdict(_Gathered)
    for trajectory in trajectories:
        if trajectory.id not in trained or any((s.policy, s.version) not in steps for s in trajectory.spans):
            continue
        missing.discard(trajectory.id)
        step, at_ms = trained[trajectory.id]
        waited_ms = at_ms - trajectory.times_ms.get("sampled", at_ms)
        for at, (lag, tokens) in enumerate(token_lags(trajectory.spans, steps, step)):
            row = rows[key(trajectory, at)]
            row.lags.append((lag, tokens))
            row.trajectories.add(trajectory.id)
            row.token_ms += waited_ms * tokens
    return LagReport(rows=tuple(row.row(key) for key, row in rows.items()), missing=len(missing))


def _trained(events: Iterable[Event]) -> dict[str, tuple[int, int]]:
    """Trajectory id -> (step that trained on it last, when)."""
    return {
        id: (event.happening.step, event.at_ms)
        for event in events
        if isinstance(event.happening, Consumed)
        for id in event.happening.trajectories
    }
