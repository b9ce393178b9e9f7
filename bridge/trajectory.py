"""Samples as they cross from a worker to the trainer and the ledger."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]


class Unestablished(Exception):
    """What produced a sample cannot be established; ``str`` is the reason that its quarantine carries."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens ``start`` to ``end`` (exclusive) of a turn came from ``digest``, ``version`` of ``policy``.

    ``kv`` is ``kept`` if the tokens before this span were left in the KV cache as earlier spans computed them, and
    ``fresh`` if everything before it was computed under this span's own adapter (always so for the first span).
    """

    policy: str
    version: int
    digest: str
    epoch: int
    start: int
    end: int
    kv: Literal["fresh", "kept"]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the model.

    Attributes:
        prompt_ids: every token before the sampled ones.
        token_ids: what was sampled, the end token included if there was one.
        logprobs: natural logarithms, one per sampled token, as the sampler used them.
        mask: 1 where the token may be trained on.
        spans: tile ``token_ids``.
        finish_reason: as vLLM reports it.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    mask: tuple[int, ...]
    spans: tuple[Span, ...]
    finish_reason: FinishReason


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens were chosen. TRL's and vLLM's names and defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 128


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Turns with a reward.

    Attributes:
        group, attempt, index: which group, which try at it, which of its completions.
        environment: digest of the environment's code.
        seed: of the run: the order of the prompts. Sampling itself has no seed.
        prompt: digest of the prompt's token ids.
        base: digest over the base fingerprint.
        logprobs_mode: vLLM's ``--logprobs-mode``.
        dtype: the engine's.
        reward: sum of ``rewards``; None of a function is left out.
        advantage: (reward - mean) / (std + 1e-8) over the group's scored completions, 0 for an unscored one.
        times_ms: when each stage ended (claimed, sampled, rewarded), milliseconds since 1970 on the stream's clock.
    """

    run: str
    policy: str
    group: int
    attempt: int
    index: int
    environment: str
    prompt: str
    base: str
    turns: tuple[Turn, ...]
    sampling: Sampling
    seed: int
    logprobs_mode: str
    dtype: str
    generator: str
    instance: str
    reward: float
    rewards: dict[str, float | None]
    advantage: float
    times_ms: dict[str, int]
    purpose: Purpose = "train"

    @property
    def id(self) -> str:
        """Stable under redelivery: ``<run>/<group>.<attempt>/<index>``."""
        return f"{self.run}/{self.group}.{self.attempt}/{self.index}"

    @property
    def tokens(self) -> int:
        """How many tokens were sampled, over all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every span of every turn, in order."""
        return tuple(span for turn in self.turns for span in turn.spans)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories of one prompt: what enters the stream, once, whole."""

    READS_SCHEMAS: ClassVar[tuple[int, ...]] = (1,)

    group: int
    attempt: int
    worker: str
    trajectories: tuple[Trajectory, ...]
    schema: int = 1
