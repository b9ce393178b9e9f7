"""A worker: what it claims, samples, delivers, gives back and gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lorabridge.bridge.errors import (
    NotServed,
    RolloutsFailed,
    RunMismatch,
)
from lorabridge.bridge.events import Quarantine
from lorabridge.bridge.residency import EngineSpan
from lorabridge.rollout.generator import Completion
from tests.groups import counts
from tests.workers import Bench, until


async def test_a_worker_swaps_to_the_head_samples_and_delivers_whole_groups(bench: Bench) -> None:
    first = bench.publish(1)
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)  # as many as may run ahead
    for group in bench.groups():
        assert len(group.trajectories) == 2
        for trajectory in group.trajectories:
            (span,) = trajectory.spans
            assert (span.version, span.digest, span.start, span.end) == (1, first.digest, 0, 3)
            assert (trajectory.reward, trajectory.advantage, trajectory.instance) == (3.0, 0.0, "i")
    assert sorted(g.group for g in bench.groups()) == [0, 1, 2]
    assert bench.residents() == ["i:0", "i:1"]


async def test_it_follows_announcements_and_skips_to_the_newest(bench: Bench) -> None:
    bench.publish(1)
    async with bench.working():
        await until(lambda: bench.generator.serves == 1)
        bench.publish(2)
        await until(lambda: bench.generator.serves == 2)


async def test_a_redis_that_lost_the_head_is_repaired_from_the_store_and_followed(bench: Bench) -> None:
    bench.publish(1)
    bench.publish(2, announce=False)  # the store has it, Redis never heard or forgot
    async with bench.working():
        await until(lambda: bench.generator.serves == 2)


async def test_it_is_ready_while_a_generator_serves_the_policy(bench: Bench) -> None:
    async with bench.working():
        assert bench.status.answer("/readyz")[0] == 503
        bench.publish(1)
        await until(lambda: bench.status.answer("/readyz") == (200, "ready"))
        bench.generator.away = NotServed("it is gone", action="Look again")
        await until(lambda: bench.status.answer("/readyz") == (503, "waits for a generator that serves the policy"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: _with(c, spans=(EngineSpan("i:99", 0, 3),)), "no residency record"),
        (lambda c: _with(c, spans=(EngineSpan("default", 0, 3),)), "no residency record"),
        (lambda c: _with(c, spans=(EngineSpan("i:0", 0, 3),)), "does not serve"),
        (lambda c: _with(c, spans=(EngineSpan("i:1", 0, 2),)), "cover 2 of 3"),
        (lambda c: _with(c, spans=None), "no spans"),
        (lambda c: _with(c, logprobs=(-0.1,)), "logprobs"),
    ],
)
async def test_what_cannot_be_established_is_quarantined_with_its_reason_and_never_delivered(
    spoil: Callable[[Completion], Completion], reason: str, bench: Bench
) -> None:
    bench.publish(1)
    spoiled: list[Completion] = []

    def once(completion: Completion) -> Completion:
        if spoiled:
            return completion
        spoiled.append(completion)
        return spoil(completion)

    bench.generator.spoil = once
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
    (quarantine,) = [event for event in bench.events() if isinstance(event, Quarantine)]
    assert reason in quarantine.reason
    assert sorted(g.group for g in bench.groups()) == [0, 1, 2]  # it was tried again, under another attempt
    assert sorted(g.attempt for g in bench.groups()) == [1, 1, 2]


async def test_a_sample_that_the_generator_ended_is_not_delivered_and_not_its_groups_failure(bench: Bench) -> None:
    bench.publish(1)
    ended: list[Completion] = []

    def once(completion: Completion) -> Completion:
        if ended:
            return completion
        ended.append(completion)
        return _with(completion, finish_reason="abort")

    bench.generator.spoil = once
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
    assert {t.turns[0].finish_reason for group in bench.groups() for t in group.trajectories} == {"stop"}
    assert sorted(g.group for g in bench.groups()) == [0, 1, 2]
    assert bench.client.hlen(bench.keys.failures) == 0


async def test_a_prompt_that_cannot_be_sampled_is_given_up_at_once_and_the_rest_goes_on(bench: Bench) -> None:
    bench.rows = [{"prompt": "a" * 64}, {"prompt": "ab"}]
    bench.publish(1)
    async with bench.working():
        await until(lambda: bool(bench.groups()) and bool(bench.quarantines()))
        await until(lambda: counts(bench.client, bench.keys)[0] > 2)
    assert "64 tokens" in bench.quarantines()[0].reason
    assert bench.groups()[0].trajectories[0].turns[0].prompt_ids == (97, 98)


async def test_a_worker_that_can_sample_no_group_at_all_ends_and_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabridge.rollout.worker._PAUSE_AFTER_FAILURE_S", 0.01)

    def broken(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("answer")

    bench.reward, bench.ahead = broken, 100
    bench.publish(1)
    with pytest.raises(RolloutsFailed, match="KeyError: 'answer'"):
        async with asyncio.timeout(60):
            await bench.worker().run()


async def test_versions_of_an_earlier_trainer_are_not_served(bench: Bench) -> None:
    bench.publish(1)
    bench.run = msgspec.structs.replace(bench.run, epoch=bench.store.allocate_epoch("policy"))
    async with bench.working():
        await asyncio.sleep(0.5)
        assert bench.generator.serves == 0
        bench.publish(2)
        await until(lambda: bool(bench.groups()))
    assert {span.version for g in bench.groups() for t in g.trajectories for span in t.spans} == {2}


async def test_a_trainer_that_comes_back_as_another_run_is_refused(bench: Bench) -> None:
    bench.publish(1)
    worker = bench.worker()
    bench.run = msgspec.structs.replace(bench.run, epoch=bench.run.epoch + 1, num_generations=4)
    with pytest.raises(RunMismatch, match="num_generations"):
        async with asyncio.timeout(30):
            await worker.run()


async def test_a_worker_that_is_stopped_gives_back_what_it_had_claimed(bench: Bench) -> None:
    bench.publish(1)
    bench.generator.hold.clear()
    async with bench.working():
        await until(lambda: bench.client.hlen(bench.keys.holders) == 2)
    assert bench.client.hlen(bench.keys.holders) == 0
    bench.generator.hold.set()
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
    assert sorted(g.group for g in bench.groups()) == [0, 1, 2]


def _with(completion: Completion, **changes: Any) -> Completion:
    return msgspec.structs.replace(completion, **changes)


async def test_a_group_that_takes_long_is_its_workers_for_as_long_as_that_lives(bench: Bench) -> None:
    bench.lease_s, bench.ahead = 0.5, 1
    bench.publish(1)
    bench.generator.hold.clear()
    async with bench.working("one"):
        await until(lambda: bench.client.hlen(bench.keys.holders) == 1)
        async with bench.working("two"):
            await asyncio.sleep(1.5)  # three leases' time
            assert bench.client.hgetall(bench.keys.attempts) == {b"0": b"1"}
            bench.generator.hold.set()
            await until(lambda: len(bench.groups()) == 1)
    assert bench.groups()[0].worker == "one"


async def test_an_attempt_that_takes_too_long_is_counted_and_at_last_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorabridge.rollout.worker._PAUSE_AFTER_FAILURE_S", 0.01)
    bench.timeout_s, bench.ahead = 0.05, 1
    bench.publish(1)
    bench.generator.hold.clear()
    async with bench.working():
        await until(lambda: counts(bench.client, bench.keys)[0] > 1)
    assert "not done within 0.05 s" in bench.quarantines()[0].reason
    assert len(bench.quarantines()) >= 5
    assert bench.groups() == []
