"""One holder at a time: a lease in Redis with a fencing number, for whoever may act alone.

A lease that ran out while nobody else took it is simply taken up again, also after Redis lost its memory. The number
never falls, so whoever the holder acts on can refuse a holder that was replaced while it slept.
"""

from __future__ import annotations

import redis.asyncio

# KEYS: lease, fence. ARGV: floor, ttl ms. A number above every earlier one and above floor, or false if it is held.
TAKE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return false end
local number = math.max(redis.call('INCR', KEYS[2]), tonumber(ARGV[1]) + 1)
redis.call('SET', KEYS[2], number)
redis.call('SET', KEYS[1], number, 'PX', ARGV[2])
return number
"""

# KEYS: lease, fence, ... ARGV: number, ttl ms, ... False if another has, or had, a later number. An earlier one is a
# holder from before ours, whom a server that came back older still remembers.
HOLD = """
local ours, holder = tonumber(ARGV[1]), tonumber(redis.call('GET', KEYS[1]) or '0')
if holder ~= ours then
  if math.max(holder, tonumber(redis.call('GET', KEYS[2]) or '0')) > ours then return false end
  redis.call('SET', KEYS[2], ARGV[1])
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
"""

RENEW = HOLD + "return 1"

# KEYS: lease, fence. ARGV: number.
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Lease:
    """The right to act alone, for asyncio.

    Args:
        client: of Redis.
        key, fence: of the lease, and of the counter of its numbers; ``<key>:holder`` says who has, or had it.
        holder: who asks.
        ttl_s: how long it lasts if it is not renewed.

    Attributes:
        number: the fencing number while it is held, else 0.
    """

    def __init__(self, client: redis.asyncio.Redis, key: str, fence: str, holder: str, ttl_s: float) -> None:
        self._client, self._holder_key, self._holder = client, holder_key(key), holder
        self._pair, self._ttl_ms = [key, fence], round(ttl_s * 1000)
        self._take, self._renew = client.register_script(TAKE), client.register_script(RENEW)
        self._release = client.register_script(RELEASE)
        self.number = 0

    async def hold(self, floor: int) -> bool:
        """Renew it, or take it with a number above ``floor`` if nobody has it; whether it is ours."""
        if self.number and await self._renew(self._pair, [self.number, self._ttl_ms]):
            return True
        self.number = int(await self._take(self._pair, [floor, self._ttl_ms]) or 0)
        if self.number:
            await self._client.set(self._holder_key, self._holder)
        return self.number > 0

    async def release(self) -> None:
        """Let another take it at once."""
        if self.number:
            await self._release(self._pair, [self.number])
            self.number = 0


def holder_key(key: str) -> str:
    """Where the name of a lease's holder stands."""
    return f"{key}:holder"
