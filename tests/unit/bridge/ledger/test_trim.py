from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorabridge.bridge.errors import CodecError
from lorabridge.bridge.stream.trim import ZERO, EntryId, GroupPosition, trim_floor

unhurried = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ids = st.builds(EntryId, st.integers(0, 3), st.integers(0, 3) | st.just(2**64 - 1))


@unhurried
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_an_id_is_what_redis_writes(ms: int, seq: int) -> None:
    assert EntryId.parse(f"{ms}-{seq}") == EntryId(ms, seq)
    assert str(EntryId(ms, seq)) == f"{ms}-{seq}"


@pytest.mark.parametrize("text", ["", "-", "1", "1-", "-1", "1-2-3", "a-1", "1-²", "1.0-1", "+1-1"])
def test_anything_else_is_not_an_id(text: str) -> None:
    with pytest.raises(CodecError):
        EntryId.parse(text)


@unhurried
@given(ids, ids)
def test_next_is_the_smallest_id_after(one: EntryId, other: EntryId) -> None:
    assert one < one.next
    assert (other > one) == (other >= one.next)


def test_numbers_order_ids_and_not_letters() -> None:
    assert EntryId.parse("9-0") < EntryId.parse("10-0")
    assert EntryId.parse("1-9") < EntryId.parse("1-10")


class Consumer:
    """A consumer group over entries 1 to 4, as Redis keeps it: what it was given and what of that it finished."""

    def __init__(self, name: str, given: int, finished: frozenset[int]) -> None:
        self.name, self.given, self.finished = name, given, finished

    @property
    def needs(self) -> set[int]:
        return set(range(1, 5)) - self.finished

    @property
    def position(self) -> GroupPosition:
        open_ = [entry for entry in range(1, self.given + 1) if entry not in self.finished]
        pending = EntryId(open_[0], 0) if open_ else None
        return GroupPosition(name=self.name, delivered=EntryId(self.given, 0), pending=pending)


def _every_state(name: str) -> list[Consumer]:
    return [
        Consumer(name, given, frozenset(done))
        for given in range(5)
        for size in range(given + 1)
        for done in itertools.combinations(range(1, given + 1), size)
    ]


def test_nothing_that_any_group_needs_is_below_the_floor_and_nothing_else_stays_before_the_oldest_of_it() -> None:
    """Every pair of states of two groups: the floor is exact, not only safe."""
    for one, other in itertools.product(_every_state("ledger"), _every_state("trainer")):
        floor = trim_floor([one.position, other.position], ["ledger", "trainer"])
        needed = one.needs | other.needs
        kept = {entry for entry in range(1, 5) if EntryId(entry, 0) >= floor}
        assert needed <= kept
        assert kept == {entry for entry in range(1, 5) if entry >= min(needed, default=5)}


@unhurried
@given(st.lists(st.builds(GroupPosition, name=st.sampled_from("abc"), delivered=ids, pending=st.none() | ids)))
def test_the_floor_is_never_past_any_group(groups: list[GroupPosition]) -> None:
    floor = trim_floor(groups, [])
    for group in groups:
        assert floor <= group.delivered.next
        assert group.pending is None or floor <= group.pending


def test_nothing_goes_while_a_group_that_will_read_is_not_there() -> None:
    ledger = GroupPosition(name="ledger", delivered=EntryId(9, 0), pending=None)
    assert trim_floor([ledger], ["ledger", "trainer"]) == ZERO
    assert trim_floor([ledger], ["ledger"]) == EntryId(9, 1)
    assert trim_floor([], []) == ZERO


def test_a_group_that_is_not_asked_for_counts_too() -> None:
    ledger = GroupPosition(name="ledger", delivered=EntryId(9, 0), pending=None)
    guest = GroupPosition(name="guest", delivered=EntryId(3, 0), pending=EntryId(2, 0))
    assert trim_floor([ledger, guest], ["ledger"]) == EntryId(2, 0)
