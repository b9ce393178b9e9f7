"""What one generator serves, epoch by epoch, and how the engine's labels lead back to it.

The engine tags every sampled token with one label, ``<instance>:<epoch>``. A residency record says what that epoch
serves. The record exists before the label is set (law 3), so that a label without a record is never guessed at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import msgspec

from lorabridge.bridge.trajectory import Span, Unestablished

KvMode = Literal["keep", "recompute"]
SwapMode = Literal["in_flight", "pinned"]
"""How a policy is swapped: samples in flight go on under the new version, or finish on the one they began with."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a policy that sits in a slot."""

    version: int
    digest: str


class Residency(msgspec.Struct, frozen=True, kw_only=True):
    """From epoch ``epoch`` on, until the next, ``instance`` of ``generator`` serves ``serves``.

    Attributes:
        kv: what the swap that began the epoch did with the KV of running requests.
        serves: by policy, what new samples get.
        at_ms: milliseconds since 1970 on the generator's clock.
        pinned: by policy that is swapped pinned, every version of it that is in a slot, what it serves last. A sample
            stays on the one it began with, which stays for as long as the sample does.
    """

    READS_SCHEMAS: ClassVar[tuple[int, ...]] = (1, 2)

    generator: str
    instance: str
    epoch: int
    kv: KvMode
    serves: dict[str, Served]
    at_ms: int
    pinned: dict[str, tuple[Served, ...]] = {}
    schema: int = 2

    @property
    def digests(self) -> set[str]:
        """Of every adapter that is in a slot."""
        held = {served.digest for versions in self.pinned.values() for served in versions}
        return held | {served.digest for served in self.serves.values()}

    @property
    def label(self) -> str:
        """What the engine tags tokens of this epoch with."""
        return f"{self.instance}:{self.epoch}"


class EngineSpan(msgspec.Struct, frozen=True):
    """A span as vLLM reports it: output tokens ``start`` to ``end`` (exclusive) were sampled under ``version``.

    ``version`` is the engine's label: ``<instance>:<epoch>``, and ``~<n>`` after the n-th preemption in the engine.
    """

    version: str
    start: int
    end: int


def parse_label(label: str) -> tuple[str, int] | None:
    """Instance and epoch of a label, None if it is not one of ours (vLLM's own before our first is ``default``)."""
    instance, colon, epoch = label.rpartition(":")
    ours = colon and epoch.isascii() and epoch.isdigit() and len(epoch) < 16
    return (instance, int(epoch)) if ours else None


def without_preemptions(spans: Sequence[EngineSpan]) -> tuple[list[EngineSpan], bool]:
    """The spans by epoch alone, and whether a request of theirs may have been preempted between two of its tokens."""
    merged: list[EngineSpan] = []
    for span in spans:
        label = span.version.partition("~")[0]
        if merged and merged[-1].version == label and merged[-1].end == span.start:
            merged[-1] = EngineSpan(label, merged[-1].start, span.end)
        else:
            merged.append(EngineSpan(label, span.start, span.end))
    return merged, len({span.version.partition("~")[2] for span in spans}) > 1


def epochs_between(labels: Sequence[str]) -> list[tuple[str, int]]:
    """(label, epoch) of every epoch from the first to the last of ``labels``, per instance, in order."""
    epochs: dict[str, list[int]] = {}
    for instance, epoch in filter(None, map(parse_label, labels)):
        epochs.setdefault(instance, []).append(epoch)
    return [(f"{instance}:{n}", n) for instance, own in epochs.items() for n in range(min(own), max(own) + 1)]


def resolve(
    policy: str,
    count: int,
    engine_spans: Sequence[EngineSpan],
    records: Mapping[str, Residency],
    restarts: Collection[int] = (),
    began_on: str | None = None,
) -> tuple[Span, ...]:
    """The engine's spans as facts about ``policy``; ``records`` maps labels to residency records.

    Args:
        policy: whose tokens these are.
        count: sampled tokens; the spans must tile exactly these.
        engine_spans: what the engine reported, in order, by epoch.
        records: every residency record of the instance so far, by label.
        restarts: sampled tokens before which the request was preempted, so that its KV was computed afresh; a span is
            cut there.
        began_on: digest that a sample of a pinned policy began with, as the server says; None of others.

    Raises:
        Unestablished: a label without a record, a record without the policy or without the digest that the sample
            began on, epochs out of order, more than one instance, or spans that do not tile the tokens. The caller
            quarantines the sample with this reason.
    """
    spans: list[Span] = []
    before: Residency | None = None
    for reported in engine_spans:
        record = records.get(reported.version)
        if record is None:
            raise Unestablished(f"no residency record for engine label {reported.version!r}")
        served = _served(record, policy, began_on)
        if before is not None and (record.instance != before.instance or record.epoch <= before.epoch):
            raise Unestablished(f"epoch {record.label} reported after {before.label}")
        kept = before is not None and _kept(before, record, records)
        # Preempted twice before it had another token, it began afresh twice at one place.
        cuts = sorted({at for at in restarts if reported.start < at < reported.end})
        for start, end in pairwise([reported.start, *cuts, reported.end]):
            spans.append(
                Span(
                    policy=policy,
                    version=served.version,
                    digest=served.digest,
                    epoch=record.epoch,
                    start=start,
                    end=end,
                    kv="kept" if kept and start == reported.start and start not in restarts else "fresh",
                )
            )
        before = record
    check_tiles(spans, count)
    return tuple(spans)


def _served(record: Residency, policy: str, began_on: str | None) -> Served:
    """What a sample of ``policy`` gets in an epoch. Raises ``Unestablished``."""
    held = record.pinned.get(policy)
    if held is None and began_on is None:
        if policy not in record.serves:
            raise Unestablished(f"epoch {record.label} does not serve {policy}")
        return record.serves[policy]
    if began_on is None:
        raise Unestablished(f"{policy} is pinned in epoch {record.label}, and the server did not say to which version")
    found = [served for served in held or () if served.digest == began_on]
    if not found:
        raise Unestablished(f"epoch {record.label} does not hold {began_on}, which the sample began on")
    return found[-1]


def check_tiles(spans: Sequence[Span], count: int) -> None:
    """Raise ``Unestablished`` unless ``spans`` cover tokens 0 to ``count`` exactly once, in order."""
    at = 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            raise Unestablished(f"span {span.start}..{span.end} does not continue at token {at}")
        at = span.end
    if at != count:
        raise Unestablished(f"spans cover {at} of {count} tokens")


def _kept(before: Residency, now: Residency, records: Mapping[str, Residency]) -> bool:
    """Whether KV from epoch ``before`` was still there in ``now``: no swap in between dropped it."""
    for epoch in range(before.epoch + 1, now.epoch + 1):
        between = records.get(f"{now.instance}:{epoch}")
        if between is None:
            raise Unestablished(f"no residency record for epoch {epoch} of {now.instance}")
        if between.kv == "recompute":
            return False
    return True
