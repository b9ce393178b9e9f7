"""Laws 5 and 6 on every stream backend: a group enters once, and is not done before it is finished."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import hypothesis
import pytest
import redis
import redis.asyncio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from lorabridge.bridge.errors import CodecError
from lorabridge.bridge.settings import RedisSection
from lorabridge.bridge.stream.connection import connect, connect_async
from lorabridge.bridge.stream.groups import Claim, GroupQueue, GroupReader, decode_group, ensure_group
from lorabridge.bridge.stream.keys import LEDGER_GROUP, TRAINER_GROUP, Keys

from tests.factories import make_group

LONG_S = 3600.0


def queue_of(client: redis.asyncio.Redis, keys: Keys, worker: str = "worker", ahead: int = 4) -> GroupQueue:
    return GroupQueue(client, keys, worker, ahead, LONG_S)


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


def expire(client: redis.Redis, keys: Keys, number: int) -> None:
    """Let the lease of a group end now."""
    assert client.zadd(keys.leases, {str(number): 0}, xx=True, ch=True) == 1


def entered(client: redis.Redis, keys: Keys) -> list[tuple[int, int]]:
    """(group, attempt) of everything on the stream."""
    entries = cast(list[tuple[bytes, dict[bytes, bytes]]], client.xrange(keys.trajectories))
    return [(group.group, group.attempt) for group in (decode_group(fields) for _, fields in entries)]


def counts(client: redis.Redis, keys: Keys) -> tuple[int, int]:
    """(started, finished)."""
    started, finished = cast(list[bytes | None], client.hmget(keys.groups, ["started", "finished"]))
    return int(started or 0), int(finished or 0)


def pending(client: redis.Redis, keys: Keys) -> int:
    return int(cast(dict[str, Any], client.xpending(keys.trajectories, TRAINER_GROUP))["pending"])


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
    reader = GroupReader(client, keys, "trainer")
    reader.finish([taken(reader)[0]])
    assert (await claimed(queue)).number == 4
    assert await queue.claim() is None
    assert counts(client, keys) == (5, 1)


async def test_workers_that_claim_at_once_get_different_groups_and_no_more_than_are_allowed(
    async_client: redis.asyncio.Redis, client: redis.Redis, keys: Keys
) -> None:
    queues = [queue_of(async_client, keys, f"worker {n}", ahead=7) for n in range(5)]
    claims = await asyncio.gather(*(queue.claim() for queue in queues * 4))
    assert sorted(claim.number for claim in claims if claim) == list(range(7))
    assert counts(client, keys) == (7, 0)


async def test_a_claim_carries_the_servers_time(client: redis.Redis, queue: GroupQueue) -> None:
    before = int(client.time()[0]) * 1000  # type: ignore[index]
    claim = await claimed(queue)
    assert before <= claim.at_ms <= (int(client.time()[0]) + 1) * 1000  # type: ignore[index]


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
        results = await asyncio.gather(
            queue.deliver(late, make_group(number, 1)), queue.deliver(holder, make_group(number, 2))
        )
        assert results == [False, True]
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
    assert counts(client, keys) == (1, 0)


async def test_an_abandoned_group_counts_as_finished_once_and_is_not_tried_again(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    claim = await claimed(queue)
    for _ in range(2):
        await queue.abandon(claim)
    assert counts(client, keys) == (1, 1)
    assert await queue.deliver(claim, make_group(0)) is False
    assert (await claimed(queue)).number == 1
    await queue.abandon(await delivered(queue))  # too late: it is on the stream
    assert counts(client, keys) == (3, 1)


# The trainer's side


async def test_a_group_is_read_as_it_was_sent_and_in_order(client: redis.Redis, keys: Keys, queue: GroupQueue) -> None:
    for _ in range(3):
        await delivered(queue)
    reader = GroupReader(client, keys, "trainer")
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
    assert taken(GroupReader(client, keys, "trainer"))[1] == 0


async def test_nothing_is_acknowledged_before_it_is_finished(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    for _ in range(3):
        await delivered(queue)
    reader = GroupReader(client, keys, "trainer")
    entries = [taken(reader)[0] for _ in range(3)]
    assert pending(client, keys) == 3
    assert counts(client, keys) == (3, 0)
    assert reader.finish(entries[:2]) == 2
    assert pending(client, keys) == 1
    assert counts(client, keys) == (3, 2)


async def test_a_trainer_that_comes_back_is_given_first_what_it_had_not_finished(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    for _ in range(4):
        await delivered(queue)
    before = GroupReader(client, keys, "trainer")
    entries = [taken(before)[0] for _ in range(3)]
    before.finish([entries[1]])
    for _ in range(2):  # and again, if it dies again
        after = GroupReader(client, keys, "trainer")
        assert [taken(after)[1] for _ in range(2)] == [0, 2]
    assert taken(after)[1] == 3
    assert after.read(block_ms=1) is None


async def test_finishing_twice_counts_once(client: redis.Redis, keys: Keys, queue: GroupQueue) -> None:
    await delivered(queue)
    reader = GroupReader(client, keys, "trainer")
    entry, _ = taken(reader)
    assert [reader.finish([entry, entry]), reader.finish([entry]), reader.finish([])] == [1, 0, 0]
    assert GroupReader(client, keys, "trainer").finish([entry]) == 0
    assert reader.finish(["1-1"]) == 0  # never was
    assert counts(client, keys) == (1, 1)


async def test_the_ledgers_group_does_not_take_from_the_trainers(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    await delivered(queue)
    ensure_group(client, keys.trajectories, LEDGER_GROUP)
    client.xreadgroup(LEDGER_GROUP, "archiver", {keys.trajectories: ">"})
    reader = GroupReader(client, keys, "trainer")
    entry, number = taken(reader)
    assert number == 0
    client.xack(keys.trajectories, LEDGER_GROUP, entry)
    assert pending(client, keys) == 1


async def test_a_group_whose_delivery_to_the_trainer_was_lost_on_the_way_comes_again(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    """The server has handed it out; the answer was cut off and the client asked anew, for newer ones."""
    reader = GroupReader(client, keys, "trainer")
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
    before = GroupReader(client, keys, "trainer")
    entry, _ = taken(before)
    client.xdel(keys.trajectories, entry)
    after = GroupReader(client, keys, "trainer")
    assert taken(after)[1] == 1
    assert after.read(block_ms=1) is None
    assert counts(client, keys) == (2, 1)


async def test_an_unreadable_entry_is_an_error_and_not_the_end(
    client: redis.Redis, keys: Keys, queue: GroupQueue
) -> None:
    await delivered(queue)
    client.xadd(keys.trajectories, {"body": b"garbage"})
    await delivered(queue)
    for _ in range(2):
        reader = GroupReader(client, keys, "trainer")
        assert taken(reader)[1] == 0
        with pytest.raises(CodecError, match="not a readable Group"):
            reader.read(block_ms=1)
        assert taken(reader)[1] == 1
        assert reader.read(block_ms=1) is None


# All of it, in any order


class Groups(RuleBasedStateMachine):
    """Workers and a trainer doing anything at any moment, beside a model of what must hold."""

    ahead = 3

    def __init__(self, section: RedisSection, run: str) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.client = connect(section)
        self.async_client = connect_async(section)
        self.keys = Keys(run)
        self.client.delete(*cast(list[bytes], self.client.keys(f"{{lorabridge:{run}}}:*")) or [b"none"])
        self.queues = [queue_of(self.async_client, self.keys, f"worker {n}", self.ahead) for n in range(2)]
        self.reader = GroupReader(self.client, self.keys, "trainer")
        self.claims: list[Claim] = []
        self.holder: dict[int, Claim] = {}  # who may deliver a group
        self.free: set[int] = set()  # groups whose lease has ended
        self.attempts: dict[int, int] = {}
        self.stream: list[int] = []
        self.in_hand: dict[str, int] = {}
        self.finished: list[str] = []
        self.started = self.done = 0

    def teardown(self) -> None:
        self.loop.run(self.async_client.aclose())
        self.loop.close()
        self.client.close()

    @rule(worker=st.integers(0, 1))
    def claim(self, worker: int) -> None:
        claim = self.loop.run(self.queues[worker].claim())
        if claim is None:
            assert not self.free
            assert self.started - self.done >= self.ahead
            return
        if self.free:
            assert claim.number in self.free
            self.free.remove(claim.number)
        else:
            assert claim.number == self.started
            assert self.started - self.done < self.ahead
            self.started += 1
        self.attempts[claim.number] = self.attempts.get(claim.number, 0) + 1
        assert claim.attempt == self.attempts[claim.number]
        self.holder[claim.number] = claim
        self.claims.append(claim)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), act=st.sampled_from(["deliver", "release", "abandon"]))
    def use_a_claim(self, data: st.DataObject, act: str) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        mine = self.holder.get(claim.number) == claim
        if act == "deliver":
            group = make_group(claim.number, claim.attempt, claim.worker, size=1)
            assert self.loop.run(self.queues[0].deliver(claim, group)) is mine
        else:
            self.loop.run(getattr(self.queues[0], act)(claim))
        if not mine:
            return
        del self.holder[claim.number]
        self.free.discard(claim.number)
        if act == "deliver":
            self.stream.append(claim.number)
        elif act == "release":
            self.free.add(claim.number)
        else:
            self.done += 1

    @precondition(lambda self: set(self.holder) - self.free)
    @rule(data=st.data())
    def a_lease_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.holder) - self.free)))
        expire(self.client, self.keys, number)
        self.free.add(number)

    @rule()
    def read(self) -> None:
        found = self.reader.read(block_ms=1)
        if found is None:
            return
        entry, group = found
        assert entry not in self.in_hand
        assert group.group in self.stream
        self.in_hand[entry] = group.group

    @rule()
    def an_answer_to_the_trainer_is_lost(self) -> None:
        self.client.xreadgroup(TRAINER_GROUP, "trainer", {self.keys.trajectories: ">"}, count=1)

    @rule()
    def the_trainer_starts_again(self) -> None:
        self.reader = GroupReader(self.client, self.keys, "trainer")
        self.in_hand.clear()

    @precondition(lambda self: self.in_hand or self.finished)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        entries = data.draw(st.lists(st.sampled_from([*self.in_hand, *self.finished]), min_size=1, max_size=3))
        news = {entry for entry in entries if entry in self.in_hand}
        assert self.reader.finish(entries) == len(news)
        for entry in news:
            del self.in_hand[entry]
            self.finished.append(entry)
        self.done += len(news)

    @rule()
    def everything_sent_can_be_finished(self) -> None:
        """Nothing is ever stuck: a trainer that goes on reading gets all there is."""
        while (found := self.reader.read(block_ms=1)) is not None:
            self.in_hand[found[0]] = found[1].group
        assert len(self.in_hand) + len(self.finished) == len(self.stream)

    @invariant()
    def a_group_entered_once_and_the_counts_are_right(self) -> None:
        numbers = [number for number, _ in entered(self.client, self.keys)]
        assert numbers == self.stream
        assert len(set(numbers)) == len(numbers)
        assert counts(self.client, self.keys) == (self.started, self.done)


def test_whatever_happens_in_whatever_order(redis_section: RedisSection, run_id: str) -> None:
    run_state_machine_as_test(
        lambda: Groups(redis_section, run_id),
        settings=hypothesis.settings(max_examples=15, stateful_step_count=25, deadline=None, database=None),
    )
