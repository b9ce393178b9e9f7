"""Prompts, rewards with TRL's signature, and group advantages."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.errors import ConfigError
from lorabridge.rollout.environment import Prompts, advantages, load_environment, score, total

ROWS: list[dict[str, Any]] = [{"prompt": f"p{n}", "answer": n} for n in range(7)]


def test_every_epoch_goes_once_through_the_dataset_in_an_order_of_its_own() -> None:
    prompts = Prompts(ROWS, seed=3)
    epochs = [[prompts.row(7 * epoch + place)["answer"] for place in range(7)] for epoch in range(5)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@given(st.integers(0, 2**31), st.integers(0, 10_000))
def test_the_same_group_has_the_same_prompt_in_every_worker(seed: int, group: int) -> None:
    assert Prompts(ROWS, seed).row(group) == Prompts(ROWS, seed).row(group)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        Prompts([], 0)


async def test_reward_functions_are_called_once_per_group_as_trl_calls_them() -> None:
    seen: list[dict[str, Any]] = []

    def right(prompts: list[str], completions: list[str], answer: list[int], **rest: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, "answer": answer, **rest})
        return [1.0, 0.0]

    async def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        return [None, 2.0]

    scored = await score([right, sometimes], {"prompt": "p", "answer": 4}, ["a", "b"], [[1], [2, 3]])
    assert scored == [{"right": 1.0, "sometimes": None}, {"right": 0.0, "sometimes": 2.0}]
    assert seen == [
        {"prompts": ["p", "p"], "completions": ["a", "b"], "answer": [4, 4], "completion_ids": [[1], [2, 3]]}
    ]
    assert [total(rewards) for rewards in scored] == [1.0, 2.0]
    assert total({"sometimes": None}) is None


async def test_a_function_that_returns_another_number_of_rewards_is_named() -> None:
    def short(**_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="short returned 1 rewards for 2"):
        await score([short], {"prompt": "p"}, ["a", "b"], [[1], [2]])


async def test_a_reward_that_is_no_number_counts_as_none(caplog: pytest.LogCaptureFixture) -> None:
    def odd(**_: Any) -> list[float]:
        return [float("nan"), float("inf"), 1]

    assert await score([odd], {"prompt": "p"}, ["a", "b", "c"], [[1], [2], [3]]) == [
        {"odd": None}, {"odd": None}, {"odd": 1.0}
    ]  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        "reward function odd: 2 of 3 rewards count as None, such as nan"
    ]


async def test_a_function_that_takes_its_time_holds_nobody_up() -> None:
    go = threading.Event()

    def slow(**_: Any) -> list[float]:
        assert go.wait(30)
        return [1.0]

    scoring = asyncio.create_task(score([slow], {"prompt": "p"}, ["a"], [[1]]))
    await asyncio.sleep(0)
    go.set()  # nobody would, if the loop were held
    assert await scoring == [{"slow": 1.0}]


def test_a_task_that_fails_when_it_is_imported_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_broken_task.py").write_text("{}['answer']")
    with pytest.raises(ConfigError, match="fails when it is imported: KeyError: 'answer'"):
        load_environment("a_broken_task:environment")


def test_advantages_are_centred_and_scaled_over_the_scored() -> None:
    assert advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    assert advantages([None, None]) == [0.0, 0.0]
    assert advantages([0.0, None, 2.0]) == [pytest.approx(-1.0), 0.0, pytest.approx(1.0)]


@given(st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=1, max_size=20))
def test_advantages_of_the_scored_sum_to_nothing(rewards: list[float | None]) -> None:
    assert sum(advantages(rewards)) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("reference", ["no_such_module:environment", "json:dumps", "json:nothing", "", ":x"])
def test_what_is_not_an_environment_is_refused_with_its_name(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"\[rollout\] environment"):
        load_environment(reference)
