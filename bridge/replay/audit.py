"""Does the record hold? Every sampled token of every trajectory, judged under the adapter that its span names.

First what needs no arithmetic: spans tile the tokens, residency records and manifests agree with them, the adapter's
bytes are those of its digest, the base model is the one it was trained on. What passes is scored, chained over kept KV,
and judged by ``lorabridge.bridge.replay.verdict``. A finding about one span leaves the others to be judged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.replay.checks import Line, check_residency, check_turn
from lorabridge.bridge.replay.scorer import Chain, ChainScore, Piece, PieceScore
from lorabridge.bridge.replay.verdict import TOLERANCES, Audit, Finding, Verdict, divisor, judge, worst
from lorabridge.bridge.residency import Residency
from lorabridge.bridge.store import Store
from lorabridge.bridge.trajectory import Span, Trajectory

LISTED = 20
"""How many refuted trajectories a report names, and how many reasons are printed."""

Progress = Callable[[int, int], None]
"""Told how many sampled tokens are done, and how many there are."""


class Scores(Protocol):
    """What the audit needs of a scorer (``lorabridge.bridge.replay.scorer.Scorer``)."""

    @property
    def base(self) -> Fingerprint: ...

    @property
    def vocabulary(self) -> int: ...

    def score(self, chains: Sequence[Chain]) -> Iterator[ChainScore]: ...


class SpanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts on the tokens of one span.

    Attributes:
        trajectory: its id.
        turn: number of the turn in it, from 0.
        span: None if the finding is about the whole turn.
        tokens: how many; the verdicts by ``counts`` sum up to it.
        discriminated: tokens that could tell versions apart.
        max_error: largest distance from a recorded logprob, in nats; None if nothing was recomputed.
        reasons: tokens by reason, of those that are not confirmed.
    """

    trajectory: str
    turn: int
    span: Span | None
    tokens: int
    counts: dict[Verdict, int]
    discriminated: int = 0
    max_error: float | None = None
    reasons: dict[str, int] = {}

    @property
    def verdict(self) -> Verdict:
        """The one verdict on the span."""
        return worst([verdict for verdict, count in self.counts.items() if count])


