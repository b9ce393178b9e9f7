"""What generators serve and what waits to be trained on or archived, as the streams of a run tell it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import redis

from lorabridge.bridge import codec
from lorabridge.bridge.errors import CodecError
from lorabridge.bridge.events import Event, Resident
from lorabridge.bridge.residency import Residency
from lorabridge.bridge.stream.keys import BODY, Keys, Reply
from lorabridge.bridge.trajectory import Group

_AT_ONCE = 1000
_GROUPS_AT_ONCE = 50
_Entry = tuple[bytes, dict[bytes, bytes]]


class Residents:
    """The last residency of every generator: of those in ``known`` and of those that are on the stream ``events``.

    A generator that has gone for good is taken for live, as nothing says that it will not come back.

    Args:
        client: of the run's Redis.
        known: older residencies, in order: the stream holds the last minute only, the ledger all.
    """

    def __init__(self, client: redis.Redis, keys: Keys, known: Iterable[Residency] = ()) -> None:
        self._client, self._key = client, keys.events
        self._after = "0"
        self._last = {residency.generator: residency for residency in known}

    def digests(self) -> set[str]:
        """What they serve. Reads what came onto the stream since the last call."""
        while entries := self._read():
            self._after = entries[-1][0].decode()
            for _, fields in entries:
                try:
                    happening = codec.decode(Event, fields.get(BODY, b"")).happening
                except CodecError:
                    continue  # whoever serves adapters did not write it
                if isinstance(happening, Resident):
                    self._last[happening.residency.generator] = happening.residency
        return digests_of(self._last.values())

    def _read(self) -> list[_Entry]:
        return _entries_after(self._client, self._key, self._after, _AT_ONCE)


class Waiting:
    """What the tokens on the stream ``trajectories`` were sampled by.

    The archiver trims what everybody is done with; a digest that was seen stays until this object goes.
    """

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._key = client, keys.trajectories
        self._after = "0"
        self._digests: set[str] = set()

    def digests(self) -> set[str]:
        """The digests that their spans name. Reads what came onto the stream since the last call."""
        while entries := _entries_after(self._client, self._key, self._after, _GROUPS_AT_ONCE):
            self._after = entries[-1][0].decode()
            for _, fields in entries:
                try:
                    group = codec.decode(Group, fields.get(BODY, b""))
                except CodecError:
                    continue  # nobody can train on it or archive it
                turns = (turn for trajectory in group.trajectories for turn in trajectory.turns)
                self._digests |= {span.digest for turn in turns for span in turn.spans}
        return set(self._digests)


def digests_of(residencies: Iterable[Residency]) -> set[str]:
    return {digest for residency in residencies for digest in residency.digests}


def _entries_after(client: redis.Redis, key: str, after: str, count: int) -> list[_Entry]:
    reply = cast(Reply, client.xread(cast(Any, {key: after}), count=count))
    return reply[0][1] if reply else []
