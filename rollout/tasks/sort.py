"""The demo's environment: put 24 to 28 distinct characters in order.

A prompt reads ``sort:t0kx...`` and the answer is the same characters in ASCII order, digits before letters. The
characters are distinct, so the next one depends only on the one before it and on what is in the prompt: a model of
half a million parameters learns that in a minute, and answers are still long enough (one token per character) for a
sample to live through a change of adapter.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from lorabridge.rollout.environment import Environment

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Every character that can stand in a question or an answer, in the order an answer has them."""

INSTRUCTION = "sort:"
"""What a question opens with."""

SHORTEST, LONGEST = 24, 28
"""Bounds of an answer's length, in characters, both included."""


def example(rng: random.Random) -> tuple[str, str]:
    """Draw one question (the text of a user's message) and its answer."""
    characters = rng.sample(ALPHABET, rng.randint(SHORTEST, LONGEST))
    return INSTRUCTION + "".join(characters), "".join(sorted(characters))


def dataset(seed: int, size: int) -> list[dict[str, Any]]:
    """Draw ``size`` rows: ``prompt`` is a list with one chat message, ``answer`` is a string.

    The same seed gives the same rows, and a shorter dataset is the beginning of a longer one.
    """
    rng = random.Random(seed)
    rows = []
    for _ in range(size):
        question, answer = example(rng)
        rows.append({"prompt": [{"role": "user", "content": question}], "answer": answer})
    return rows


def right_share(completion: str, answer: str) -> float:
    """Return the share of ``completion`` that is right before its first mistake, in [0, 1].

    The divisor is the longer of the two lengths, so that running on past the end costs as stopping early does, and
    only the answer itself scores 1. An empty completion scores 0.
    """
    right = 0
    for given, wanted in zip(completion, answer, strict=False):
        if given != wanted:
            break
        right += 1
    return right / max(len(completion), len(answer), 1)


def sorted_prefix(
    prompts: Sequence[object],
    completions: Sequence[Sequence[Mapping[str, Any]]],
    answer: Sequence[str],
    **kwargs: object,
) -> list[float]:
    """Reward each completion by :func:`right_share`: TRL's reward signature, for conversational prompts.

    Args:
        prompts: One per completion; not looked at.
        completions: For each sample its chat messages, of which the last is the answer given.
        answer: For each sample the answer wanted.
        **kwargs: The dataset's other columns and whatever else TRL hands over; not looked at.

    Returns:
        One reward per completion, in [0, 1].
    """
    return [
        right_share(str(messages[-1]["content"] or ""), wanted)
        for messages, wanted in zip(completions, answer, strict=True)
    ]


ROWS = 4000
"""Prompts in the demo's dataset: more than a demo gets through."""

environment = Environment(dataset=lambda seed: dataset(seed, ROWS), reward_funcs=(sorted_prefix,))
