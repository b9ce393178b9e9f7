"""Generators as a worker keeps them: swapped to the head, out and in again, one controller each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lorabridge.bridge.canary import Canary
from lorabridge.bridge.errors import (
    GeneratorUnreachable,
    PluginMissing,
    SwapFailed,
    TokenRefused,
)
from lorabridge.bridge.events import Judged
from lorabridge.bridge.residency import Served
from tests.groups import finish_all
from tests.workers import Bench, FakeGenerator, until


async def test_a_failed_swap_is_reported_and_tried_again(bench: Bench) -> None:
    bench.generator.fail_swaps = [
        SwapFailed("the slot held something else", action="See the log"),
        GeneratorUnreachable("it does not answer", action="Is it up?"),
    ]
    manifest = bench.publish(1)
    async with bench.working():
        await until(lambda: bool(bench.groups()))
    first, second = bench.quarantines()
    assert manifest.digest in first.subject
    assert "held something else" in first.reason
    assert "does not answer" in second.reason


async def test_a_failure_that_goes_on_is_said_once(bench: Bench) -> None:
    bench.generator.fail_swaps = [SwapFailed("no such digest", action="Look") for _ in range(3)]
    bench.publish(1)
    async with bench.working():
        await until(lambda: bool(bench.groups()))
    assert len(bench.quarantines()) == 1


async def test_while_samples_in_flight_leave_no_slot_it_goes_on_with_what_is_served_and_tries_again(
    bench: Bench,
) -> None:
    first = bench.publish(1)
    async with bench.working():
        await until(lambda: bench.generator.serves == 1)
        tries = len(bench.generator.fences)
        bench.generator.busy = True
        second = bench.publish(2)
        await until(lambda: len(bench.generator.fences) > tries + 3)
        finish_all(bench.client, bench.keys)
        await until(lambda: len(bench.groups()) > 3)
        bench.generator.busy = False
        await until(lambda: bench.generator.serves == 2)
    assert bench.quarantines() == []
    spans = [span for group in bench.groups()[:4] for t in group.trajectories for span in t.spans]
    assert {span.digest for span in spans} == {first.digest}
    assert bench.generator.records[-1].serves["policy"].digest == second.digest


async def test_a_sample_of_a_pinned_policy_is_of_the_adapter_that_the_server_names(bench: Bench) -> None:
    bench.generator.pinned = True
    first = bench.publish(1)
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
        second = bench.publish(2)
        await until(lambda: bench.generator.serves == 2)
        finish_all(bench.client, bench.keys)
        await until(lambda: len(bench.groups()) == 6)
    of = [{span.digest for t in group.trajectories for span in t.spans} for group in bench.groups()]
    assert (of[0], of[-1]) == ({first.digest}, {second.digest})


async def test_epochs_that_no_swap_was_answered_with_are_on_record_all_the_same(bench: Bench) -> None:
    bench.publish(1)
    async with bench.working():
        await until(lambda: bench.generator.serves == 1)
        bench.generator.fail_swaps = [SwapFailed("no room", action="Make some")]
        bench.publish(2)
        await until(lambda: bench.generator.serves == 2)
    assert bench.residents() == [record.label for record in bench.generator.records] == ["i:0", "i:1", "i:2", "i:3"]


async def test_what_an_earlier_worker_left_untold_is_on_record(bench: Bench) -> None:
    manifest = bench.publish(1)
    bench.generator.enter({"other": Served(version=4, digest=manifest.digest)})
    bench.generator.enter({"policy": Served(version=1, digest=manifest.digest)})
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
    assert bench.residents() == ["i:0", "i:1", "i:2"]


async def test_with_a_failed_swap_it_goes_on_sampling_from_what_is_served(bench: Bench) -> None:
    first = bench.publish(1)
    async with bench.working():
        await until(lambda: bench.generator.serves == 1)
        bench.generator.fail_swaps = [SwapFailed("no room", action="Make some") for _ in range(99)]
        bench.publish(2)
        before = len(bench.groups())
        await until(lambda: len(bench.quarantines()) == 1)
        finish_all(bench.client, bench.keys)
        await until(lambda: len(bench.groups()) > max(before, 3))
    assert {span.digest for group in bench.groups() for t in group.trajectories for span in t.spans} == {first.digest}


@pytest.mark.parametrize(
    "error",
    [
        TokenRefused("it refused the control token", action="Use the right one"),
        PluginMissing("a vLLM server without the plugin", action="Start it with `lorabridge serve`"),
    ],
)
async def test_a_generator_that_never_will_serve_ends_the_worker_with_its_reason(error: Any, bench: Bench) -> None:
    bench.generator.away = error
    bench.publish(1)
    with pytest.raises(type(error), match=error.problem):
        async with asyncio.timeout(30):
            await bench.worker().run()
    assert error.problem in bench.quarantines()[0].reason


async def test_a_generator_that_does_not_come_up_in_time_ends_the_worker(bench: Bench) -> None:
    bench.generator.away = GeneratorUnreachable("nobody there", action="Start it")
    bench.start_s = 0.1
    with pytest.raises(GeneratorUnreachable, match="nobody there"):
        async with asyncio.timeout(30):
            await bench.worker().run()
    assert bench.quarantines() == []  # one that is still coming up is no news


async def test_a_generator_that_restarts_is_trusted_again_only_after_it_has_the_head(bench: Bench) -> None:
    bench.publish(1)
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
        bench.generator.restart("j")
        finish_all(bench.client, bench.keys)
        await until(lambda: len(bench.groups()) == 6)
    later = bench.groups()[3:]
    assert {t.instance for group in later for t in group.trajectories} == {"j"}
    assert bench.residents() == ["i:0", "i:1", "j:0", "j:1"]
    assert bench.client.hlen(bench.keys.failures) == 0  # it was not the groups' doing


async def test_groups_are_not_given_up_while_their_generator_is_away(bench: Bench) -> None:
    bench.publish(1)
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
        bench.generator.away = GeneratorUnreachable("gone", action="Wait")
        finish_all(bench.client, bench.keys)
        await until(lambda: len(bench.quarantines()) == 1)
        bench.generator.away = None
        await until(lambda: len(bench.groups()) == 6)
    assert sorted(group.group for group in bench.groups()) == list(range(6))


async def test_the_other_generator_goes_on_when_one_is_gone(bench: Bench) -> None:
    bench.generators.append(FakeGenerator("http://other"))
    bench.ahead = 4
    bench.publish(1)
    async with bench.working():
        await until(lambda: len(bench.groups()) == 4)
        assert {t.generator for g in bench.groups() for t in g.trajectories} == {"http://generator", "http://other"}
        bench.generator.away = GeneratorUnreachable("gone", action="Wait")
        bench.publish(2)
        finish_all(bench.client, bench.keys)
        await until(lambda: len(bench.groups()) == 8)
    later = [t for group in bench.groups()[4:] for t in group.trajectories]
    assert {t.generator for t in later} == {"http://other"}


async def test_a_generator_has_one_controller_and_a_fence_that_only_rises(bench: Bench) -> None:
    bench.publish(1)
    async with bench.working("one", "two"):
        await until(lambda: bench.generator.serves == 1)
        bench.publish(2)
        await until(lambda: bench.generator.serves == 2)
    assert len(set(bench.generator.fences)) == 1
    async with bench.working("three"):
        bench.publish(3)
        await until(lambda: bench.generator.serves == 3)
    assert bench.generator.fences[-1] > bench.generator.fences[0]
    assert bench.generator.fences == sorted(bench.generator.fences)


async def test_a_redis_that_forgot_the_fence_gives_one_above_what_the_generator_has_seen(bench: Bench) -> None:
    bench.generator.fences = [41]
    bench.publish(1)
    async with bench.working():
        await until(lambda: bench.generator.serves == 1)
    assert bench.generator.fences[-1] == 42


CANARY = Canary(sequences=((1, 2),), adapter=((-1.0,),), base=((-2.0,),), dtype="float32")


async def test_a_version_with_a_canary_is_held_against_it_and_what_it_said_is_on_record(bench: Bench) -> None:
    bench.generator.scores = (((-1.0,),), ((-2.0,),))
    bench.publish(1, canary=CANARY)
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
    (judgement,) = bench.generator.judgements
    assert (judgement.verdict, judgement.version) == ("match", 1)
    (event,) = [event for event in bench.events() if isinstance(event, Judged)]
    assert (event.generator, event.label, event.judgement) == (bench.generator.url, "i:1", judgement)


async def test_a_generator_whose_canary_does_not_match_gets_no_work_until_one_does(bench: Bench) -> None:
    bench.generator.scores = (((-2.0,),), ((-2.0,),))  # the base answers for the adapter
    bench.publish(1, canary=CANARY)
    async with bench.working():
        await until(lambda: bool(bench.quarantines()))
        assert "canary of policy version 1 is off by 1 nats" in bench.quarantines()[0].reason
        bench.publish(2, canary=CANARY)  # one that can tell is held against it as well
        await until(lambda: bench.generator.serves == 2 and len(bench.generator.judgements) > 1)
        assert bench.groups() == []
        bench.generator.scores = (((-1.0,),), ((-2.0,),))
        bench.publish(3, canary=CANARY)
        await until(lambda: len(bench.groups()) == 3)
    verdicts = [judgement.verdict for judgement in bench.generator.judgements]
    assert (set(verdicts[:-1]), verdicts[-1]) == ({"mismatch"}, "match")
    assert {span.version for g in bench.groups() for t in g.trajectories for span in t.spans} == {3}


async def test_what_did_not_match_proves_itself_on_the_version_it_failed_on_when_the_head_cannot_tell(
    bench: Bench,
) -> None:
    """Training waits for groups, so no later version with a canary need ever come."""
    bench.generator.scores = (((-2.0,),), ((-2.0,),))
    bench.publish(1, canary=CANARY)
    async with bench.working():
        await until(lambda: bool(bench.quarantines()))
        bench.publish(2)
        await until(lambda: len(bench.generator.judgements) > 2)
        assert bench.groups() == []
        bench.generator.scores = (((-1.0,),), ((-2.0,),))
        await until(lambda: len(bench.groups()) == 3)
    assert {judgement.version for judgement in bench.generator.judgements} == {1}
    assert {span.version for g in bench.groups() for t in g.trajectories for span in t.spans} == {2}


async def test_a_canary_that_nobody_came_to_is_made_up_for_and_one_that_was_judged_is_not_again(bench: Bench) -> None:
    bench.generator.scores = (((-1.0,),), ((-2.0,),))
    manifest = bench.publish(1, canary=CANARY)
    bench.generator.enter({"policy": Served(version=1, digest=manifest.digest)})  # by a worker that died then
    for turn, name in enumerate(("one", "two"), 1):
        async with bench.working(name):
            await until(lambda: len(bench.generator.judgements) == 1)
            await until(lambda: len(bench.groups()) == 3 * turn)  # noqa: B023
        finish_all(bench.client, bench.keys)
    assert len(bench.generator.judgements) == 1
