"""A store with a line of versions, and a scorer that computes nothing: logprobs are a function of digest and token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.scorer import Chain, ChainScore, PieceScore
from lorabridge.bridge.store.local import LocalStore
from lorabridge.bridge.trajectory import Sampling, Span, Trajectory, Turn

BASE = Fingerprint(checkpoint="sha256:c", tokenizer="sha256:t", template="sha256:p")
VERSIONS = 5


class FakeScorer:
    """Token ``t`` has logprob ``-1 - t / 100 - version / 10``; digests in ``broken`` cannot be loaded."""

    def __init__(self, digests: Sequence[str]) -> None:
        self.base = BASE
        self.vocabulary = 50
        self.versions = {digest: version for version, digest in enumerate(digests, 1)}
        self.broken: set[str] = set()
        self.chains: list[Chain] = []

    def logprob(self, digest: str, token: int) -> float:
        return -1 - token / 100 - self.versions[digest] / 10

    def score(self, chains: Sequence[Chain]) -> Iterator[ChainScore]:
        self.chains = list(chains)
        for chain in reversed(chains):
            if any(piece.digest in self.broken for piece in chain.pieces):
                yield ChainScore(chain, (), "it does not fit")
                continue
            pieces = []
            for piece in chain.pieces:
                tokens = chain.token_ids[piece.start : piece.end]
                own, *others = (
                    tuple(self.logprob(digest, token) for token in tokens)
                    for digest in (piece.digest, *piece.neighbours)
                )
                pieces.append(PieceScore(own, tuple(others)))
            yield ChainScore(chain, tuple(pieces))


class Case(msgspec.Struct):
    """What the tests of the audit share; ``digests`` are those of versions 1, 2, ...; ``recorded`` is in the ledger."""

    store: LocalStore
    scorer: FakeScorer
    digests: list[str]
    recorded: tuple[Turn, ...] = ()

    def spans(self, *parts: tuple[int, int, str]) -> tuple[Span, ...]:
        """Spans of (version, tokens, kv); their epochs are the versions."""
        spans, at = [], 0
        for version, count, kv in parts:
            fields: dict[str, Any] = {"policy": "policy", "version": version, "epoch": version, "kv": kv}
            spans.append(Span(**fields, digest=self.digests[version - 1], start=at, end=at + count))
            at += count
        return tuple(spans)

    def turn(self, *parts: tuple[int, int, str]) -> Turn:
        """A turn of tokens 1, 2, ... with the logprobs that an honest engine would have recorded."""
        spans = self.spans(*parts)
        tokens = tuple(range(1, (spans[-1].end if spans else 0) + 1))
        logprobs = [self.scorer.logprob(span.digest, t) for span in spans for t in tokens[span.start : span.end]]
        return Turn(
            prompt_ids=(7, 8), token_ids=tokens, logprobs=tuple(logprobs), mask=(1,) * len(tokens), spans=spans,
            finish_reason="stop",
        )  # fmt: skip

    def trajectory(self, *turns: Turn, index: int = 0, **changes: Any) -> Trajectory:
        plain = Trajectory(
            run="run", policy="policy", group=3, attempt=1, index=index, environment="", prompt="", base=BASE.digest,
            turns=turns, sampling=Sampling(), seed=0, logprobs_mode="processed_logprobs", dtype="float32",
            generator="generator", instance="instance", reward=0.5, rewards={"right": 0.5, "other": None},
            advantage=0.1, times_ms={},
        )  # fmt: skip
        return msgspec.structs.replace(plain, **changes)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    store = LocalStore(tmp_path / "store", 1 << 20)
    epoch, digests = store.allocate_epoch("policy"), list[str]()
    for version in range(1, VERSIONS + 1):
        digests.append(store.put(Adapter(config=b"{}", tensors=str(version).encode())))
        store.commit(
            Manifest(
                policy="policy", version=version, digest=digests[-1], parent=digests[-2] if version > 1 else None,
                base=BASE, rank=4, targets=(), dtype="F32", step=version - 1, epoch=epoch, run="run", created_ms=0,
                size=1,
            )
        )  # fmt: skip
    return Case(store, FakeScorer(digests), digests)
