"""Laws 3, 4 and 10 on a fake engine: what a swap does, in which order, and what is refused."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.errors import DigestMissing, Quarantined, SwapFailed
from lorabridge.bridge.residency import KvMode
from lorabridge.rollout.plugin.swap import Outdated
from lorabridge.rollout.wire import SwapRequest
from tests.factories import digest_of
from tests.unit.rollout.plugin.bench import Bench, served


async def test_a_swap_pauses_places_forgets_labels_and_only_then_resumes() -> None:
    bench = Bench()
    await bench.instance.begin()
    reply = await bench.swapper.swap(bench.request(1))
    assert bench.engine.calls == ["label", "pause keep", "place p", "forget", "label", "resume"]
    assert reply.residency == bench.log.records[-1]
    assert reply.residency.serves == {"p": served(1)}
    assert bench.engine.labels == ["i:0", "i:1"]


async def test_what_an_epoch_serves_is_on_record_before_its_label_is_set() -> None:
    bench = Bench()
    await bench.instance.begin()
    for version in (1, 2, 3):
        await bench.swapper.swap(bench.request(version))
    assert bench.log.before_label == [True] * 4


async def test_recompute_forgets_nothing_since_the_pause_dropped_all() -> None:
    bench = Bench(kv="recompute")
    await bench.swapper.swap(bench.request(1))
    assert bench.engine.calls == ["pause recompute", "place p", "label", "resume"]
    await bench.swapper.swap(bench.request(2, kv="keep"))
    assert [record.kv for record in bench.log.records] == ["recompute", "keep"]


async def test_every_load_has_a_path_of_its_own() -> None:
    bench = Bench()
    for version in (1, 2, 1, 2):
        await bench.swapper.swap(bench.request(version))
    bench.engine.fail_places = {4}
    with pytest.raises(SwapFailed):
        await bench.swapper.swap(bench.request(3))
    assert len(set(bench.engine.paths)) == len(bench.engine.paths) == 6


async def test_what_is_served_already_is_not_swapped_again() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    calls = list(bench.engine.calls)
    again = SwapRequest(policy="p", version=1, digest=digest_of("1"), instance="i", epoch=0)
    assert (await bench.swapper.swap(again)).phases_ms == {}
    assert bench.engine.calls == calls


@pytest.mark.parametrize("change", [{"instance": "other"}, {"epoch": 7}])
async def test_another_instance_or_epoch_is_refused_before_anything_happens(change: dict[str, object]) -> None:
    bench = Bench()
    with pytest.raises(Outdated):
        await bench.swapper.swap(msgspec.structs.replace(bench.request(1), **change))
    assert bench.engine.calls == []


async def test_a_policy_too_many_is_refused() -> None:
    bench = Bench(slots=1)
    await bench.swapper.swap(bench.request(1))
    with pytest.raises(SwapFailed, match="slots"):
        await bench.swapper.swap(bench.request(1, policy="q"))
    await bench.swapper.swap(bench.request(2))


async def test_a_failed_placement_puts_the_previous_adapter_back_and_proves_it() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    bench.engine.fail_places = {1}
    with pytest.raises(SwapFailed, match="held something else"):
        await bench.swapper.swap(bench.request(2))
    assert bench.engine.calls.count("place p") == 3
    assert bench.instance.residency.serves == {"p": served(1)}
    assert bench.instance.residency.epoch == 2
    assert bench.engine.slots == {"p": digest_of("1")}
    assert not bench.engine.paused


async def test_a_first_placement_that_fails_leaves_the_policy_out() -> None:
    bench = Bench()
    bench.engine.fail_places = {0}
    with pytest.raises(SwapFailed):
        await bench.swapper.swap(bench.request(1))
    assert bench.instance.residency.serves == {}
    assert bench.engine.slots == {}
    assert bench.instance.quarantine is None


async def test_a_digest_that_cannot_be_fetched_changes_nothing() -> None:
    bench = Bench()
    bench.adapters.missing = {digest_of("1")}
    with pytest.raises(DigestMissing):
        await bench.swapper.swap(bench.request(1))
    assert bench.engine.calls == []
    assert bench.instance.residency.epoch == 0


@given(
    st.lists(st.tuples(st.sampled_from("pq"), st.integers(1, 4)), max_size=12),
    st.sets(st.integers(0, 20)),
    st.sampled_from(["keep", "recompute"]),
)
async def test_whatever_fails_no_slot_is_sampled_from_that_was_not_proven(
    swaps: list[tuple[str, int]], failures: set[int], kv: KvMode
) -> None:
    bench = Bench(kv=kv)
    bench.engine.fail_places = failures
    await bench.instance.begin()
    for policy, version in swaps:
        try:
            await bench.swapper.swap(bench.request(version, policy))
        except SwapFailed:
            pass
        except Quarantined:
            break
    assert not bench.engine.sampled_unproven
    assert all(bench.log.before_label)
    assert [r.label for r in bench.log.records] == bench.engine.labels
    assert {p: s.digest for p, s in bench.instance.residency.serves.items()} == bench.engine.slots


async def test_a_controller_that_was_replaced_can_swap_no_more() -> None:
    bench = Bench()
    await bench.instance.begin()
    await bench.swapper.swap(bench.request(1, fence=7))
    with pytest.raises(Outdated, match="lease 6 has been replaced by 7"):
        await bench.swapper.swap(bench.request(2, fence=6))
    with pytest.raises(Outdated):
        await bench.swapper.swap(bench.request(2))
    assert bench.instance.residency.serves == {"p": served(1)}
    await bench.swapper.swap(bench.request(2, fence=8))
    assert (bench.instance.residency.serves, bench.swapper.fence) == ({"p": served(2)}, 8)


async def test_an_operation_repeated_is_the_same_swap_also_while_it_runs() -> None:
    bench = Bench()
    await bench.instance.begin()
    request = bench.request(1, fence=1, operation="once")
    first, second = await asyncio.gather(bench.swapper.swap(request), bench.swapper.swap(request))
    assert first == second == await bench.swapper.swap(request)
    assert len(bench.engine.paths) == 1
    await bench.swapper.swap(bench.request(2, fence=1, operation="twice"))
    with pytest.raises(Outdated):  # a late repetition of what was done before something else
        await bench.swapper.swap(request)


async def test_a_disk_that_fails_changes_nothing() -> None:
    bench = Bench()
    await bench.instance.begin()
    await bench.swapper.swap(bench.request(1))
    bench.adapters.disk = PermissionError(13, "Permission denied")
    before = list(bench.engine.calls)
    with pytest.raises(SwapFailed, match="Permission denied"):
        await bench.swapper.swap(bench.request(2))
    assert bench.engine.calls == before
    assert bench.instance.residency.serves == {"p": served(1)}


async def test_no_policy_takes_the_bases_name() -> None:
    bench = Bench()
    await bench.instance.begin()
    with pytest.raises(SwapFailed, match="the base model is called"):
        await bench.swapper.swap(bench.request(1, policy="base"))
