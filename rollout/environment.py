"""What a task is: prompts with their columns, and reward functions with TRL's signature."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

from lorabridge.bridge.errors import ConfigError

log = logging.getLogger("lorabridge.worker")

Messages: TypeAlias = list[dict[str, Any]]
Rewards: TypeAlias = Sequence[float | None]
# TRL's: called with prompts, completions, completion_ids and the dataset's columns by name; one reward per completion.
RewardFunc: TypeAlias = Callable[..., Rewards | Awaitable[Rewards]]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A task.

    Attributes:
        dataset: rows with a ``prompt`` (text, or chat messages) and any further columns, given a seed. A
            ``datasets.Dataset`` is such a sequence.
        reward_funcs: their sum is the reward; None leaves a completion out of that function.
    """

    dataset: Callable[[int], Sequence[Mapping[str, Any]]]
    reward_funcs: tuple[RewardFunc, ...]


def load_environment(reference: str) -> Environment:
    """The environment that ``module:attribute`` names.

    Raises:
        ConfigError: no such module or attribute, the module fails, or it is not an ``Environment``.
    """
    module, _, attribute = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute or "environment")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"[rollout] environment {reference!r}: {error}", action="Give module:attribute, its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # whatever a user's own code may raise
        raise ConfigError(
            f"[rollout] environment {reference!r} fails when it is imported: {type(error).__name__}: {error}",
            action=f"Correct the module {module}",
        ) from error
    if not isinstance(found, Environment):
        raise ConfigError(
            f"[rollout] environment {reference!r} is a {type(found).__name__}", action="Make it an Environment"
        )
    return found


class Prompts:
    """Which prompt a group has: every epoch goes once through the dataset in an order of its own."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], seed: int) -> None:
        if not len(rows):
            raise ConfigError("the environment's dataset is empty", action="Give it rows with a prompt")
        self._rows, self._seed = rows, seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def row(self, group: int) -> Mapping[str, Any]:
        """The row of group ``group``; the same in every worker of a run."""
        epoch, place = divmod(group, len(self._rows))
        return self._rows[self._order(epoch)[place]]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


async def score(
    functions: Sequence[RewardFunc], row: Mapping[str, Any], completions: Sequence[Any], ids: Sequence[Sequence[int]]
) -> list[dict[str, float | None]]:
    """Rewards of a group's completions by function name, each called once with the whole group, as TRL does.

    A function that is not a coroutine runs in a thread, so that it holds up no other group. A reward that is not a
    finite number counts as None, and each function that gave any is logged once.

    Raises:
        ValueError: a function did not return one reward per completion.
    """
    count = len(completions)
    columns = {name: [value] * count for name, value in row.items() if name != "prompt"}
    scored: list[dict[str, float | None]] = [{} for _ in range(count)]
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        call = partial(
            function,
            prompts=[row["prompt"]] * count,
            completions=list(completions),
            completion_ids=[list(i) for i in ids],
            **columns,
        )
        answer = call() if inspect.iscoroutinefunction(function) else await asyncio.to_thread(call)
        rewards = await answer if inspect.isawaitable(answer) else answer
        if len(rewards) != count:
            raise ValueError(f"reward function {name} returned {len(rewards)} rewards for {count} completions")
        odd = [reward for reward in rewards if reward is not None and not math.isfinite(reward)]
        if odd:
            log.warning("reward function %s: %d of %d rewards count as None, such as %s", name, len(odd), count, odd[0])
        for rewarded, reward in zip(scored, rewards, strict=True):
            rewarded[name] = None if reward is None or not math.isfinite(reward) else float(reward)
    return scored


def total(rewards: Mapping[str, float | None]) -> float | None:
    """The sum of the functions' rewards; None if none of them scored the completion."""
    given = [reward for reward in rewards.values() if reward is not None]
    return sum(given) if given else None


def advantages(rewards: Sequence[float | None]) -> list[float]:
    """(reward - mean) / (std + 1e-8) over the scored completions of a group, 0 for the others (TRL's AsyncGRPO)."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored:
        return [0.0] * len(rewards)
    mean = sum(scored) / len(scored)
    std = (sum((reward - mean) ** 2 for reward in scored) / len(scored)) ** 0.5
    return [0.0 if reward is None else (reward - mean) / (std + 1e-8) for reward in rewards]
