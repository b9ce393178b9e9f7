"""What a run comes to: ``summary.json``, computed from its ledger and its audit alone. All of it is pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import msgspec

from lorabridge.bridge.events import Consumed, Dropped, Event, Happening, Published, Quarantine, Resident
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.verdict import Audit
from lorabridge.bridge.trajectory import Trajectory

H = TypeVar("H", bound=Happening)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``. A figure that a run is too short for is null.

    Attributes:
        reward_first, reward_last: means over the first and the last fifth of the steps.
        steps: optimizer steps that stand: a trainer that starts afresh undoes those before it. What was sampled,
            published, dropped and audited is counted over the whole ledger.
        versions_published: versions in the ledger.
        trajectories, tokens: sampled and delivered, trained on or not.
        multi_span_trajectories: of which the weights changed in the middle.
        tokens_audited: of which the audit reached a verdict: confirmed, indistinct or refuted.
        tokens_unverifiable: of which it could not.
        tokens_discriminated: of which the neighbouring versions would have given another logprob.
        max_logprob_error: largest difference of a recomputed logprob, in nats.
        lag_mean, lag_max: optimizer steps, over trained tokens.
        dropped: trajectories that were too old to be trained on.
        quarantined: samples whose origin could not be established, and generators that could not prove theirs.
        samples_per_s, tokens_per_s: trained between the first step and the last.
        publish_blocked_ms_p50: how long a publish held the training thread.
        publish_to_serving_ms_p50: from a version's manifest to the first generator that served it.
        publish_to_serving_ms_p50_by_generator: the same for each generator; versions that it skipped have no part.
        wall_s: of the whole run.
    """

    run: str
    reward_first: float | None
    reward_last: float | None
    steps: int
    versions_published: int
    trajectories: int
    tokens: int
    multi_span_trajectories: int
    tokens_audited: int
    tokens_confirmed: int
    tokens_indistinct: int
    tokens_refuted: int
    tokens_unverifiable: int
    tokens_discriminated: int
    max_logprob_error: float | None
    lag_mean: float | None
    lag_max: int | None
    dropped: int
    quarantined: int
    samples_per_s: float | None
    tokens_per_s: float | None
    publish_blocked_ms_p50: float | None
    publish_to_serving_ms_p50: float | None
    publish_to_serving_ms_p50_by_generator: dict[str, float]
    wall_s: float


