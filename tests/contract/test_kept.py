"""What is kept until the ledger has it, on a server that is killed and comes back with an earlier memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from lorabridge.bridge.ledger.again import ids_before
from lorabridge.bridge.stream.connection import connect, connect_async
from lorabridge.bridge.stream.groups import GroupQueue, ensure_group
from lorabridge.bridge.stream.kept import Kept
from lorabridge.bridge.stream.keys import LEDGER_GROUP, Keys
from lorabridge.bridge.stream.lease import Lease
from tests.groups import queue_of
from tests.servers import RedisServer, redis_binary, valkey_binary


class Place:
    """A server with one copy of its memory."""

    def __init__(self, server: RedisServer, keys: Keys, copy: Path) -> None:
        self.server, self.keys, self._copy = server, keys, copy
        self.client: redis.Redis = connect(server.section)
        ensure_group(self.client, keys.events, LEDGER_GROUP)

    def remember(self) -> None:
        self.server.copy(self._copy)

    def come_back_older(self) -> None:
        self.server.kill()
        self.server.come_back_older(self._copy)

    def restart(self) -> None:
        self.server.kill()
        self.server.start()

    def events(self) -> list[bytes]:
        entries = cast(list[tuple[bytes, dict[bytes, bytes]]], self.client.xrange(self.keys.events))
        return [fields[b"body"] for _, fields in entries]

    def ids(self) -> list[str]:
        return [entry.decode() for entry, _ in cast(list[tuple[bytes, Any]], self.client.xrange(self.keys.events))]

    def archive(self) -> None:
        """The ledger has everything that is there."""
        last = cast(list[tuple[bytes, dict[bytes, bytes]]], self.client.xrevrange(self.keys.events, count=1))[0][0]
        self.client.xgroup_setid(self.keys.events, LEDGER_GROUP, last)


@pytest.fixture(params=["valkey", "redis-server"])
def place(request: pytest.FixtureRequest, keys: Keys, tmp_path: Path) -> Iterator[Place]:
    binary = valkey_binary() if request.param == "valkey" else redis_binary()
    with RedisServer(tmp_path, binary) as server:
        place = Place(server, keys, tmp_path / "copy")
        yield place
        place.client.close()


@pytest.fixture
def kept(place: Place) -> Kept:
    kept = Kept(place.keys)
    assert kept.tend(place.client) == 0
    return kept


def was(place: Place) -> list[list[str]]:
    entries = cast(list[tuple[bytes, dict[bytes, bytes]]], place.client.xrange(place.keys.events))
    return [ids_before(fields) for _, fields in entries]


def send(place: Place, kept: Kept, *bodies: bytes) -> None:
    for body in bodies:
        kept.send(place.client, place.keys.events, {"body": body})


def test_a_server_that_comes_back_older_is_told_again_of_what_it_forgot_once_and_in_order(
    place: Place, kept: Kept
) -> None:
    send(place, kept, b"a")
    place.remember()
    send(place, kept, b"b", b"c")
    place.come_back_older()
    assert place.events() == [b"a"]
    send(place, kept, b"d")
    assert [kept.tend(place.client) for _ in range(2)] == [2, 0]
    assert place.events() == [b"a", b"d", b"b", b"c"]
    before, (_, _, was_b, again) = place.ids(), was(place)
    assert (len(was_b), len(again)) == (1, 1)
    place.come_back_older()
    assert kept.tend(place.client) == 3
    assert place.events() == [b"a", b"d", b"b", b"c"]
    assert was(place) == [[], [before[1]], [*was_b, before[2]], [*again, before[3]]]


async def test_for_asyncio_it_is_the_same(place: Place, kept: Kept) -> None:
    client = connect_async(place.server.section)
    await kept.send_async(client, place.keys.events, {"body": b"a"})
    place.remember()
    await kept.send_async(client, place.keys.events, {"body": b"b"})
    place.come_back_older()
    assert [await kept.tend_async(client) for _ in range(2)] == [1, 0]
    await client.aclose()
    assert place.events() == [b"a", b"b"]


def test_what_the_ledger_has_is_not_told_again(place: Place, kept: Kept) -> None:
    place.remember()
    send(place, kept, b"a")
    place.archive()
    kept.tend(place.client)
    send(place, kept, b"b")
    place.come_back_older()
    assert kept.tend(place.client) == 1
    assert place.events() == [b"b"]


def test_where_the_ledger_stands_after_the_server_came_back_says_nothing_of_what_was_before(
    place: Place, kept: Kept
) -> None:
    place.remember()
    send(place, kept, b"lost")
    place.come_back_older()
    send(place, kept, b"new")
    place.archive()  # its position is past what it never saw
    assert kept.tend(place.client) == 1
    assert place.events() == [b"new", b"lost"]


def test_a_server_that_restarts_with_everything_is_told_nothing(place: Place, kept: Kept) -> None:
    send(place, kept, b"a", b"b")
    place.restart()
    assert kept.tend(place.client) == 0
    assert place.events() == [b"a", b"b"]


def test_one_that_comes_back_empty_is_told_everything(place: Place, kept: Kept) -> None:
    send(place, kept, b"a", b"b")
    place.client.flushall()
    place.restart()
    assert kept.tend(place.client) == 2
    assert place.events() == [b"a", b"b"]


def test_the_oldest_goes_where_no_ledger_ends_it(place: Place) -> None:
    kept = Kept(place.keys, most_bytes=4)
    kept.tend(place.client)
    place.remember()
    send(place, kept, b"aa", b"bb", b"cc")
    place.come_back_older()
    assert kept.tend(place.client) == 2
    assert place.events() == [b"bb", b"cc"]


# What else a server that comes back older must not undo


async def test_no_attempt_of_a_number_is_given_twice(place: Place) -> None:
    client = connect_async(place.server.section)

    async def claims(queue: GroupQueue) -> list[tuple[int, int]]:
        found = []
        while claim := await queue.claim():
            found.append((claim.number, claim.attempt))
        return found

    first = await claims(queue_of(client, place.keys, "one", ahead=2))
    assert first == [(0, 1), (1, 1)]
    place.remember()
    later = await claims(queue_of(client, place.keys, "one", ahead=4))
    assert later == [(2, 1), (3, 1)]
    place.come_back_older()
    again = await claims(queue_of(client, place.keys, "another", ahead=4))
    assert [number for number, _ in again] == [2, 3]
    assert not set(again) & set(later)
    place.come_back_older()
    third = await claims(queue_of(client, place.keys, "a third", ahead=4))
    assert not set(third) & {*later, *again}
    await client.aclose()


async def test_a_lease_that_an_older_memory_gives_to_an_earlier_holder_is_taken_back(place: Place) -> None:
    client = connect_async(place.server.section)
    earlier, ours = (Lease(client, "lease", "fence", name, ttl_s=60) for name in ("earlier", "ours"))
    assert await earlier.hold(floor=0)
    place.remember()
    await earlier.release()
    assert await ours.hold(floor=0)
    place.come_back_older()
    assert await ours.hold(floor=0)
    assert (earlier.number, ours.number) == (0, 2)
    earlier.number = 1  # one that slept through it all
    assert not await earlier.hold(floor=0)
    await client.aclose()
