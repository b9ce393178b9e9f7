"""A server that comes back with an older memory, or none: nothing stands still, and no group's number is used again."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import redis
import redis.asyncio

from lorabridge.bridge import codec
from lorabridge.bridge.ledger.archiver import Archiver
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.stream.groups import GroupQueue, GroupReader, raise_floor
from lorabridge.bridge.stream.keys import Keys
from tests.factories import make_group
from tests.groups import counts, queue_of, reader_of

AHEAD = 4


class Memory:
    """Everything a server has of a run at one moment."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client, self._pattern = client, f"{{lorabridge:{keys.run_id}}}:*"
        self._bodies = {key: cast(bytes, client.dump(key)) for key in self._keys()}

    def _keys(self) -> list[bytes]:
        return cast(list[bytes], self._client.keys(self._pattern))

    def come_back(self) -> None:
        forget(self._client, self._keys())
        for key, body in self._bodies.items():
            self._client.restore(key, 0, body)


def forget(client: redis.Redis, keys: list[bytes]) -> None:
    for key in keys:
        client.delete(key)


async def begin(queue: GroupQueue) -> list[int]:
    """Claim and deliver as many groups as there may be; their numbers."""
    numbers = []
    while (claim := await queue.claim()) is not None:
        assert await queue.deliver(claim, make_group(claim.number, claim.attempt, claim.worker, size=1))
        numbers.append(claim.number)
    return numbers


def read_all(reader: GroupReader) -> dict[str, int]:
    found = {}
    while received := reader.read(block_ms=1):
        found[received[0]] = received[1].group
    return found


async def test_groups_that_it_does_not_know_to_be_finished_hold_nothing_up(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys
) -> None:
    queue, reader = queue_of(async_client, keys, ahead=AHEAD), reader_of(client, keys)
    assert await begin(queue) == [0, 1, 2, 3]
    before = read_all(reader)
    memory = Memory(client, keys)
    reader.finish(list(before))
    assert await begin(queue) == [4, 5, 6, 7]
    between = read_all(reader)
    memory.come_back()

    assert await begin(queue) == []  # it still has the first four, and thinks they are being trained on
    reader.finish(list(between))  # it has never heard of these
    assert read_all(reader) == before
    reader.finish(list(before))  # the trainer knows that it is done with them
    assert await begin(queue) == [8, 9, 10, 11]
    assert counts(client, keys) == (12, 4)


async def test_what_it_never_delivered_to_the_trainer_is_delivered_again_and_finished_again(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys
) -> None:
    queue, reader = queue_of(async_client, keys, ahead=AHEAD), reader_of(client, keys)
    await begin(queue)
    memory = Memory(client, keys)
    before = read_all(reader)
    reader.finish(list(before))
    memory.come_back()
    assert read_all(reader) == before
    reader.finish(list(before))
    assert await begin(queue) == [4, 5, 6, 7]


async def test_what_the_trainer_has_in_hand_is_not_handed_out_a_second_time(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys
) -> None:
    queue, reader = queue_of(async_client, keys, ahead=AHEAD), reader_of(client, keys)
    await begin(queue)
    memory = Memory(client, keys)
    in_hand = read_all(reader)
    memory.come_back()
    assert read_all(reader) == {}
    assert reader.finish(list(in_hand)) == AHEAD
    assert await begin(queue) == [4, 5, 6, 7]


async def test_one_that_lost_everything_is_told_who_reads_and_goes_on(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys
) -> None:
    told: list[bool] = []
    queue = queue_of(async_client, keys, ahead=AHEAD)
    reader = GroupReader(client, keys, "trainer", lambda *unreadable: None, lambda: told.append(True))
    await begin(queue)
    in_hand = read_all(reader)
    forget(client, cast(list[bytes], client.keys(f"{{lorabridge:{keys.run_id}}}:*")))
    assert read_all(reader) == {}
    assert told == [True]
    assert await begin(queue) == [4, 5, 6, 7]
    assert list(read_all(reader).values()) == [4, 5, 6, 7]
    assert reader.finish(list(in_hand)) == 0
    assert told == [True]


def archive(client: redis.Redis, keys: Keys, ledger: Path) -> None:
    """What the streams hold now, as an archiver that starts now and ends then."""
    turns = iter([False])
    Archiver(client, keys, ledger, flush_entries=100, flush_s=0.1).run(lambda: next(turns, True))


async def test_an_archiver_that_starts_says_where_groups_go_on_after_what_the_ledger_has(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    memory = Memory(client, keys)
    await begin(queue_of(async_client, keys, ahead=AHEAD))
    archive(client, keys, tmp_path / "ledger")
    memory.come_back()
    archive(client, keys, tmp_path / "ledger")
    assert await begin(queue_of(async_client, keys, "new", ahead=AHEAD)) == [4, 5, 6, 7]
    archive(client, keys, tmp_path / "ledger")
    groups = [trajectory.group for trajectory in Ledger(tmp_path / "ledger").trajectories()]
    assert groups == list(range(8))


async def test_one_that_lives_through_it_says_so_with_what_it_archives_next(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys, tmp_path: Path
) -> None:
    memory = Memory(client, keys)
    await begin(queue_of(async_client, keys, ahead=AHEAD))
    came_back = False

    def stop() -> bool:
        nonlocal came_back
        archived = list((tmp_path / "ledger" / "trajectories").glob("*.parquet"))
        if archived and not came_back:
            came_back = True
            memory.come_back()
            client.xadd(keys.trajectories, {"body": codec.encode(make_group(AHEAD, size=1))})
        return len(archived) > 1

    Archiver(client, keys, tmp_path / "ledger", flush_entries=100, flush_s=0.1).run(stop)
    assert counts(client, keys)[0] == AHEAD + 1


def test_the_floor_only_rises(client: redis.Redis, keys: Keys) -> None:
    assert [raise_floor(client, keys, floor) for floor in (0, 3, 2, 3, 4)] == [False, True, False, False, True]
    assert counts(client, keys) == (4, 0)


async def test_a_trainer_that_never_waits_finishes_again_what_it_is_told_to_look_for(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys
) -> None:
    queue, reader = queue_of(async_client, keys, ahead=AHEAD), reader_of(client, keys)
    await begin(queue)
    before = read_all(reader)
    memory = Memory(client, keys)
    reader.finish(list(before))
    memory.come_back()
    client.xadd(keys.trajectories, {"body": codec.encode(make_group(AHEAD, size=1))})
    reader.look_again()
    received = [reader.read(block_ms=1) for _ in range(AHEAD + 1)]
    assert [each[1].group for each in received if each] == list(range(AHEAD + 1))