def summarise(
    *,
    run: str,
    policy: str,
    manifests: Sequence[Manifest],
    events: Sequence[Event],
    trajectories: Iterable[Trajectory],
    audit: Audit,
    wall_s: float,
) -> Summary:
    """Everything that ``summary.json`` holds, for one policy of a run. Redelivered trajectories count once."""
    steps = consumed(events, policy)
    sampled = {trajectory.id: trajectory for trajectory in trajectories if trajectory.policy == policy}.values()
    trained, lag_total = sum(step.tokens for _, step in steps), sum(step.lag_total for _, step in steps)
    published = [one.phases_ms for _, one in _of(Published, events) if one.policy == policy]
    dropped = {id for _, event in _of(Dropped, events) if event.policy == policy for id in event.trajectories}
    samples_per_s, tokens_per_s = speed(steps)
    serving = publish_to_serving(manifests, events, policy)
    fifth = max(1, len(steps) // 5)
    return Summary(
        run=run,
        reward_first=fmean(step.reward for _, step in steps[:fifth]) if steps else None,
        reward_last=fmean(step.reward for _, step in steps[-fifth:]) if steps else None,
        steps=len(steps),
        versions_published=len({manifest.version for manifest in manifests if manifest.policy == policy}),
        trajectories=len(sampled),
        tokens=sum(trajectory.tokens for trajectory in sampled),
        multi_span_trajectories=sum(any(len(t.spans) > 1 for t in one.turns) for one in sampled),
        tokens_audited=audit.confirmed + audit.indistinct + audit.refuted,
        tokens_confirmed=audit.confirmed,
        tokens_indistinct=audit.indistinct,
        tokens_refuted=audit.refuted,
        tokens_unverifiable=audit.unverifiable,
        tokens_discriminated=audit.discriminated,
        max_logprob_error=audit.max_error,
        lag_mean=lag_total / trained if trained else None,
        lag_max=max((step.lag_max for _, step in steps), default=None),
        dropped=len(dropped),
        quarantined=len(_of(Quarantine, events)),
        samples_per_s=samples_per_s,
        tokens_per_s=tokens_per_s,
        publish_blocked_ms_p50=_p50([phases["blocked"] for phases in published if "blocked" in phases]),
        publish_to_serving_ms_p50=_p50([min(times.values()) for times in serving]),
        publish_to_serving_ms_p50_by_generator={
            name: median(times[name] for times in serving if name in times)
            for name in sorted({name for times in serving for name in times})
        },
        wall_s=wall_s,
    )


def consumed(events: Iterable[Event], policy: str) -> list[tuple[int, Consumed]]:
    """(at_ms, step) of every optimizer step, in order.

    A step that was taken again counts as it was taken last, and undoes those that had come after it: a trainer that
    starts afresh begins with step 0, and its predecessor's later steps are no part of what it made. Their order is that
    of the clock: a server that had forgotten some was told again later.
    """
    standing: list[tuple[int, Consumed]] = []
    for at_ms, step in sorted(_of(Consumed, events), key=lambda each: each[0]):
        if step.policy != policy:
            continue
        while standing and standing[-1][1].step >= step.step:
            standing.pop()
        standing.append((at_ms, step))
    return standing


def speed(steps: Sequence[tuple[int, Consumed]]) -> tuple[float | None, float | None]:
    """(trajectories, tokens) trained per second between the first step and the last, which the first has no part in."""
    if len(steps) < 2 or steps[-1][0] <= steps[0][0]:
        return None, None
    seconds = (steps[-1][0] - steps[0][0]) / 1000
    later = [step for _, step in steps[1:]]
    return sum(len(step.trajectories) for step in later) / seconds, sum(step.tokens for step in later) / seconds


def publish_to_serving(
    manifests: Iterable[Manifest], events: Iterable[Event], policy: str
) -> list[dict[str, float]]:  # fmt: skip
    """By generator, milliseconds from a version's manifest to its first epoch that served it; for each version that
    was served at all."""
    served: dict[tuple[int, str], dict[str, int]] = defaultdict(dict)
    for at_ms, event in _of(Resident, events):
        if here := event.residency.serves.get(policy):
            times, name = served[here.version, here.digest], event.residency.generator
            times[name] = min(at_ms, times.get(name, at_ms))
    return [
        {name: float(at_ms - manifest.created_ms) for name, at_ms in times.items()}
        for manifest in manifests
        if manifest.policy == policy and (times := served.get((manifest.version, manifest.digest), {}))
    ]


def in_words(summary: Summary, folder: Path) -> str:
    """A few sentences for whoever started the run."""
    s = summary
    parts = [f"{s.steps} steps, {s.versions_published} versions published, in {s.wall_s:.0f} s."]
    if s.reward_first is not None and s.reward_last is not None:
        parts.append(f"The reward went from {s.reward_first:.3f} to {s.reward_last:.3f}.")
    parts.append(
        f"{s.trajectories:,} trajectories of {s.tokens:,} tokens were sampled; the weights changed in the middle of "
        f"{s.multi_span_trajectories:,} of them. {s.dropped:,} were dropped."
    )
    if s.lag_mean is not None:
        parts.append(f"Tokens were trained on {s.lag_mean:.1f} steps after they were sampled, {s.lag_max} at most.")
    parts.append(_audit_in_words(s))
    parts.append(f"It is all in {folder}: summary.json, reward.png, lag.png, the ledger, the adapters, the logs.")
    return "\n".join(parts)


def _audit_in_words(s: Summary) -> str:
    unsure = f", {s.tokens_unverifiable:,} could not be verified" if s.tokens_unverifiable else ""
    error = f" The largest error was {s.max_logprob_error:.1e} nats." if s.max_logprob_error is not None else ""
    return (
        f"The audit recomputed {s.tokens_audited:,} tokens under the weights they name: {s.tokens_refuted:,} refuted"
        f"{unsure}; {s.tokens_discriminated:,} of them could tell neighbouring versions apart.{error}"
    )


def _of(kind: type[H], events: Iterable[Event]) -> list[tuple[int, H]]:
    return [(event.at_ms, event.happening) for event in events if isinstance(event.happening, kind)]


def _p50(values: Sequence[float]) -> float | None:
    return median(values) if values else None
