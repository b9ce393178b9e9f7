"""The canary: a few token sequences and their logprobs under a version, which whoever serves it must be able to repeat.

It sees what looking at slots cannot: the wrong base, a wrong scale, a kernel that ignores the adapter. The trainer adds
it to a manifest; the worker asks the generator for the same sequences, with the adapter and without, and judges. All of
this file is pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import Literal

import msgspec

Logprobs = tuple[tuple[float, ...], ...]
Verdict = Literal["match", "mismatch", "indistinct"]

# The largest difference between trainer and generator without adapter, in nats, that numerics explain. Between PEFT and
# vLLM in float32 3e-5 was seen at most; the others keep 8 and 11 bits of a number where float32 keeps 24.
FLOOR_LIMITS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
_MARGIN = 4.0
_LEAST = 1e-5
_SEQUENCES, _LENGTH = 4, 24


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """What a version answers.

    Attributes:
        sequences: token ids.
        adapter: natural logarithms of each token's probability after those before it, from the second token on, under
            the version's adapter.
        base: the same without it.
        dtype: that the trainer computed in.
    """

    sequences: tuple[tuple[int, ...], ...]
    adapter: Logprobs
    base: Logprobs
    dtype: str


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What a canary says of a generator. All in nats.

    Attributes:
        policy, version: whose canary.
        verdict: ``match``; ``mismatch``: the generator does not serve what the manifest says; ``indistinct``: the
            adapter changes so little that the base would pass for it.
        floor: largest difference between trainer and generator without adapter.
        error: largest difference with it.
        effect: largest difference that the adapter makes at the trainer.
        smallest: the smallest change that this canary can see: four times the floor.
    """

    policy: str
    version: int
    verdict: Verdict
    floor: float
    error: float
    effect: float
    smallest: float

    @property
    def reason(self) -> str:
        """Why a generator that does not match must not be used."""
        return (
            f"the canary of {self.policy} version {self.version} is off by {self.error:.2g} nats, and without adapter "
            f"by {self.floor:.2g}; {self.smallest:.2g} would be noise"
        )


def sequences(vocabulary: int, seed: str) -> tuple[tuple[int, ...], ...]:
    """Token ids for a canary: drawn evenly, the same for the same ``seed``."""
    draw = random.Random(seed)
    return tuple(tuple(draw.randrange(vocabulary) for _ in range(_LENGTH)) for _ in range(_SEQUENCES))


def judge(canary: Canary, policy: str, version: int, adapter: Logprobs, base: Logprobs, dtype: str) -> Judgement:
    """Hold a generator's answers (``adapter``, ``base``; it computes in ``dtype``) against a version's canary.

    A generator whose base differs by more than numerics explain does not match, whatever its adapter does; of a dtype
    that nobody has measured, none is close enough. An answer of another shape, or with a value that is not a number,
    does not match either.
    """
    floor, error = _distance(canary.base, base), _distance(canary.adapter, adapter)
    effect = _distance(canary.adapter, canary.base)
    smallest = max(_LEAST, _MARGIN * floor)
    limit = max(FLOOR_LIMITS.get(each, 0.0) for each in (canary.dtype, dtype))
    verdict: Verdict = "match"
    if not (floor <= limit and error <= smallest):
        verdict = "mismatch"
    elif effect <= smallest:
        verdict = "indistinct"
    return Judgement(
        policy=policy, version=version, verdict=verdict, floor=floor, error=error, effect=effect, smallest=smallest
    )


def _distance(one: Logprobs, other: Logprobs) -> float:
    """The largest difference of two answers; infinite if they have another shape, or anything that is no number."""
    if [len(row) for row in one] != [len(row) for row in other]:
        return float("inf")
    differences: Sequence[float] = [abs(a - b) for a, b in zip(chain(*one), chain(*other), strict=True)]
    return float("inf") if any(d != d for d in differences) else max(differences, default=0.0)
