"""Groups on a stream as a test sees them, past the classes that are tested."""

from __future__ import annotations

from typing import cast

import redis
import redis.asyncio

from lorabridge.bridge.errors import CodecError
from lorabridge.bridge.stream.groups import GroupQueue, GroupReader, decode_group, unfinished
from lorabridge.bridge.stream.keys import TRAINER_GROUP, Keys

LONG_S = 3600.0


def queue_of(client: redis.asyncio.Redis, keys: Keys, worker: str = "worker", ahead: int = 4) -> GroupQueue:
    return GroupQueue(client, keys, worker, ahead, LONG_S)


def reader_of(client: redis.Redis, keys: Keys, consumer: str = "trainer") -> GroupReader:
    """A reader that meets no entry it cannot read."""

    def unreadable(entry: str, error: CodecError) -> None:
        raise AssertionError(f"{entry}: {error}")

    return GroupReader(client, keys, consumer, unreadable)


def expire(client: redis.Redis, keys: Keys, number: int) -> None:
    """Let the lease of a group end now."""
    assert client.zadd(keys.leases, {str(number): 0}, xx=True, ch=True) == 1


def entered(client: redis.Redis, keys: Keys) -> list[tuple[int, int]]:
    """(group, attempt) of everything on the stream."""
    entries = cast(list[tuple[bytes, dict[bytes, bytes]]], client.xrange(keys.trajectories))
    return [(group.group, group.attempt) for group in (decode_group(fields) for _, fields in entries)]


def counts(client: redis.Redis, keys: Keys) -> tuple[int, int]:
    """(groups that were begun, those of them that are open: leased, or on the stream and not finished)."""
    started = cast(bytes | None, client.hget(keys.groups, "started"))
    return int(started or 0), client.zcard(keys.leases) + unfinished(client, keys)


def finish_all(client: redis.Redis, keys: Keys) -> None:
    """The trainer is done with everything that is on the stream."""
    reader = reader_of(client, keys)
    while received := reader.read(block_ms=1):
        reader.finish([received[0]])


def pending(client: redis.Redis, keys: Keys) -> int:
    return int(client.xpending(keys.trajectories, TRAINER_GROUP)["pending"])
