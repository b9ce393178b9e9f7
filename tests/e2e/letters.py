"""A task for a random base: write lower-case letters. Any change of the weights moves its reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lorabridge.rollout.environment import Environment


def lower_share(completions: Sequence[Sequence[Mapping[str, Any]]], **_: object) -> list[float]:
    """The share of lower-case letters in each completion."""
    texts = [str(messages[-1]["content"]) for messages in completions]
    return [sum(c.islower() for c in text) / max(1, len(text)) for text in texts]


def dataset(seed: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"{seed}:{number}"}]} for number in range(50)]


environment = Environment(dataset=dataset, reward_funcs=(lower_share,))
