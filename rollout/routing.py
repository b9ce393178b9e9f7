"""Which generator gets the next group, how long to leave one alone that failed, and when to give up. All pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from lorabridge.bridge.errors import GeneratorUnreachable, NotServed, Quarantined, RequestRefused, SwapFailed

ATTEMPTS = 5
"""Failures of its own doing after which a group is given up, and swaps after which a first version is."""

IN_A_ROW = 16
"""Groups given up one after another, with none delivered, after which a worker ends."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0

Fate = Literal["return", "retry", "abandon"]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A generator as routing sees it.

    Attributes:
        serves: version that it serves, 0 if new work must not go there.
        groups: this worker's groups in flight on it.
        room: how many it may have.
    """

    serves: int
    groups: int
    room: int


def route(loads: Sequence[Load]) -> int | None:
    """The place of the generator for the next group: the least loaded, a version behind weighing as a group more.

    None if none serves anything and has room.
    """
    head = max((load.serves for load in loads), default=0)
    open_ones = [place for place, load in enumerate(loads) if load.serves and load.groups < load.room]
    return min(open_ones, key=lambda place: loads[place].groups + head - loads[place].serves, default=None)


def pause_s(failures: int) -> float:
    """Seconds to leave a generator alone after so many failures in a row: doubling, up to a limit."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(max(failures - 1, 0), 10))


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Why a generator is out, None if it is not, and how often in a row it has failed."""

    out: Exception | None
    failures: int


def hopeless(fleet: Sequence[Standing], served_before: bool, waited_s: float, start_s: float) -> Exception | None:
    """Why a worker should end: nothing was ever served, every generator is out, and none will come in by itself.

    Args:
        fleet: every generator.
        served_before: whether any of them has served since this worker began; then it is waited for.
        waited_s: how long this worker has been there.
        start_s: how long a server may take to come up.
    """
    if served_before or not fleet:
        return None
    for standing in fleet:
        if standing.out is None:
            return None
        if isinstance(standing.out, GeneratorUnreachable) and waited_s < start_s:
            return None
        if isinstance(standing.out, SwapFailed | Quarantined) and standing.failures < ATTEMPTS:
            return None
    return fleet[0].out


def is_of_the_generator(error: BaseException) -> bool:
    """Whether a group failed because its generator is not what it was: the generator is looked at again."""
    return isinstance(error, GeneratorUnreachable | NotServed | Quarantined)


def fate(error: BaseException, failures: int) -> Fate:
    """What becomes of a group whose attempt failed.

    Args:
        error: what it failed with.
        failures: earlier attempts that failed of the group's own doing.

    Returns:
        ``return``: it goes back as if this attempt had not been; ``retry``: it goes back, and the attempt counts;
        ``abandon``: it is given up.
    """
    if is_of_the_generator(error):
        return "return"
    if isinstance(error, RequestRefused) or failures + 1 >= ATTEMPTS:
        return "abandon"
    return "retry"
