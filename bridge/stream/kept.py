"""What a process keeps of a stream until the ledger has it, so that a server that comes back older can be told again.

A server that was restored from an earlier copy of its data has forgotten entries. Those that the ledger did not have by
then are nowhere but with who wrote them, or read them: they keep them for so long, and put them there again, with the
ids that they had: an archiver that had read one all the same knows it by that.

That a server has started anew is seen by the id that it gives itself (``INFO server``, ``run_id``).
"""

from __future__ import annotations

import threading
from typing import Any, cast

import redis
import redis.asyncio
from redis.typing import EncodableT, FieldT

from lorabridge.bridge.stream.keys import BODY, LEDGER_GROUP, WAS, Keys
from lorabridge.bridge.stream.trim import EntryId

_MOST_BYTES = 256 * 1024**2

Fields = dict[FieldT, EncodableT]
Name = tuple[str, str]  # of an entry: its stream's key, its id

SERVER = """
local function server()
  local told = redis.pcall('INFO', 'server')
  return type(told) == 'string' and string.match(told, 'run_id:(%w+)') or ''
end
"""
"""The id of this start of the server, for scripts; empty if it may not be asked (ACL), and then nothing is noticed."""

# KEYS: streams. ARGV: ledger's group, the server as it was known, then of each stream how many ids, and they.
# {server, last id of each stream that the ledger has, and if the server is another one: {stream, id} that it lacks}.
# One call, since between two the server may start anew.
_LOOK = (
    SERVER
    + """
local function archived(stream)
  if redis.call('EXISTS', stream) == 1 then
    for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
      local group = {}
      for i = 1, #flat, 2 do group[flat[i]] = flat[i + 1] end
      if group['name'] == ARGV[1] then return group['last-delivered-id'] end
    end
  end
  return '0-0'
end
local now, has, gone, at = server(), {}, {}, 3
for place, stream in ipairs(KEYS) do
  has[place] = archived(stream)
  local last = at + tonumber(ARGV[at])
  if now ~= ARGV[2] then
    for i = at + 1, last do
      if #redis.call('XRANGE', stream, ARGV[i], ARGV[i]) == 0 then gone[#gone + 1] = {stream, ARGV[i]} end
    end
  end
  at = last + 1
end
return {now, has, gone}
"""
)


class Kept:
    """The entries that one process keeps. Threads may add while one tends.

    Args:
        keys: of the run.
        most_bytes: the oldest go before it is more than that: where no archiver runs, nothing else would end it.
    """

    def __init__(self, keys: Keys, most_bytes: int = _MOST_BYTES) -> None:
        self._streams = tuple(keys.streams.values())
        self._server = b""
        self._most_bytes, self._bytes = most_bytes, 0
        self._bodies: dict[Name, bytes] = {}
        self._was: dict[Name, str] = {}  # the ids that it had before
        self._lock = threading.Lock()

    def add(self, stream: str, entry: str, body: bytes) -> None:
        """Keep an entry of ``stream`` (its key)."""
        with self._lock:
            self._keep((stream, entry), body)
            while self._bytes > self._most_bytes:
                self._drop(next(iter(self._bodies)))

    def send(self, client: redis.Redis, stream: str, fields: Fields) -> None:
        """Put an entry on ``stream`` and keep it."""
        self.add(stream, cast(bytes, client.xadd(stream, fields)).decode(), cast(bytes, fields["body"]))

    async def send_async(self, client: redis.asyncio.Redis, stream: str, fields: Fields) -> None:
        """As ``send``, for asyncio."""
        self.add(stream, cast(bytes, await client.xadd(stream, fields)).decode(), cast(bytes, fields["body"]))

    def tend(self, client: redis.Redis) -> int:
        """Let go of what the ledger has, and tell a server that has started anew what it forgot; how much that was."""
        reply = client.eval(_LOOK, len(self._streams), *self._streams, *self._question())
        lost = self._answer(reply)
        for name, fields in lost:
            self._replace(name, client.xadd(name[0], fields))
        self._server = cast(list[bytes], reply)[0]
        return len(lost)

    async def tend_async(self, client: redis.asyncio.Redis) -> int:
        """As ``tend``, for asyncio."""
        reply = await cast(Any, client.eval(_LOOK, len(self._streams), *self._streams, *self._question()))
        lost = self._answer(reply)
        for name, fields in lost:
            self._replace(name, await client.xadd(name[0], fields))
        self._server = reply[0]
        return len(lost)

    def _question(self) -> list[Any]:
        """The arguments of ``_LOOK``."""
        ids: dict[str, list[str]] = {stream: [] for stream in self._streams}
        with self._lock:
            for stream, entry in self._bodies:
                ids[stream].append(entry)
        return [LEDGER_GROUP, self._server, *(part for each in ids.values() for part in (len(each), *each))]

    def _answer(self, reply: Any) -> list[tuple[Name, Fields]]:
        """What is to be put there again, in order.

        What a server says of the ledger holds while it runs: one that has started anew may have forgotten what came
        before where the ledger stands by now.
        """
        server, archived, gone = reply
        with self._lock:
            if server != self._server:
                names = [(stream.decode(), entry.decode()) for stream, entry in gone]
                return [(name, self._again(name)) for name in names if name in self._bodies]
            has = {stream: EntryId.parse(last.decode()) for stream, last in zip(self._streams, archived, strict=True)}
            for name in [name for name in self._bodies if EntryId.parse(name[1]) <= has[name[0]]]:
                self._drop(name)
        return []

    def _again(self, name: Name) -> Fields:
        return {BODY: self._bodies[name], WAS: self._ids(name)}

    def _ids(self, name: Name) -> str:
        """Every id that it has had."""
        return f"{self._was.get(name, '')} {name[1]}".strip()

    def _replace(self, name: Name, by: Any) -> None:
        """The entry has another id now."""
        with self._lock:
            if name in self._bodies:
                body, was = self._bodies[name], self._ids(name)
                self._drop(name)
                self._keep((name[0], by.decode()), body)
                self._was[name[0], by.decode()] = was

    def _keep(self, name: Name, body: bytes) -> None:
        self._bodies[name] = body
        self._bytes += len(body)

    def _drop(self, name: Name) -> None:
        self._bytes -= len(self._bodies.pop(name))
        self._was.pop(name, None)
