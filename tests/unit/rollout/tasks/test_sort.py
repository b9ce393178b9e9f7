"""The demo's task: rows that come out the same, and a reward that rises with each right character."""

import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from lorabridge.rollout.tasks import sort

ANSWER = "0479acefgh"


def said(text: str | None) -> list[Mapping[str, Any]]:
    return [{"role": "assistant", "content": text}]


def test_an_answer_is_the_question_in_order() -> None:
    rng = random.Random(3)
    for _ in range(200):
        question, answer = sort.example(rng)
        asked = question.removeprefix(sort.INSTRUCTION)
        assert question == sort.INSTRUCTION + asked
        assert sorted(asked) == list(answer)
        assert len(set(answer)) == len(answer)
        assert set(answer) <= set(sort.ALPHABET)
        assert sort.SHORTEST <= len(answer) <= sort.LONGEST


def test_the_alphabet_is_in_the_order_that_answers_have() -> None:
    assert list(sort.ALPHABET) == sorted(set(sort.ALPHABET))


def test_rows_are_what_trl_takes() -> None:
    (row,) = sort.dataset(seed=0, size=1)
    assert set(row) == {"prompt", "answer"}
    ((role, content),) = [(message["role"], message["content"]) for message in row["prompt"]]
    assert role == "user"
    assert sorted(content.removeprefix(sort.INSTRUCTION)) == list(row["answer"])


def test_a_seed_decides_the_rows() -> None:
    rows = sort.dataset(seed=7, size=20)
    assert rows == sort.dataset(seed=7, size=20)
    assert rows[:5] == sort.dataset(seed=7, size=5)
    assert rows != sort.dataset(seed=8, size=20)
    assert sort.dataset(seed=7, size=0) == []


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        pytest.param(ANSWER, 1.0, id="the answer"),
        pytest.param("", 0.0, id="nothing"),
        pytest.param("x479acefgh", 0.0, id="wrong from the start"),
        pytest.param("0479", 0.4, id="stops early"),
        pytest.param("0479xcefgh", 0.4, id="one wrong in the middle"),
        pytest.param("0479cefgh", 0.4, id="one left out"),
        pytest.param(ANSWER + "i" * 10, 0.5, id="runs on"),
        pytest.param(ANSWER + "?", 10 / 11, id="one too many"),
    ],
)
def test_reward(completion: str, reward: float) -> None:
    assert sort.right_share(completion, ANSWER) == pytest.approx(reward)


def test_each_right_character_is_worth_more() -> None:
    rewards = [sort.right_share(ANSWER[:length], ANSWER) for length in range(len(ANSWER) + 1)]
    assert rewards == sorted(set(rewards))


def test_two_empty_strings_do_not_divide_by_zero() -> None:
    assert sort.right_share("", "") == 0.0


def test_the_reward_function_takes_what_trl_gives() -> None:
    prompts = [row["prompt"] for row in sort.dataset(seed=0, size=3)]
    completions = [said(ANSWER), said("0479"), said(None)]
    rewards = sort.sorted_prefix(
        prompts=prompts, completions=completions, answer=[ANSWER] * 3, completion_ids=[[1], [2], []], trainer_state=None
    )
    assert rewards == pytest.approx([1.0, 0.4, 0.0])


def test_the_last_message_is_the_one_rewarded() -> None:
    conversation = [*said("wrong"), *said(ANSWER)]
    assert sort.sorted_prefix([None], [conversation], [ANSWER]) == [1.0]


def test_missing_answers_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        sort.sorted_prefix([None, None], [said(ANSWER), said(ANSWER)], [ANSWER])


def test_the_task_loads_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'trl'}"
    code = f"import sys; import lorabridge.rollout.tasks.sort; print(sorted({heavy} & {{*sys.modules}}))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
