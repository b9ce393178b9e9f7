"""One archiver at a time: a lease in Redis with a fencing number, and the calls that only its holder may make.

Every such call begins by renewing the lease in the same script, so "am I still the one?" and the act are one action. A
lease that ran out while nobody else took it is simply taken up again, also after Redis lost its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import redis

from lorabridge.bridge.errors import LedgerTaken
from lorabridge.bridge.stream.keys import LEDGER_GROUP, Keys
from lorabridge.bridge.stream.lease import HOLD, RELEASE, RENEW, TAKE
from lorabridge.bridge.stream.trim import EntryId, GroupPosition

# KEYS: lease, fence, stream. ARGV: number, ttl ms, ledger group, cursor.
# Moves the ledger's group and tells how the stream stands: {entries ever added, length, highest id deleted by hand,
# {{group, last delivered, oldest pending or ''}, ...}}. pcall: the group is normally there already.
_ACKNOWLEDGE = (
    HOLD
    + """
redis.pcall('XGROUP', 'CREATE', KEYS[3], ARGV[3], '0', 'MKSTREAM')
redis.call('XGROUP', 'SETID', KEYS[3], ARGV[3], ARGV[4])
local function named(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end
local stream = named(redis.call('XINFO', 'STREAM', KEYS[3]))
local groups = {}
for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[3])) do
  local group = named(flat)
  local pending = redis.call('XPENDING', KEYS[3], group['name'])
  groups[#groups + 1] = {group['name'], group['last-delivered-id'], pending[2] or ''}
end
return {stream['entries-added'], stream['length'], stream['max-deleted-entry-id'], groups}
"""
)

# KEYS: lease, fence, stream. ARGV: number, ttl ms, floor. How many entries went.
_TRIM = HOLD + "return redis.call('XTRIM', KEYS[3], 'MINID', '=', ARGV[3])"


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream stands.

    Attributes:
        added: entries that were ever added.
        length: entries that it holds.
        deleted: highest id that was deleted one by one (trimming does not count).
        groups: its consumer groups.
    """

    added: int
    length: int
    deleted: EntryId
    groups: tuple[GroupPosition, ...]

    def lost(self, cursor: EntryId, archived: int) -> int:
        """At least so many entries left the stream unread by a ledger that has ``archived``, up to ``cursor``."""
        removed = self.added - self.length
        return max(0, removed - archived, 1 if self.deleted > cursor else 0)


class Lease:
    """The right to write one ledger. Times in seconds."""

    def __init__(self, client: redis.Redis, keys: Keys, ttl_s: float) -> None:
        self._client, self._keys = client, keys
        self._ttl_ms = round(ttl_s * 1000)
        self._pair = [keys.archiver, keys.archiver_fence]
        self._take, self._renew = client.register_script(TAKE), client.register_script(RENEW)
        self._release, self._trim = client.register_script(RELEASE), client.register_script(_TRIM)
        self._acknowledge = client.register_script(_ACKNOWLEDGE)
        self.number = 0  # the fencing number, 0 before the lease was taken

    def take(self, floor: int, stop: Callable[[], bool]) -> bool:
        """Take the lease with a number above ``floor``; False if ``stop`` came first.

        A lease that is held is waited for while it runs out: its holder may have died. One that is renewed has a
        holder that lives.

        Raises:
            LedgerTaken: another archiver writes this ledger.
        """
        left: int | None = None
        while not stop():
            number = self._take(self._pair, [floor, self._ttl_ms])
            if number is not None:
                self.number = int(number)
                return True
            now_left = self._client.pttl(self._keys.archiver)
            if now_left == -1 or (left is not None and now_left > left):
                holder = cast(bytes | None, self._client.get(self._keys.archiver)) or b"?"
                raise _taken(f"archiver {holder.decode()} of run {self._keys.run_id} writes it and is alive")
            left = now_left
            time.sleep(min(0.2, self._ttl_ms / 4000))
        return False

    def renew(self) -> None:
        """Hold it for another ``ttl_s``. Raises ``LedgerTaken``."""
        self._held(self._renew(self._pair, self._ours))

    def release(self) -> None:
        """Let the next archiver start at once."""
        self._release(self._pair, [self.number])

    def acknowledge(self, stream: str, cursor: EntryId) -> Survey:
        """Say that the ledger has everything up to ``cursor``; how the stream stands. Raises ``LedgerTaken``."""
        reply = self._held(self._acknowledge([*self._pair, stream], [*self._ours, LEDGER_GROUP, str(cursor)]))
        added, length, deleted, groups = reply
        return Survey(
            added=added,
            length=length,
            deleted=EntryId.parse(deleted.decode()),
            groups=tuple(_position(*group) for group in groups),
        )

    def trim(self, stream: str, floor: EntryId) -> int:
        """Drop every entry before ``floor``; how many went. Raises ``LedgerTaken``."""
        return int(self._held(self._trim([*self._pair, stream], [*self._ours, str(floor)])))

    @property
    def _ours(self) -> list[int]:
        return [self.number, self._ttl_ms]

    def _held(self, reply: Any) -> Any:
        if reply is None:
            raise _taken(f"another archiver has taken over from number {self.number}")
        return reply


def _position(name: bytes, delivered: bytes, pending: bytes) -> GroupPosition:
    return GroupPosition(
        name=name.decode(),
        delivered=EntryId.parse(delivered.decode()),
        pending=EntryId.parse(pending.decode()) if pending else None,
    )


def _taken(problem: str) -> LedgerTaken:
    return LedgerTaken(problem, action="One archiver per run is enough: stop this one, or the other")
