"""What sits in which slot and what may leave: rules one by one, and in any order."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.rollout.slots import Slots


def slots(*names: str, capacity: int = 3, spare: int = 0, pinned: bool = True) -> Slots:
    """Every name with a policy of the same name, put in one after another."""
    value = Slots(capacity=capacity, spare=spare)
    for name in names:
        value = value.put(name, f"digest of {name}", pinned=pinned).serve(name, name)
    return value


def names(value: Slots) -> list[str]:
    return [slot.name for slot in value.held]


def leaving(value: Slots) -> list[str]:
    return [slot.name for slot in value.leaving]


def test_a_superseded_adapter_leaves_when_its_last_request_has_ended() -> None:
    value = slots("old").begin("old").begin("old").put("new", "d").serve("old", "new")
    assert leaving(value) == []
    assert leaving(value.end("old")) == []
    assert leaving(value.end("old").end("old")) == ["old"]


def test_what_serves_stays_however_idle() -> None:
    assert leaving(slots("a", "b", "c")) == []


def test_an_adapter_that_two_policies_are_served_from_stays_until_both_have_moved_on() -> None:
    value = slots("a").serve("b", "a").put("n", "d").serve("a", "n")
    assert leaving(value) == []
    assert leaving(value.serve("b", "n")) == ["a"]


def test_what_is_not_pinned_leaves_least_recently_used_first_to_keep_a_slot_free() -> None:
    value = slots("a", "b", "c", capacity=4, spare=1, pinned=False)
    assert leaving(value) == []
    value = value.begin("a").end("a").put("d", "d", pinned=False).serve("d", "d")
    assert names(value) == ["b", "c", "a", "d"]
    assert leaving(value) == ["b"]
    assert leaving(value.begin("b")) == ["c"]
    assert leaving(value.begin("a").begin("b").begin("c").begin("d")) == []


def test_of_pinned_ones_none_leaves_to_keep_a_slot_free() -> None:
    value = slots("a", capacity=2, spare=1).put("b", "d", pinned=False).serve("b", "b")
    assert leaving(value) == ["b"]
    assert leaving(slots("a", "b", capacity=2, spare=1)) == []


@pytest.mark.parametrize(
    ("prepare", "refusal"),
    [
        (lambda value: value, "pinned"),
        (lambda value: value.serve("a", "b"), "busy"),
        (lambda value: value.serve("a", "b").begin("a"), "busy"),
        (lambda value: value.begin("a").begin("b"), "pinned"),
        (lambda value: value.remove("a"), None),
    ],
)
def test_a_refusal_says_whether_waiting_helps(prepare: Callable[[Slots], Slots], refusal: str | None) -> None:
    value = prepare(slots("a", "b", capacity=2))
    assert value.refusal("new") == refusal
    if refusal:
        with pytest.raises(ValueError, match="slots are taken"):
            value.put("new", "d")


def test_what_is_not_pinned_and_busy_may_leave_later() -> None:
    value = slots("a", "b", capacity=2, pinned=False)
    assert value.refusal("new") == "busy"


def test_other_bytes_under_a_name_take_no_slot_and_keep_its_requests() -> None:
    value = slots("a", "b", capacity=2).begin("a").put("a", "other")
    found = value.find("a")
    assert found is not None
    assert (found.digest, found.in_flight, found.policies) == ("other", 1, frozenset({"a"}))
    assert value.digests == {"other", "digest of b"}


def test_a_request_whose_slot_was_taken_out_ends_without_harm() -> None:
    assert slots("a").begin("a").remove("a").end("a").held == ()


def test_without_the_superseded_ones_there_is_room() -> None:
    value = slots("a", "b", capacity=2).begin("a").serve("a", "b")
    assert value.refusal("new") == "busy"
    assert value.without_superseded(but="new").refusal("new") is None
    assert names(value.without_superseded(but="a")) == ["b", "a"]


NAMES = st.sampled_from("abcde")
STEPS = st.lists(st.tuples(st.sampled_from(["put", "serve", "begin", "end", "leave"]), NAMES, NAMES), max_size=40)


@given(STEPS, st.integers(1, 4), st.integers(0, 1), st.booleans())
def test_in_any_order_nothing_in_flight_and_nothing_that_must_stay_leaves(
    steps: list[tuple[str, str, str]], capacity: int, spare: int, pinned: bool
) -> None:
    value = Slots(capacity=capacity, spare=spare)
    running: dict[str, int] = {}
    for step, name, policy in steps:
        before = value
        match step:
            case "put" if value.refusal(name) is None:
                value = value.put(name, name, pinned=pinned)
            case "serve" if value.find(name):
                value = value.serve(policy, name)
            case "begin" if value.find(name):
                value = value.begin(name)
                running[name] = running.get(name, 0) + 1
            case "end" if running.get(name):
                value = value.end(name)
                running[name] -= 1
            case "leave":
                for slot in value.leaving:
                    assert not running.get(slot.name)
                    assert not (slot.policies and slot.pinned)
                    value = value.remove(slot.name)
                # What stays is in use, or told to, or there is room without its leaving.
                assert len(value.held) <= capacity - spare or not any(
                    slot.idle and not (slot.pinned and slot.policies) for slot in value.held
                )
        assert len(value.held) <= capacity
        assert {slot.name: slot.in_flight for slot in value.held} == {
            slot.name: running.get(slot.name, 0) for slot in value.held
        }
        served = [policy for slot in value.held for policy in slot.policies]
        assert len(served) == len(set(served)), "a policy is served from one slot"
        assert before.capacity == value.capacity == capacity


@given(st.lists(NAMES, min_size=1, max_size=30))
def test_the_order_is_that_of_the_last_use(uses: list[str]) -> None:
    value = slots(*"abcde", capacity=5)
    for name in uses:
        value = value.begin(name).end(name)
    last = sorted(set(uses), key=lambda name: len(uses) - 1 - uses[::-1].index(name))
    assert names(value) == [name for name in "abcde" if name not in uses] + last
    assert msgspec.structs.replace(value, held=()).held == ()
