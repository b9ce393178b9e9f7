"""What the audit checks before it computes anything: findings about a turn, or about one of its spans."""

from __future__ import annotations

from collections.abc import Mapping

from lorabridge.bridge.errors import CodecError, ConfigError, DigestMismatch, DigestMissing, TooLarge, VersionTaken
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.verdict import Finding, Verdict, unscorable
from lorabridge.bridge.residency import EngineSpan, Residency, check_tiles, resolve, without_preemptions
from lorabridge.bridge.store import Store
from lorabridge.bridge.trajectory import Span, Trajectory, Turn, Unestablished


def check_turn(trajectory: Trajectory, turn: Turn, vocabulary: int) -> Finding | None:
    """What keeps a whole turn from being recomputed, or shows that the model cannot have sampled it."""
    if reason := unscorable(trajectory):
        return Finding(Verdict.UNVERIFIABLE, reason)
    if len(turn.logprobs) != len(turn.token_ids):
        return Finding(Verdict.UNVERIFIABLE, "as many logprobs as tokens were not recorded")
    if not turn.prompt_ids:
        return Finding(Verdict.UNVERIFIABLE, "the prompt is empty")
    try:
        check_tiles(turn.spans, len(turn.token_ids))
    except Unestablished as error:
        return Finding(Verdict.UNVERIFIABLE, str(error))
    if turn.spans and turn.spans[0].kv != "fresh":
        return Finding(Verdict.UNVERIFIABLE, "the first span continues on KV that nothing left")
    for token in (*turn.prompt_ids, *turn.token_ids):
        if not 0 <= token < vocabulary:
            return Finding(Verdict.REFUTED, f"token {token} is not in the base model's vocabulary of {vocabulary}")
    return None


def check_residency(trajectory: Trajectory, turn: Turn, residencies: Mapping[str, Residency]) -> list[Finding | None]:
    """For each span of a turn, whether what its epoch served is what the span says."""
    labelled = [EngineSpan(f"{trajectory.instance}:{span.epoch}", span.start, span.end) for span in turn.spans]
    reported, _ = without_preemptions(labelled)
    # Where a request was preempted, only the sample says so: the arithmetic must then bear it out.
    restarts = {span.start for span in turn.spans[1:] if span.kv == "fresh"}
    try:
        began_on = _began_on(trajectory, turn, residencies)
        resolved = resolve(trajectory.policy, len(turn.token_ids), reported, residencies, restarts, began_on)
    except Unestablished as error:
        return [Finding(Verdict.UNVERIFIABLE, str(error))] * len(turn.spans)
    return [
        None
        if span == fact
        else Finding(
            Verdict.REFUTED,
            f"epoch {trajectory.instance}:{fact.epoch} served {fact.policy} version {fact.version} with {fact.kv} KV, "
            "not what the span says",
        )
        for span, fact in zip(turn.spans, resolved, strict=True)
    ]


def _began_on(trajectory: Trajectory, turn: Turn, residencies: Mapping[str, Residency]) -> str | None:
    """The digest that a turn of a pinned policy says it began with; its arithmetic must bear that out."""
    first = turn.spans[0] if turn.spans else None
    record = residencies.get(f"{trajectory.instance}:{first.epoch}") if first else None
    return first.digest if first and record and trajectory.policy in record.pinned else None


class Line:
    """The store's answers about versions and adapters, each asked for once."""

    def __init__(self, store: Store, base: Fingerprint) -> None:
        self._store = store
        self._base = base
        self._manifests: dict[tuple[str, int], Manifest | Finding] = {}
        self._adapters: dict[str, Finding | None] = {}

    def check(self, span: Span, base: str) -> Finding | None:
        """Whether the manifest agrees with a span that was sampled on ``base``, and its adapter can be used here."""
        manifest = self._manifest(span.policy, span.version)
        if isinstance(manifest, Finding):
            return manifest
        if manifest.digest != span.digest:
            return Finding(Verdict.REFUTED, f"the manifest of {span.policy} version {span.version} has another digest")
        if parts := manifest.base.differences(self._base):
            return Finding(
                Verdict.UNVERIFIABLE, f"the base model here is not the manifest's: {', '.join(parts)} differs"
            )
        if base != manifest.base.digest:
            return Finding(Verdict.UNVERIFIABLE, "the generator's base model was not the manifest's")
        return self._adapter(span.digest)

    def neighbours(self, span: Span) -> tuple[str, ...]:
        """Digests of the versions before and after, of those that are in the store on the same base."""
        found = [self._manifest(span.policy, span.version + by) for by in (-1, 1)]
        return tuple(
            manifest.digest
            for manifest in found
            if isinstance(manifest, Manifest)
            and not manifest.base.differences(self._base)
            and self._adapter(manifest.digest) is None
        )

    def _manifest(self, policy: str, version: int) -> Manifest | Finding:
        key = policy, version
        if key not in self._manifests:
            try:
                self._manifests[key] = self._store.manifest(policy, version)
            except (DigestMissing, VersionTaken, CodecError, ConfigError) as error:
                self._manifests[key] = Finding(Verdict.UNVERIFIABLE, error.problem)
        return self._manifests[key]

    def _adapter(self, digest: str) -> Finding | None:
        if digest not in self._adapters:
            try:
                self._store.read(digest)
                self._adapters[digest] = None
            except (DigestMissing, DigestMismatch, TooLarge, ConfigError) as error:
                self._adapters[digest] = Finding(Verdict.UNVERIFIABLE, error.problem)
        return self._adapters[digest]
