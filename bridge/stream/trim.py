"""How far a stream may be trimmed: never past what any of its consumer groups has yet to finish (law 5). Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from lorabridge.bridge.errors import CodecError

_LARGEST_SEQ = 2**64 - 1


class EntryId(msgspec.Struct, frozen=True, order=True):
    """Id of a stream entry, in the stream's order: milliseconds since 1970, then a counter within them."""

    ms: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> EntryId:
        """The id that Redis writes ``<ms>-<seq>``. Raises ``CodecError``."""
        ms, _, seq = text.partition("-")
        if not (text.isascii() and ms.isdigit() and seq.isdigit()):
            raise CodecError(f"{text[:80]!r} is not the id of a stream entry", action="Look at who wrote it")
        return cls(int(ms), int(seq))

    def __str__(self) -> str:
        return f"{self.ms}-{self.seq}"

    @property
    def next(self) -> EntryId:
        """The smallest id after this one."""
        return EntryId(self.ms, self.seq + 1) if self.seq < _LARGEST_SEQ else EntryId(self.ms + 1, 0)


ZERO = EntryId(0, 0)  # before every entry


class GroupPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a consumer group stands.

    Attributes:
        name: the group's.
        delivered: last id that it was given.
        pending: oldest id that it was given and has not finished, None if there is none.
    """

    name: str
    delivered: EntryId
    pending: EntryId | None

    @property
    def unfinished(self) -> EntryId:
        """No entry before this id is of use to the group any more."""
        return self.delivered.next if self.pending is None else min(self.pending, self.delivered.next)


def trim_floor(groups: Sequence[GroupPosition], required: Collection[str]) -> EntryId:
    """Smallest id that must stay: the least of every group's oldest unfinished id.

    Args:
        groups: every consumer group of the stream.
        required: names of groups that will read the stream from its beginning, whether they exist yet or not. While
            one of them is missing nothing may go.
    """
    if not set(required) <= {group.name for group in groups}:
        return ZERO
    return min((group.unfinished for group in groups), default=ZERO)
