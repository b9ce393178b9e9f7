"""Laws 5 and 6 on every stream backend: a group enters once, and is not done before it is finished."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast

import pytest
import redis
import redis.asyncio

from lorabridge.bridge import codec
from lorabridge.bridge.stream.groups import Claim, GroupQueue, GroupReader, ensure_group
from lorabridge.bridge.stream.keys import LEDGER_GROUP, TRAINER_GROUP, Keys
from tests.factories import make_group, make_manifest
from tests.groups import counts, entered, expire, pending, queue_of, reader_of


@pytest.fixture
def queue(async_client: redis.asyncio.Redis, keys: Keys) -> GroupQueue:
    return queue_of(async_client, keys)


async def claimed(queue: GroupQueue) -> Claim:
    claim = await queue.claim()
    assert claim is not None
    return claim


async def delivered(queue: GroupQueue) -> Claim:
    claim = await claimed(queue)
    assert await queue.deliver(claim, make_group(claim.number, claim.attempt, claim.worker))
    return claim


def taken(reader: GroupReader) -> tuple[str, int]:
    """(entry, group number) of the next group."""
    found = reader.read(block_ms=10)
    assert found is not None
    return found[0], found[1].group


# A worker's side


async def test_groups_are_numbered_from_0_and_started_only_so_far_ahead(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    claims = [await claimed(queue) for _ in range(4)]
    assert [(claim.number, claim.attempt) for claim in claims] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert await queue.claim() is None
    assert await queue.deliver(claims[0], make_group(0))
    assert await queue.claim() is None  # delivered is not finished
    reader = reader_of(client, keys)
    reader.finish([taken(reader)[0]])
    assert (await claimed(queue)).number == 4
    assert await queue.claim() is None
    assert counts(client, keys) == (5, 4)


async def test_workers_that_claim_at_once_get_different_groups_and_no_more_than_are_allowed(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys
) -> None:
    queues = [queue_of(async_client, keys, f"worker {n}", ahead=7) for n in range(5)]
    claims = await asyncio.gather(*(queue.claim() for queue in queues * 4))
    assert sorted(claim.number for claim in claims if claim) == list(range(7))
    assert counts(client, keys) == (7, 7)


async def test_a_claim_carries_the_servers_time(client: redis.Redis, queue: GroupQueue) -> None:
    before = int(client.time()[0]) * 1000
    claim = await claimed(queue)
    assert before <= claim.at_ms <= (int(client.time()[0]) + 1) * 1000


async def test_a_group_whose_lease_ended_goes_to_the_next_worker_under_the_next_attempt(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    late = await claimed(queue)
    other = queue_of(async_client, keys, "other", ahead=1)  # a lease that ended goes before the bound
    assert await other.claim() is None
    expire(client, keys, late.number)
    again = await claimed(other)
    assert (again.number, again.attempt, again.worker) == (0, 2, "other")
    assert await queue.deliver(late, make_group(0, 1)) is False
    assert entered(client, keys) == []
    assert await other.deliver(again, make_group(0, 2)) is True
    assert await queue.deliver(late, make_group(0, 1)) is False
    assert entered(client, keys) == [(0, 2)]


async def test_a_worker_that_is_late_but_not_replaced_still_delivers(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    claim = await claimed(queue)
    expire(client, keys, claim.number)
    assert await queue.deliver(claim, make_group(0)) is True
    assert (await claimed(queue)).number == 1


async def test_a_lease_ends_by_the_servers_clock(async_client: redis.asyncio.Redis, keys: Keys) -> None:
    hasty = GroupQueue(async_client, keys, "worker", ahead=1, lease_s=0.001)
    assert (await claimed(hasty)).attempt == 1
    while (again := await hasty.claim()) is None:
        pass  # each is a round trip
    assert (again.number, again.attempt) == (0, 2)


async def test_a_group_enters_the_stream_once(client: redis.Redis, keys: Keys, queue: GroupQueue) -> None:
    claim = await claimed(queue)
    results = await asyncio.gather(*(queue.deliver(claim, make_group(0)) for _ in range(20)))
    assert sorted(results) == [False] * 19 + [True]
    assert await queue.deliver(claim, make_group(0)) is False
    assert entered(client, keys) == [(0, 1)]


async def test_of_two_attempts_that_deliver_at_once_only_the_holder_enters(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    for number in range(10):
        late = await claimed(queue_of(async_client, keys, "worker", ahead=100))
        expire(client, keys, number)
        holder = await claimed(queue)
        late_entered, holder_entered = await asyncio.gather(
            queue.deliver(late, make_group(number, 1)), queue.deliver(holder, make_group(number, 2))
        )
        assert (late_entered, holder_entered) == (False, True)
    assert entered(client, keys) == [(number, 2) for number in range(10)]


async def test_a_delivery_that_the_server_refuses_leaves_the_group_to_be_delivered(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    claim = await claimed(queue)
    client.set(keys.trajectories, "not a stream")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await queue.deliver(claim, make_group(0))
    client.delete(keys.trajectories)
    assert await queue.deliver(claim, make_group(0)) is True


async def test_a_released_group_is_claimed_again_at_once(client: redis.Redis, keys: Keys, queue: GroupQueue) -> None:
    claim = await claimed(queue)
    await queue.release(claim)
    assert await queue.deliver(claim, make_group(0)) is False
    again = await claimed(queue)
    assert (again.number, again.attempt) == (0, 2)
    await queue.release(claim)  # the lease is no longer its own
    assert await queue.deliver(again, make_group(0, 2)) is True
    assert entered(client, keys) == [(0, 2)]
    assert counts(client, keys) == (1, 1)


async def test_an_abandoned_group_is_not_open_any_more_and_is_not_tried_again(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    claim = await claimed(queue)
    for _ in range(2):
        await queue.abandon(claim)
    assert counts(client, keys) == (1, 0)
    assert await queue.deliver(claim, make_group(0)) is False
    assert (await claimed(queue)).number == 1
    await queue.abandon(await delivered(queue))  # too late: it is on the stream
    assert counts(client, keys) == (3, 2)


# The trainer's side


async def test_a_group_is_read_as_it_was_sent_and_in_order(client: redis.Redis, keys: Keys, queue: GroupQueue) -> None:
    for _ in range(3):
        await delivered(queue)
    reader = reader_of(client, keys)
    found = reader.read(block_ms=10)
    assert found is not None
    assert found[1] == make_group(0)
    assert [taken(reader)[1] for _ in range(2)] == [1, 2]
    assert reader.read(block_ms=1) is None


async def test_what_was_sent_before_the_trainer_came_is_read(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    await delivered(queue)
    ensure_group(client, keys.trajectories, TRAINER_GROUP)
    ensure_group(client, keys.trajectories, TRAINER_GROUP)
    assert taken(reader_of(client, keys))[1] == 0


async def test_nothing_is_acknowledged_before_it_is_finished(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    for _ in range(3):
        await delivered(queue)
    reader = reader_of(client, keys)
    entries = [taken(reader)[0] for _ in range(3)]
    assert pending(client, keys) == 3
    assert counts(client, keys) == (3, 3)
    assert reader.finish(entries[:2]) == 2
    assert pending(client, keys) == 1
    assert counts(client, keys) == (3, 1)


async def test_a_trainer_that_comes_back_is_given_first_what_it_had_not_finished(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    for _ in range(4):
        await delivered(queue)
    before = reader_of(client, keys)
    entries = [taken(before)[0] for _ in range(3)]
    before.finish([entries[1]])
    for _ in range(2):  # and again, if it dies again
        after = reader_of(client, keys)
        assert [taken(after)[1] for _ in range(2)] == [0, 2]
    assert taken(after)[1] == 3
    assert after.read(block_ms=1) is None


async def test_finishing_twice_is_finishing_once(client: redis.Redis, keys: Keys, queue: GroupQueue) -> None:
    await delivered(queue)
    reader = reader_of(client, keys)
    entry, _ = taken(reader)
    assert [reader.finish([entry, entry]), reader.finish([entry]), reader.finish([])] == [1, 0, 0]
    assert reader_of(client, keys).finish([entry]) == 0
    assert reader.finish(["1-1"]) == 0  # never was
    assert counts(client, keys) == (1, 0)


async def test_the_ledgers_group_does_not_take_from_the_trainers(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    await delivered(queue)
    ensure_group(client, keys.trajectories, LEDGER_GROUP)
    client.xreadgroup(LEDGER_GROUP, "archiver", {keys.trajectories: ">"})
    reader = reader_of(client, keys)
    entry, number = taken(reader)
    assert number == 0
    client.xack(keys.trajectories, LEDGER_GROUP, entry)
    assert pending(client, keys) == 1


async def test_a_group_whose_delivery_to_the_trainer_was_lost_on_the_way_comes_again(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    """The server has handed it out; the answer was cut off and the client asked anew, for newer ones."""
    reader = reader_of(client, keys)
    for number in range(3):
        await delivered(queue)
        if number == 1:
            client.xreadgroup(TRAINER_GROUP, "trainer", {keys.trajectories: ">"}, count=1)
        else:
            assert taken(reader)[1] == number
    entry, number = taken(reader)
    assert number == 1
    assert reader.read(block_ms=1) is None  # and what it has in hand does not come a second time
    assert reader.finish([entry]) == 1


async def test_an_entry_removed_while_it_was_in_hand_does_not_hold_up_the_run(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    for _ in range(2):
        await delivered(queue)
    before = reader_of(client, keys)
    entry, _ = taken(before)
    client.xdel(keys.trajectories, entry)
    after = reader_of(client, keys)
    assert taken(after)[1] == 1
    assert after.read(block_ms=1) is None
    assert counts(client, keys) == (2, 1)


async def test_an_unreadable_group_is_told_of_once_and_holds_nothing_up(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    told: list[str] = []
    await delivered(queue)
    claim = await claimed(queue)
    assert await queue.deliver(claim, cast(Any, make_manifest()))
    await delivered(queue)
    for _ in range(2):
        reader = GroupReader(client, keys, "trainer", lambda entry, error: told.append(f"{entry} {error}"))
        assert [taken(reader)[1] for _ in range(2)] == [0, 2]
        assert reader.read(block_ms=1) is None
    (once,) = told
    entries = cast(list[tuple[bytes, Any]], client.xrange(keys.trajectories))
    assert once.startswith(f"{entries[1][0].decode()} not a readable Group")
    assert counts(client, keys) == (3, 2)
    assert pending(client, keys) == 2


async def test_an_entry_that_no_worker_sent_is_told_of_once_and_holds_nothing_up(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    told: list[str] = []
    client.xadd(keys.trajectories, {"other": b"1"})
    await delivered(queue)
    for _ in range(2):
        reader = GroupReader(client, keys, "trainer", lambda entry, error: told.append(error.problem))
        assert taken(reader)[1] == 0
        assert reader.read(block_ms=1) is None
    assert told == ["an entry without the field 'body'"]
    assert counts(client, keys) == (1, 1)
    assert pending(client, keys) == 1


async def test_what_is_finished_while_the_backlog_is_read_is_not_handed_out_again(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    await delivered(queue)
    reader = reader_of(client, keys)
    entry, _ = taken(reader)
    reader._backlog = "0"  # as after an answer that was lost on the way
    asked, go = threading.Event(), threading.Event()
    answer = client.xreadgroup

    def slowly(*arguments: Any, **keywords: Any) -> Any:
        reply = answer(*arguments, **keywords)
        asked.set()
        go.wait(10)
        return reply

    client.xreadgroup = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(reader.read, 1)
        assert asked.wait(10)
        finishing = threads.submit(reader.finish, [entry])
        wait([finishing], timeout=0.2)  # time to slip in between, if it could
        go.set()
        assert finishing.result(10) == 1
        assert reading.result(10) is None
    assert counts(client, keys) == (1, 0)


async def test_a_repeated_entry_is_finished_with_the_first(client: redis.Redis, keys: Keys, queue: GroupQueue) -> None:
    claim = await delivered(queue)
    client.xadd(keys.trajectories, {"body": codec.encode(make_group(claim.number))})
    reader = reader_of(client, keys)
    first, second = taken(reader)[0], taken(reader)[0]
    reader.finish([first, second])
    assert counts(client, keys) == (1, 0)
    assert pending(client, keys) == 0


async def test_only_failures_of_the_group_itself_are_counted(
    queue: GroupQueue, client: redis.Redis, keys: Keys
) -> None:
    claim = await claimed(queue)
    await queue.release(claim)
    again = await claimed(queue)
    assert (again.number, again.attempt, again.failures) == (claim.number, 2, 0)
    await queue.release(again, failed=True)
    third = await claimed(queue)
    assert (third.number, third.attempt, third.failures) == (claim.number, 3, 1)
    assert await queue.deliver(third, make_group(third.number, third.attempt))
    assert client.hlen(keys.failures) == 0
