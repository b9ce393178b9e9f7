"""Groups from claim to finish. Each transition is one atomic call, so a crash between two leaves a state that heals.

claim -> deliver -> ... -> finish. A claim whose lease ends is claimed again, under another attempt. A
group enters the stream in the same call that closes its lease, so it enters once (law 6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import redis
import redis.asyncio

from lorabridge.bridge import codec
from lorabridge.bridge.errors import CodecError
from lorabridge.bridge.stream.kept import SERVER, Kept
from lorabridge.bridge.stream.keys import BODY, TRAINER_GROUP, Keys, Reply
from lorabridge.bridge.trajectory import Group

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

# KEYS: groups, leases, holders, attempts, failures, trajectories.
# ARGV: ahead, lease ms, worker, trainer's group, floor.
# An expired lease goes first; else a new number, not below the floor, if fewer than ahead groups are open: leased, or
# on the stream and not finished. That is counted anew each time: a server that comes back older knows what it has, and
# not what was done with it meanwhile. Nor how often a group was tried: after each start of the server attempts are
# counted from its clock, so that no (number, attempt) comes twice. {number, attempt, now, failures} or false.
_CLAIM = (
    _NOW
    + SERVER
    + """
local function named(flat)
  local fields = {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end
local function unfinished()
  if redis.call('EXISTS', KEYS[6]) == 0 then return 0 end
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', KEYS[6])) do
    local group = named(flat)
    if group['name'] == ARGV[4] then
      local lag = tonumber(group['lag'] or nil)
      if not lag then
        lag = #redis.call('XRANGE', KEYS[6], '(' .. group['last-delivered-id'], '+', 'COUNT', ARGV[1])
      end
      return group['pending'] + lag
    end
  end
  return redis.call('XLEN', KEYS[6])
end
local started = math.max(tonumber(redis.call('HGET', KEYS[1], 'started') or '0'), tonumber(ARGV[5]))
local number = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1)[1]
if not number then
  if redis.call('ZCARD', KEYS[2]) + unfinished() >= tonumber(ARGV[1]) then return false end
  number = string.format('%d', started)
  redis.call('HSET', KEYS[1], 'started', string.format('%d', started + 1))
end
local is = server()
if redis.call('HGET', KEYS[1], 'server') ~= is then
  redis.call('HSET', KEYS[1], 'server', is, 'attempts', started > 0 and string.format('%d', now) or '0')
end
local tried = tonumber(redis.call('HGET', KEYS[4], number) or '0')
local attempt = math.max(tried, tonumber(redis.call('HGET', KEYS[1], 'attempts'))) + 1
redis.call('HSET', KEYS[4], number, string.format('%d', attempt))
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), number)
redis.call('HSET', KEYS[3], number, string.format('%d:%s', attempt, ARGV[3]))
return {tonumber(number), attempt, now, tonumber(redis.call('HGET', KEYS[5], number) or '0')}
"""
)

# KEYS: leases, holders, attempts, failures, trajectories. ARGV: number, holder, body.
# The entry's id, or false if the lease is lost. The entry comes first: if it is refused, the lease still stands.
_DELIVER = """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return false end
local entry = redis.call('XADD', KEYS[5], '*', 'body', ARGV[3])
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
return entry
"""

# KEYS: leases, holders. ARGV: lease ms, then number and holder of each. Those whose lease still stands get it anew.
_RENEW = (
    _NOW
    + """
for i = 2, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1] then redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
end
"""
)

# KEYS: leases, holders, failures. ARGV: number, holder, 1 if the attempt failed. Ends a lease now, so that the group is
# claimed again at once.
_RELEASE = (
    _NOW
    + """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
if ARGV[3] == '1' then redis.call('HINCRBY', KEYS[3], ARGV[1], 1) end
return 1
"""
)

# KEYS: leases, holders, attempts, failures. ARGV: number, holder. Gives a group up for good.
_ABANDON = """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
return 1
"""

# KEYS: groups. ARGV: floor. No number below it is begun from now on.
_RAISE = """
if tonumber(redis.call('HGET', KEYS[1], 'started') or '0') >= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'started', ARGV[1])
return 1
"""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's right to deliver group ``number``, until its lease ends or another claims it.

    ``failures`` is how many of the attempts before failed of the group's own doing.
    """

    number: int
    attempt: int
    worker: str
    at_ms: int
    failures: int = 0

    @property
    def holder(self) -> str:
        return f"{self.attempt}:{self.worker}"


