"""Ids that survive redelivery, and sums over turns."""

from __future__ import annotations

import msgspec

from tests.factories import make_span, make_trajectory, make_turn


def test_an_id_names_run_group_attempt_and_index_and_nothing_of_the_content() -> None:
    trajectory = make_trajectory(group=12, attempt=3, index=5)
    assert trajectory.id == "run/12.3/5"
    assert msgspec.structs.replace(trajectory, reward=0.0, turns=()).id == trajectory.id


def test_another_attempt_is_another_trajectory() -> None:
    assert make_trajectory(attempt=1).id != make_trajectory(attempt=2).id


def test_tokens_and_spans_are_those_of_every_turn_in_order() -> None:
    turns = (make_turn((make_span(1, 0, 3),)), make_turn((make_span(2, 0, 1), make_span(3, 1, 2))), make_turn(()))
    trajectory = make_trajectory(turns=turns)
    assert trajectory.tokens == 5
    assert [span.version for span in trajectory.spans] == [1, 2, 3]
