"""Laws 5 and 6 on every stream backend, for workers and a trainer that do anything at any moment."""

from __future__ import annotations

import asyncio
from typing import ClassVar, cast

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.stream.connection import connect, connect_async
from lorabridge.bridge.stream.groups import Claim
from lorabridge.bridge.stream.keys import TRAINER_GROUP, Keys
from tests.factories import make_group
from tests.groups import counts, entered, expire, queue_of, reader_of


class Groups(RuleBasedStateMachine):
    """Workers and a trainer doing anything at any moment, beside a model of what must hold."""

    ahead = 3
    section: ClassVar[RedisSection]
    run: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        section, run = self.section, self.run
        self.loop = asyncio.Runner()
        self.client = connect(section)
        self.async_client = connect_async(section)
        self.keys = Keys(run)
        self.client.delete(*cast(list[bytes], self.client.keys(f"{{lorabridge:{run}}}:*")) or [b"none"])
        self.queues = [queue_of(self.async_client, self.keys, f"worker {n}", self.ahead) for n in range(2)]
        self.reader = reader_of(self.client, self.keys)
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
        self.reader = reader_of(self.client, self.keys)
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
        assert counts(self.client, self.keys) == (self.started, self.started - self.done)


def test_whatever_happens_in_whatever_order(redis_section: RedisSection, run_id: str) -> None:
    class HereGroups(Groups):
        section, run = redis_section, run_id

    run_state_machine_as_test(
        HereGroups,
        settings=hypothesis.settings(max_examples=12, stateful_step_count=20, deadline=None, database=None),
    )