class GroupQueue:
    """A worker's side: claim to deliver, release or abandon. ``ahead`` groups may be started and not yet finished.

    It claims no number below one that it has claimed before: a server that lost its memory would hand it out again.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, worker: str, ahead: int, lease_s: float) -> None:
        self._keys, self._worker = keys, worker
        self.ahead, self._lease_ms = ahead, round(lease_s * 1000)
        self._floor = 0
        self._claim = client.register_script(_CLAIM)
        self._deliver = client.register_script(_DELIVER)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)
        self._abandon = client.register_script(_ABANDON)

    async def claim(self) -> Claim | None:
        """The next group to sample, or None while enough groups are under way."""
        k = self._keys
        reply = await self._claim(
            [k.groups, k.leases, k.holders, k.attempts, k.failures, k.trajectories],
            [self.ahead, self._lease_ms, self._worker, TRAINER_GROUP, self._floor],
        )
        if reply is None:
            return None
        number, attempt, now, failures = reply
        self._floor = max(self._floor, number + 1)
        return Claim(number=number, attempt=attempt, worker=self._worker, at_ms=now, failures=failures)

    async def deliver(self, claim: Claim, group: Group) -> bool:
        """Put the whole group on the stream and close its lease; False if the lease was lost, and nothing entered."""
        k = self._keys
        keys = [k.leases, k.holders, k.attempts, k.failures, k.trajectories]
        return await self._deliver(keys, [claim.number, claim.holder, codec.encode(group)]) is not None

    async def renew(self, claims: Iterable[Claim]) -> None:
        """Hold these for another ``lease_s``; a lease that was lost stays lost."""
        named = [part for claim in claims for part in (claim.number, claim.holder)]
        if named:
            await self._renew([self._keys.leases, self._keys.holders], [self._lease_ms, *named])

    async def release(self, claim: Claim, *, failed: bool = False) -> None:
        """Give the group back: another claim takes it at once, under the next attempt.

        ``failed`` counts this one against the group: it was not the worker, or a generator, that went away.
        """
        k = self._keys
        await self._release([k.leases, k.holders, k.failures], [claim.number, claim.holder, int(failed)])

    async def abandon(self, claim: Claim) -> None:
        """Give the group up: it is not tried again, and another may be begun."""
        k = self._keys
        await self._abandon([k.leases, k.holders, k.attempts, k.failures], [claim.number, claim.holder])


class GroupReader:
    """The trainer's side: read groups in order, finish them after the step that used them (law 5).

    Args:
        client: of Redis. One thread may read while another finishes.
        keys: of the run.
        consumer: who reads; a trainer that comes back under the same name is given what it had not finished.
        on_unreadable: told of an entry (its id, and why) that is no group of a known schema; it is acknowledged.
        on_forgotten: told when the server does not know us any more: it has lost its memory.
        kept: is given what is handed out, so that the ledger gets it even if the server forgets it.
    """

    def __init__(
        self, client: redis.Redis, keys: Keys, consumer: str, on_unreadable: Callable[[str, CodecError], None],
        on_forgotten: Callable[[], None] = lambda: None, kept: Kept | None = None,
    ) -> None:  # fmt: skip
        self._client, self._keys, self._consumer = client, keys, consumer
        self._on_unreadable, self._on_forgotten = on_unreadable, on_forgotten
        self._kept = kept
        self._given: set[str] = set()  # handed out by read and not finished
        self._backlog = "0"  # what was delivered to us and not finished, from before we started
        self._again = False
        # Held while the backlog is read, and while entries are finished: an answer that still lists an entry must not
        # be looked at after that entry was finished, or it would be handed out again.
        self._lock = threading.Lock()
        ensure_group(client, keys.trajectories, TRAINER_GROUP)

    def read(self, block_ms: int) -> tuple[str, Group] | None:
        """(entry id, group), or None if none came within ``block_ms`` milliseconds.

        A trainer that comes back is first given again what it had not finished. An entry that the server handed out
        in an answer that was lost on the way (a connection cut at that moment) comes when nothing newer does.
        """
        while True:
            if self._again:
                self._again, self._backlog = False, "0"
            if self._backlog == ">":
                found = self._next(block_ms)
            else:
                with self._lock:
                    found = self._next(block_ms)
            if found is None:
                if self._backlog != ">":
                    self._backlog = ">"
                elif self._pending() > len(self._given):
                    self._backlog = "0"
                else:
                    return None
                continue
            entry, fields = found
            if fields is None:
                continue
            try:
                group = decode_group(fields)
                if self._kept is not None:
                    self._kept.add(self._keys.trajectories, entry, fields[BODY])
                return entry, group
            except CodecError as error:
                self.finish([entry])
                self._on_unreadable(entry, error)

    def look_again(self) -> None:
        """The server has come back older: it may count as given to us what we have finished. Any thread may say so."""
        self._again = True

    def _next(self, block_ms: int) -> tuple[str, dict[bytes, bytes] | None] | None:
        """The next entry, now counted as given; without fields if there is nothing to do with it. None: no more."""
        stream, backlog = self._keys.trajectories, self._backlog
        try:
            reply = cast(
                Reply,
                self._client.xreadgroup(TRAINER_GROUP, self._consumer, {stream: backlog}, count=1, block=block_ms),
            )
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            ensure_group(self._client, stream, TRAINER_GROUP)
            self._on_forgotten()
            return None
        entries = reply[0][1] if reply else []
        if not entries:
            return None
        entry, fields = entries[0][0].decode(), entries[0][1]
        if self._backlog != ">":
            self._backlog = entry
        if not fields:  # removed from the stream while it was pending: nobody can use it any more
            self._acknowledge([entry])
            return entry, None
        if entry in self._given:
            return entry, None
        self._given.add(entry)
        return entry, fields

    def finish(self, entries: Sequence[str]) -> int:
        """Acknowledge entries; how many were not so before. Idempotent."""
        with self._lock:
            return self._acknowledge(entries) if entries else 0

    def _acknowledge(self, entries: Sequence[str]) -> int:
        acknowledged = int(self._client.xack(self._keys.trajectories, TRAINER_GROUP, *entries))
        self._given.difference_update(entries)
        return acknowledged

    def _pending(self) -> int:
        """How many entries the server counts as given to us and not finished."""
        pending = cast(
            list[dict[str, Any]],
            self._client.xpending_range(
                self._keys.trajectories, TRAINER_GROUP, "-", "+", len(self._given) + 1, self._consumer
            ),
        )
        return len(pending)


def raise_floor(client: redis.Redis, keys: Keys, floor: int) -> bool:
    """Begin no group below number ``floor`` from now on; whether the server would have.

    It would if it came back older than who knows of these groups: their trajectories' ids would be used again.
    """
    return bool(client.eval(_RAISE, 1, keys.groups, str(floor)))


def unfinished(client: redis.Redis, keys: Keys) -> int:
    """Groups on the stream that the trainer has not finished."""
    if not client.exists(keys.trajectories):
        return 0
    for group in client.xinfo_groups(keys.trajectories):
        if group["name"] == TRAINER_GROUP.encode():
            return int(group["pending"]) + int(group.get("lag") or 0)
    return int(client.xlen(keys.trajectories))


def ensure_group(client: redis.Redis, stream: str, group: str) -> None:
    """Create a consumer group from the stream's beginning, if it is not there."""
    try:
        client.xgroup_create(stream, group, id="0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise


def decode_group(fields: dict[bytes, bytes]) -> Group:
    """The group in an entry of the stream ``trajectories``. Raises ``CodecError`` if there is none."""
    if BODY not in fields:
        raise CodecError("an entry without the field 'body'", action="Look at who wrote it")
    return codec.decode(Group, fields[BODY])