class AuditReport(Audit, frozen=True, kw_only=True):
    """The verdicts on every token that was audited.

    Attributes:
        reasons: tokens by reason, of those that are not confirmed.
        refuted_trajectories: ids of the first ``LISTED`` with a refuted token.
    """

    reasons: dict[str, int]
    refuted_trajectories: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether something was audited, and nothing of it is refuted or unverifiable."""
        return self.tokens > 0 and not self.refuted and not self.unverifiable

    def figures(self) -> dict[str, int | float | None]:
        """The counts and the largest error: what ``lorabridge audit --json`` prints (null for infinite)."""
        return {name: getattr(self, name) for name in Audit.__struct_fields__}


def audit(
    trajectories: Iterable[Trajectory],
    store: Store,
    scorer: Scores,
    *,
    residencies: Mapping[str, Residency] | None = None,
    sample: int | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> AuditReport:
    """Audit ``trajectories``; nothing is written.

    Args:
        trajectories: any, of any run whose adapters are in the store.
        store: of the run.
        scorer: with the base model.
        residencies: every residency record by label; None: spans are not compared with them.
        sample: how many trajectories to audit, drawn evenly; None: all.
        seed: of the drawing.
    """
    chosen = list(trajectories) if sample is None else draw(trajectories, sample, seed)
    reports = verify(chosen, store, scorer, residencies=residencies, on_progress=on_progress)
    return summarise(len(chosen), reports)


def draw(trajectories: Iterable[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """``count`` of the trajectories, each as likely as any other, in one pass; all if there are fewer."""
    rng = random.Random(seed)
    kept: list[Trajectory] = []
    for number, trajectory in enumerate(trajectories):
        if number < count:
            kept.append(trajectory)
        elif (place := rng.randrange(number + 1)) < count:
            kept[place] = trajectory
    return kept


def verify(
    trajectories: Sequence[Trajectory],
    store: Store,
    scorer: Scores,
    *,
    residencies: Mapping[str, Residency] | None = None,
    on_progress: Progress | None = None,
) -> list[SpanReport]:
    """One report per span of every turn, in order. See ``audit``."""
    plan = _Plan(Line(store, scorer.base), scorer.vocabulary, residencies)
    for number, trajectory in enumerate(trajectories):
        for turn in range(len(trajectory.turns)):
            plan.add(number, trajectory, turn)
    total = sum(trajectory.tokens for trajectory in trajectories)
    done = sum(report.tokens for report in plan.reports.values())
    for score in scorer.score(plan.chains):
        for key, report in _judged(score, trajectories):
            plan.reports[key] = report
            done += report.tokens
        if on_progress is not None:
            on_progress(done, total)
    return [plan.reports[key] for key in sorted(plan.reports)]


def summarise(trajectories: int, reports: Iterable[SpanReport]) -> AuditReport:
    """Sum up the reports on so many trajectories."""
    counts: Counter[Verdict] = Counter()
    reasons: Counter[str] = Counter()
    refuted: dict[str, None] = {}
    errors: list[float] = []
    discriminated = 0
    for report in reports:
        counts.update(report.counts)
        reasons.update(report.reasons)
        discriminated += report.discriminated
        errors += [] if report.max_error is None else [report.max_error]
        if report.counts.get(Verdict.REFUTED):
            refuted[report.trajectory] = None
    return AuditReport(
        trajectories=trajectories,
        tokens=sum(counts.values()),
        confirmed=counts[Verdict.CONFIRMED],
        indistinct=counts[Verdict.INDISTINCT],
        refuted=counts[Verdict.REFUTED],
        unverifiable=counts[Verdict.UNVERIFIABLE],
        discriminated=discriminated,
        max_error=max(errors, default=None),
        reasons=dict(reasons.most_common()),
        refuted_trajectories=tuple(refuted)[:LISTED],
    )


class _Plan:
    """What is known without arithmetic (``reports`` by trajectory, turn, span) and what is to be scored (``chains``).

    A chain's key is that of its first span.
    """

    def __init__(self, line: Line, vocabulary: int, residencies: Mapping[str, Residency] | None) -> None:
        self._line = line
        self._vocabulary = vocabulary
        self._residencies = residencies
        self.reports: dict[tuple[int, ...], SpanReport] = {}
        self.chains: list[Chain] = []

    def add(self, number: int, trajectory: Trajectory, place: int) -> None:
        """Sort turn ``place`` of trajectory ``number`` into what is known and what is to be scored."""
        turn = trajectory.turns[place]
        if finding := check_turn(trajectory, turn, self._vocabulary):
            self.reports[number, place, 0] = _found(finding, trajectory, place, None)
            return
        findings = [self._line.check(span, trajectory.base) for span in turn.spans]
        if self._residencies is not None:
            served = check_residency(trajectory, turn, self._residencies)
            findings = [there or found for there, found in zip(served, findings, strict=True)]
        for run in _runs(turn.spans):
            self._add_run(number, trajectory, place, run, findings)

    def _add_run(
        self, number: int, trajectory: Trajectory, place: int, run: range, findings: Sequence[Finding | None]
    ) -> None:
        turn, sound = trajectory.turns[place], 0
        while sound < len(run) and findings[run[sound]] is None:
            sound += 1
        for at in run[sound:]:
            finding = findings[at] or Finding(Verdict.UNVERIFIABLE, "it continues on KV that cannot be recomputed")
            self.reports[number, place, at] = _found(finding, trajectory, place, turn.spans[at])
        if sound:
            self.chains.append(
                Chain(
                    key=(number, place, run[0]),
                    prompt_ids=turn.prompt_ids,
                    token_ids=turn.token_ids,
                    pieces=tuple(self._piece(span) for span in turn.spans[run[0] : run[0] + sound]),
                    divisor=divisor(trajectory.sampling.temperature),
                )
            )

    def _piece(self, span: Span) -> Piece:
        return Piece(
            policy=span.policy,
            version=span.version,
            digest=span.digest,
            neighbours=self._line.neighbours(span),
            start=span.start,
            end=span.end,
        )


def _runs(spans: Sequence[Span]) -> Iterator[range]:
    """Numbers of consecutive spans of which each continues on the KV of the one before."""
    starts = [number for number, span in enumerate(spans) if span.kv == "fresh"]
    return map(range, starts, [*starts[1:], len(spans)])


def _found(finding: Finding, trajectory: Trajectory, place: int, span: Span | None) -> SpanReport:
    """The report that gives every token of a span (None: of the turn) the same verdict."""
    tokens = len(trajectory.turns[place].token_ids) if span is None else span.end - span.start
    return SpanReport(
        trajectory=trajectory.id,
        turn=place,
        span=span,
        tokens=tokens,
        counts={finding.verdict: tokens},
        reasons={finding.reason: tokens},
    )


def _judged(score: ChainScore, trajectories: Sequence[Trajectory]) -> Iterator[tuple[tuple[int, ...], SpanReport]]:
    """Key and report of every span of a scored chain."""
    number, place, first = score.chain.key
    trajectory = trajectories[number]
    spans = trajectory.turns[place].spans[first : first + len(score.chain.pieces)]
    for at, span in enumerate(spans):
        if score.problem:
            report = _found(Finding(Verdict.UNVERIFIABLE, score.problem), trajectory, place, span)
        else:
            report = _judged_span(score.pieces[at], trajectory, place, span)
        yield (number, place, first + at), report


def _judged_span(score: PieceScore, trajectory: Trajectory, place: int, span: Span) -> SpanReport:
    recorded = trajectory.turns[place].logprobs[span.start : span.end]
    tolerance = TOLERANCES[trajectory.dtype]
    others = list(zip(*score.neighbours, strict=True)) or [()] * len(recorded)
    judgements = [judge(*logprobs, tolerance) for logprobs in zip(recorded, score.own, others, strict=True)]
    return SpanReport(
        trajectory=trajectory.id,
        turn=place,
        span=span,
        tokens=len(judgements),
        counts=dict(Counter(judgement.verdict for judgement in judgements)),
        discriminated=sum(judgement.discriminated for judgement in judgements),
        max_error=max(judgement.error for judgement in judgements),
        reasons=dict(Counter(judgement.reason for judgement in judgements if judgement.reason)),
    )
