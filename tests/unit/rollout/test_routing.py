"""Which generator gets a group, what becomes of one that failed, and when a worker gives up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.errors import (
    GeneratorUnreachable,
    NotServed,
    PluginMissing,
    Quarantined,
    RequestRefused,
    SwapFailed,
    TokenRefused,
)
from lorabridge.bridge.trajectory import Unestablished
from lorabridge.rollout.routing import ATTEMPTS, Load, Standing, fate, hopeless, pause_s, route

loads = st.lists(
    st.builds(Load, serves=st.integers(0, 4), groups=st.integers(0, 5), room=st.integers(1, 5)), max_size=5
)
GONE = GeneratorUnreachable("gone", action="wait")
REFUSED = TokenRefused("no", action="use the right one")
NOT_SWAPPED = SwapFailed("no", action="look")


@given(loads)
def test_new_work_goes_only_where_something_is_served_and_there_is_room(fleet: list[Load]) -> None:
    place = route(fleet)
    usable = [load for load in fleet if load.serves and load.groups < load.room]
    if place is None:
        assert not usable
    else:
        assert fleet[place] in usable


@given(loads)
def test_nobody_with_as_new_a_version_has_less_to_do(fleet: list[Load]) -> None:
    place = route(fleet)
    if place is not None:
        chosen = fleet[place]
        for load in fleet:
            if load.serves >= chosen.serves and load.groups < load.room:
                assert load.groups >= chosen.groups


def test_a_version_behind_weighs_as_a_group() -> None:
    behind, ahead = Load(serves=3, groups=0, room=8), Load(serves=5, groups=1, room=8)
    assert route([behind, ahead]) == 1
    assert route([behind, Load(serves=5, groups=3, room=8)]) == 0


def test_pauses_grow_and_end_somewhere() -> None:
    pauses = [pause_s(failures) for failures in range(1, 200)]
    assert all(a <= b for a, b in pairwise(pauses))
    assert pauses[0] < 1 < pauses[-1] < 60


@pytest.mark.parametrize("error", [GONE, NotServed("no", action=""), Quarantined("no", action="")])
@pytest.mark.parametrize("failures", [0, ATTEMPTS * 2])
def test_a_group_is_never_given_up_for_what_its_generator_did(error: Exception, failures: int) -> None:
    assert fate(error, failures) == "return"


def test_what_is_the_groups_own_doing_is_tried_again_a_few_times() -> None:
    fates = [fate(Unestablished("no spans"), failures) for failures in range(ATTEMPTS)]
    assert fates == ["retry"] * (ATTEMPTS - 1) + ["abandon"]


def test_a_request_that_is_refused_is_not_tried_again() -> None:
    assert fate(RequestRefused("too long", action=""), 0) == "abandon"


def out(error: Exception | None, failures: int = 1) -> Standing:
    return Standing(out=error, failures=failures)


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        ([out(REFUSED)], REFUSED),
        ([out(PluginMissing("no", action=""))], True),
        ([out(REFUSED), out(None)], None),
        ([out(REFUSED), out(GONE)], None),
        ([out(NOT_SWAPPED, 1)], None),
        ([out(NOT_SWAPPED, ATTEMPTS)], NOT_SWAPPED),
        ([], None),
    ],
)
def test_it_is_hopeless_when_every_generator_is_out_and_none_will_come_in(
    fleet: list[Standing], reason: object
) -> None:
    found = hopeless(fleet, served_before=False, waited_s=1, start_s=60)
    assert found is reason or (reason is True and found is fleet[0].out)
    assert hopeless(fleet, served_before=True, waited_s=1e9, start_s=60) is None


def test_a_server_has_its_time_to_come_up() -> None:
    assert hopeless([out(GONE, 99)], served_before=False, waited_s=59, start_s=60) is None
    assert hopeless([out(GONE, 99)], served_before=False, waited_s=61, start_s=60) is GONE
