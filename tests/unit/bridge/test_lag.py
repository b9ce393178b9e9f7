"""Lag counts optimizer steps, weighted by tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.lag import summarise, token_lags, too_old
from tests.factories import make_span

STEPS = {("policy", 1): 0, ("policy", 2): 1, ("policy", 3): 5, ("other", 1): 4}


def test_a_token_of_the_version_trained_from_has_lag_0() -> None:
    assert token_lags([make_span(3, 0, 4)], STEPS, trained_at=5) == [(0, 4)]


def test_each_span_is_counted_from_the_step_its_own_version_was_made_at() -> None:
    spans = [make_span(1, 0, 3), make_span(2, 3, 4), make_span(1, 4, 6, policy="other")]
    assert token_lags(spans, STEPS, trained_at=6) == [(6, 3), (5, 1), (2, 2)]


def test_a_version_without_a_known_step_is_not_guessed() -> None:
    with pytest.raises(KeyError):
        token_lags([make_span(9, 0, 1)], STEPS, trained_at=9)


def test_a_lag_below_0_is_an_error_however_old_the_other_tokens_are() -> None:
    with pytest.raises(ValueError, match="made at step 5 cannot be trained on after 4 steps"):
        token_lags([make_span(1, 0, 3), make_span(3, 3, 4)], STEPS, trained_at=4)


def test_a_summary_of_nothing_is_zero() -> None:
    summary = summarise([])
    assert (summary.tokens, summary.total, summary.largest, summary.mean) == (0, 0, 0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50))))
def test_the_mean_is_that_of_the_tokens_one_by_one(lags: list[tuple[int, int]]) -> None:
    tokens = [lag for lag, count in lags for _ in range(count)]
    summary = summarise(lags)
    assert (summary.tokens, summary.total) == (len(tokens), sum(tokens))
    assert summary.largest == max(tokens, default=0)
    assert summary.mean == (sum(tokens) / len(tokens) if tokens else 0.0)


@pytest.mark.parametrize(("limit", "old"), [(3, True), (4, False), (5, False)])
def test_one_token_over_the_limit_makes_a_trajectory_too_old(limit: int, old: bool) -> None:
    assert too_old([(0, 100), (4, 1)], limit) is old


def test_nothing_is_never_too_old() -> None:
    assert not too_old([], 0)
