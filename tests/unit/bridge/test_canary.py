"""A canary matches only what the manifest says, says so when it cannot tell, and knows what it could have seen."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.canary import FLOOR_LIMITS, Canary, Logprobs, judge, sequences

IDS = ((1, 2, 3), (4, 5, 6))
BASE: Logprobs = ((-1.0, -2.0), (-3.0, -4.0))
ADAPTER: Logprobs = ((-1.5, -2.0), (-3.0, -3.0))
CANARY = Canary(sequences=IDS, adapter=ADAPTER, base=BASE, dtype="float32")


def moved(rows: Logprobs, by: float) -> Logprobs:
    (first, *others), *rest = rows
    return ((first + by, *others), *rest)


def verdict(adapter: Logprobs = ADAPTER, base: Logprobs = BASE, canary: Canary = CANARY, dtype: str = "float32") -> str:
    return judge(canary, "policy", 3, adapter, base, dtype).verdict


def test_what_is_repeated_matches() -> None:
    assert verdict() == "match"
    assert verdict(moved(ADAPTER, 3e-5), moved(BASE, 2e-5)) == "match"


@pytest.mark.parametrize(
    ("adapter", "base"),
    [
        (BASE, BASE),  # the adapter is ignored
        (moved(ADAPTER, 1e-3), BASE),  # a little off where the base is exact
        (moved(ADAPTER, 1.0), moved(BASE, 1.0)),  # another base
        (ADAPTER, moved(BASE, 2e-3)),
        (ADAPTER[:1], BASE),
        (((-1.5,), (-3.0, -3.0)), BASE),
        (((float("nan"), -2.0), (-3.0, -3.0)), BASE),
        (((float("-inf"), -2.0), (-3.0, -3.0)), BASE),
        ((), ()),
    ],
)
def test_what_is_not_repeated_does_not_match(adapter: Logprobs, base: Logprobs) -> None:
    assert verdict(adapter, base) == "mismatch"


def test_an_adapter_that_changes_nothing_cannot_be_told_from_the_base() -> None:
    fresh = msgspec.structs.replace(CANARY, adapter=BASE)
    assert verdict(BASE, BASE, fresh) == "indistinct"
    assert verdict(ADAPTER, BASE, fresh) == "mismatch"


def test_a_coarser_dtype_is_given_its_noise_and_one_that_nobody_measured_none() -> None:
    noisy = moved(BASE, 0.01)
    assert verdict(moved(ADAPTER, 0.01), noisy) == "mismatch"
    assert verdict(moved(ADAPTER, 0.01), noisy, dtype="bfloat16") == "match"
    unknown = msgspec.structs.replace(CANARY, dtype="float8")
    assert verdict(moved(ADAPTER, 1e-6), moved(BASE, 1e-6), unknown, "float8") == "mismatch"


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_match_is_never_off_by_more_than_it_says_it_could_see(floor: float, error: float) -> None:
    found = judge(CANARY, "policy", 3, moved(ADAPTER, error), moved(BASE, floor), "float32")
    if found.verdict == "match":
        assert found.error <= found.smallest < found.effect
        assert found.floor <= FLOOR_LIMITS["float32"]
    else:
        assert found.verdict == "mismatch" or found.effect <= found.smallest
    assert "3" in found.reason


def test_sequences_are_the_same_for_the_same_seed_and_within_the_vocabulary() -> None:
    one = sequences(50, "seed")
    assert one == sequences(50, "seed") != sequences(50, "other")
    assert all(0 <= token < 50 for row in one for token in row)
