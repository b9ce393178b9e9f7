"""Pinned swaps on a fake engine: no pause, samples stay on what they began with, the old one leaves when it is idle."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.errors import Quarantined, SlotsBusy, SwapFailed
from lorabridge.rollout.wire import ScoreRequest
from tests.factories import digest_of
from tests.unit.rollout.plugin.bench import Bench, served


@pytest.fixture
def bench() -> Bench:
    return Bench(mode="pinned")


def slot(version: int) -> str:
    return digest_of(str(version))


async def settle(bench: Bench) -> None:
    """Until what was idle has left."""
    while bench.swapper._leaving:
        await asyncio.gather(*bench.swapper._leaving)


async def test_nothing_pauses_and_new_samples_get_the_new_one_only_after_its_label(bench: Bench) -> None:
    await bench.instance.begin()
    await bench.swapper.swap(bench.request(1))
    assert bench.engine.calls == ["label", f"place {slot(1)}", "label"]
    assert bench.swapper.begin("p") == slot(1)
    seen: list[str] = []

    def watch() -> None:
        seen.append(bench.swapper.begin("p"))
        bench.swapper.end(seen[-1])

    bench.engine.on_label = watch
    await bench.swapper.swap(bench.request(2))
    assert seen == [slot(1)]
    assert bench.swapper.begin("p") == slot(2)
    assert bench.log.before_label == [True, True, True]


async def test_a_record_says_every_version_that_is_in_a_slot(bench: Bench) -> None:
    await bench.swapper.swap(bench.request(1))
    began = bench.swapper.begin("p")
    reply = await bench.swapper.swap(bench.request(2))
    assert reply.residency.serves == {"p": served(2)}
    assert reply.residency.pinned == {"p": (served(1), served(2))}
    assert set(bench.engine.slots) == {slot(1), slot(2)}
    bench.swapper.end(began)
    await settle(bench)
    assert set(bench.engine.slots) == {slot(2)}
    reply = await bench.swapper.swap(bench.request(3))
    assert reply.residency.pinned == {"p": (served(2), served(3))}
    assert set(bench.engine.slots) == {slot(3)}  # nobody was on version 2


async def test_while_every_slot_has_samples_in_flight_a_swap_waits(bench: Bench) -> None:
    await bench.swapper.swap(bench.request(1))
    began = bench.swapper.begin("p")
    await bench.swapper.swap(bench.request(2))
    calls = list(bench.engine.calls)
    with pytest.raises(SlotsBusy, match="all 2 slots"):
        await bench.swapper.swap(bench.request(3))
    assert bench.engine.calls == calls
    bench.swapper.end(began)
    await settle(bench)
    await bench.swapper.swap(bench.request(3))
    assert bench.swapper.begin("p") == slot(3)


async def test_policies_that_stay_leave_no_room_for_another(bench: Bench) -> None:
    for policy in ("p", "q"):
        await bench.swapper.swap(bench.request(1 if policy == "p" else 2, policy=policy))
    with pytest.raises(SwapFailed, match="all 2 slots are taken"):
        await bench.swapper.swap(bench.request(3, policy="r"))


async def test_a_placement_that_fails_leaves_everything_as_it_was(bench: Bench) -> None:
    await bench.swapper.swap(bench.request(1))
    began = bench.swapper.begin("p")
    bench.engine.fail_places = {1}
    with pytest.raises(SwapFailed, match="held something else"):
        await bench.swapper.swap(bench.request(2))
    assert bench.instance.residency.serves == {"p": served(1)}
    assert bench.engine.slots == {began: slot(1)}
    assert "pause keep" not in bench.engine.calls
    assert bench.instance.quarantine is None


async def test_going_back_to_a_version_that_is_still_in_loads_nothing_but_proves_it(bench: Bench) -> None:
    await bench.swapper.swap(bench.request(1))
    bench.swapper.begin("p")
    await bench.swapper.swap(bench.request(2))
    placed = len(bench.engine.paths)
    reply = await bench.swapper.swap(bench.request(3, digest=slot(1)))
    assert len(bench.engine.paths) == placed
    assert reply.residency.serves["p"].version == 3
    bench.swapper.begin("p")
    await bench.swapper.swap(bench.request(2))
    bench.engine.tampered = {slot(1)}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(4, digest=slot(1)))
    assert f"abort {slot(1)}" in bench.engine.calls


async def test_one_policys_update_touches_no_other(bench: Bench) -> None:
    bench = Bench(mode="pinned", slots=3)
    await bench.swapper.swap(bench.request(1))
    await bench.swapper.swap(bench.request(2, policy="q"))
    q = bench.swapper.begin("q")
    bench.engine.calls.clear()
    reply = await bench.swapper.swap(bench.request(3))
    assert [call for call in bench.engine.calls if q in call] == []
    assert reply.residency.serves == {"p": served(3), "q": served(2)}
    assert reply.residency.pinned["q"] == (served(2),)


async def test_two_policies_with_the_same_bytes_share_a_slot(bench: Bench) -> None:
    await bench.swapper.swap(bench.request(1))
    await bench.swapper.swap(bench.request(1, policy="q"))
    assert len(bench.engine.paths) == 1
    assert bench.swapper.begin("q") == bench.swapper.begin("p") == slot(1)
    bench.swapper.end(slot(1))
    bench.swapper.end(slot(1))
    await bench.swapper.swap(bench.request(2))
    assert set(bench.engine.slots) == {slot(1), slot(2)}


async def test_a_slot_that_changed_while_it_drained_is_found_when_it_leaves(bench: Bench) -> None:
    await bench.swapper.swap(bench.request(1))
    began = bench.swapper.begin("p")
    await bench.swapper.swap(bench.request(2))
    bench.engine.tampered = {began}
    bench.swapper.end(began)
    await settle(bench)
    assert "changed since it was proven" in (bench.instance.quarantine or "")
    assert bench.engine.paused


async def test_a_quarantine_ends_with_everything_proven_again_and_what_was_leaving_gone(bench: Bench) -> None:
    await bench.swapper.swap(bench.request(1))
    bench.swapper.begin("p")
    await bench.swapper.swap(bench.request(2))
    bench.swapper.begin("p")
    bench.engine.tampered = {slot(2)}
    assert (await bench.swapper.attest())[slot(2)]
    bench.engine.calls.clear()
    reply = await bench.swapper.swap(bench.request(3))
    assert bench.engine.calls[:4] == ["pause recompute", f"remove {slot(1)}", f"place {slot(3)}", f"place {slot(2)}"]
    assert bench.instance.quarantine is None
    assert not bench.engine.paused
    assert reply.residency.kv == "recompute"
    assert reply.residency.serves == {"p": served(3)}


async def test_how_a_policy_is_swapped_does_not_change_under_its_samples(bench: Bench) -> None:
    bench = Bench(mode="pinned", slots=3)
    await bench.swapper.swap(bench.request(1))
    await bench.swapper.swap(bench.request(2, policy="q", mode="in_flight"))
    assert set(bench.engine.slots) == {slot(1), "q"}
    for policy, mode in (("p", "in_flight"), ("q", "pinned")):
        with pytest.raises(SwapFailed, match="is not swapped"):
            await bench.swapper.swap(bench.request(3, policy=policy, mode=mode))
    await bench.swapper.swap(bench.request(3, policy="q"))
    assert bench.instance.residency.pinned == {"p": (served(1),)}


async def test_scores_are_those_of_what_new_samples_get(bench: Bench) -> None:
    await bench.swapper.swap(bench.request(1))
    scores = await bench.swapper.score(ScoreRequest(policy="p", sequences=((1, 2),)))
    assert scores.adapter != scores.base


STEPS = st.lists(
    st.tuples(st.sampled_from(["swap", "begin", "end", "tamper"]), st.sampled_from("pq"), st.integers(1, 4)),
    max_size=25,
)


@given(STEPS, st.integers(2, 4), st.sets(st.integers(0, 15), max_size=3))
async def test_in_any_order_a_sample_keeps_the_bytes_that_it_began_with(
    steps: list[tuple[str, str, int]], slots: int, failures: set[int]
) -> None:
    bench = Bench(mode="pinned", slots=slots)
    bench.engine.fail_places = failures
    running: list[str] = []
    for step, policy, version in steps:
        match step:
            case "swap":
                try:
                    await bench.swapper.swap(bench.request(version, policy))
                except (SwapFailed, Quarantined):
                    pass
            case "begin" if policy in bench.instance.residency.serves and not bench.instance.quarantine:
                running.append(bench.swapper.begin(policy))
            case "end" if running:
                bench.swapper.end(running.pop(version % len(running)))
            case "tamper":
                bench.engine.tampered |= set(list(bench.engine.slots)[:1]) if version == 4 else set()
        await settle(bench)
        if bench.engine.aborted & set(running) or bench.instance.quarantine:
            running = [name for name in running if name not in bench.engine.aborted]
        assert all(bench.engine.slots.get(name) == name for name in running), "a sample's adapter is where it was"
        record = bench.instance.residency
        assert set(running) <= record.digests, "and on record"
        assert {served.digest for served in record.serves.values()} <= set(bench.engine.slots)
        assert {slot.name for slot in bench.instance.slots.held} == set(bench.engine.slots)
    assert all(bench.log.before_label)
    assert not bench.engine.sampled_unproven
