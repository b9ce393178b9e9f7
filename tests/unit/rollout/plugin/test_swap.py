"""Laws 3, 4 and 10 on a fake engine that writes down what it is asked, and can fail at any step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.canary import Judgement, Logprobs
from lorabridge.bridge.errors import DigestMissing, Quarantined, SwapFailed
from lorabridge.bridge.residency import KvMode, Residency, Served
from lorabridge.rollout.plugin.swap import Outdated, Swapper
from lorabridge.rollout.plugin.vllm_engine import PlacementFailed
from lorabridge.rollout.wire import ScoreRequest, SwapRequest
from tests.factories import digest_of


class FakeEngine:
    """A slot per policy; ``failing`` names the calls that raise, by number of the placement or by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.slots: dict[str, str] = {}
        self.paused = False
        self.attested: dict[str, str] = {}
        self.fail_places: set[int] = set()
        self.fail: set[str] = set()
        self.tampered: set[str] = set()
        self.paths: list[Path] = []
        self.labels: list[str] = []
        self.sampled_unproven = False

    async def pause(self, kv: KvMode) -> None:
        self._call(f"pause {kv}")
        self.paused = True

    async def place(self, policy: str, folder: Path) -> None:
        assert self.paused, "a slot changes only while nothing is sampled"
        number = len(self.paths)
        self.paths.append(folder)
        # A load that fails late leaves a half-loaded slot behind.
        self.slots[policy] = "half"
        self.tampered.discard(policy)
        self._call(f"place {policy}")
        if number in self.fail_places:
            raise PlacementFailed("the slot held something else")
        self.slots[policy] = folder.name

    async def attest(self, policy: str) -> None:
        if policy in self.tampered:
            raise PlacementFailed("the slot has changed since it was proven")

    async def score(self, policy: str | None, sequences: Sequence[Sequence[int]]) -> Logprobs:
        return tuple((-1.0 if policy else -2.0,) * (len(row) - 1) for row in sequences)

    async def remove(self, policy: str) -> None:
        self._call(f"remove {policy}")
        self.slots.pop(policy, None)

    async def forget_prefixes(self) -> None:
        self._call("forget")

    async def label(self, label: str) -> None:
        self._call("label")
        self.labels.append(label)

    async def resume(self) -> None:
        self._call("resume")
        self.paused = False
        self.sampled_unproven |= "half" in self.slots.values()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.split()[0] in self.fail:
            raise RuntimeError(f"{name} failed")


class FakeAdapters:
    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.disk: OSError | None = None
        self.count = 0

    def link(self, digest: str) -> Path:
        if self.disk:
            raise self.disk
        if digest in self.missing:
            raise DigestMissing(f"{digest} is not in the store", action="Publish it")
        self.count += 1
        return Path(f"/loads/{self.count}/{digest}")

    def keep_only(self, digests: set[str]) -> None: ...


class FakeLog:
    """On record, with the labels that the engine had been given by then."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.records: list[Residency] = []
        self.before_label: list[bool] = []

    def append(self, record: Residency) -> None:
        self.before_label.append(record.label not in self.engine.labels)
        self.records.append(record)


class Bench:
    def __init__(self, kv: KvMode = "keep", slots: int = 2) -> None:
        self.engine, self.adapters = FakeEngine(), FakeAdapters()
        self.log = FakeLog(self.engine)
        self.swapper = Swapper(self.engine, self.adapters, self.log, generator="g", instance="i", kv=kv, slots=slots)

    def request(
        self, version: int, policy: str = "p", kv: KvMode | None = None, fence: int = 0, operation: str = ""
    ) -> SwapRequest:  # fmt: skip
        return SwapRequest(
            policy=policy, version=version, digest=digest_of(str(version)), instance="i",
            epoch=self.swapper.residency.epoch, kv=kv, fence=fence, operation=operation,
        )  # fmt: skip


def served(version: int) -> Served:
    return Served(version=version, digest=digest_of(str(version)))


async def test_a_swap_pauses_places_forgets_labels_and_only_then_resumes() -> None:
    bench = Bench()
    await bench.swapper.begin()
    reply = await bench.swapper.swap(bench.request(1))
    assert bench.engine.calls == ["label", "pause keep", "place p", "forget", "label", "resume"]
    assert reply.residency == bench.log.records[-1]
    assert reply.residency.serves == {"p": served(1)}
    assert bench.engine.labels == ["i:0", "i:1"]


async def test_what_an_epoch_serves_is_on_record_before_its_label_is_set() -> None:
    bench = Bench()
    await bench.swapper.begin()
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
    assert bench.swapper.residency.serves == {"p": served(1)}
    assert bench.swapper.residency.epoch == 2
    assert bench.engine.slots == {"p": digest_of("1")}
    assert not bench.engine.paused


async def test_a_first_placement_that_fails_leaves_the_policy_out() -> None:
    bench = Bench()
    bench.engine.fail_places = {0}
    with pytest.raises(SwapFailed):
        await bench.swapper.swap(bench.request(1))
    assert bench.swapper.residency.serves == {}
    assert bench.engine.slots == {}
    assert bench.swapper.quarantine is None


@pytest.mark.parametrize("lost", ["placement", "bytes"])
async def test_if_the_previous_adapter_cannot_be_put_back_the_generator_samples_no_more(lost: str) -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    await bench.swapper.swap(bench.request(9, policy="other"))
    bench.engine.fail_places = {2, 3}
    if lost == "bytes":
        bench.engine.fail_places = {2}
        bench.adapters.missing = {digest_of("1")}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(2))
    assert "remove p" in bench.engine.calls
    assert bench.swapper.residency.serves == {"other": served(9)}
    assert bench.swapper.quarantine is not None


async def test_a_quarantine_ends_with_a_swap_that_is_proven_and_everything_else_proven_again() -> None:
    bench = Bench(slots=3)
    for policy in ("p", "other", "third"):
        await bench.swapper.swap(bench.request(1, policy=policy))
    bench.engine.fail = {"label"}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(2))
    bench.engine.fail = set()
    assert "resume" not in bench.engine.calls[-2:]
    bench.engine.calls.clear()
    placed = len(bench.engine.paths)
    bench.engine.fail_places = {placed + 2}  # the third policy's adapter cannot be put in place again
    reply = await bench.swapper.swap(bench.request(3))
    assert bench.swapper.quarantine is None
    assert not bench.engine.paused
    assert not bench.engine.sampled_unproven
    assert bench.engine.calls[:4] == ["pause recompute", "place p", "place other", "place third"]
    assert "remove third" in bench.engine.calls
    assert reply.residency.serves == {"p": served(3), "other": served(1)}
    assert reply.residency.kv == "recompute"


async def test_a_quarantine_stays_when_the_swap_that_should_end_it_fails() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    bench.engine.fail_places = {1, 2, 3, 4}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(2))
    with pytest.raises((Quarantined, SwapFailed)):
        await bench.swapper.swap(bench.request(2))
    bench.engine.fail = {"pause"}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(2))
    assert bench.swapper.quarantine is not None
    bench.engine.fail, bench.engine.fail_places = set(), set()
    assert (await bench.swapper.swap(bench.request(2))).residency.serves == {"p": served(2)}


async def test_a_slot_that_changed_behind_our_back_is_not_just_overwritten() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    bench.engine.tampered = {"p"}
    with pytest.raises(Quarantined, match="changed since it was proven"):
        await bench.swapper.swap(bench.request(2))
    assert bench.swapper.residency.serves == {"p": served(1)}
    assert len(bench.engine.paths) == 1
    await bench.swapper.swap(bench.request(2))  # proven afresh, on KV of its own
    assert bench.swapper.residency.kv == "recompute"
    assert bench.swapper.quarantine is None


async def test_slots_are_looked_at_whenever_somebody_asks() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    await bench.swapper.swap(bench.request(1, policy="other"))
    assert await bench.swapper.attest() == {"p": None, "other": None}
    assert bench.swapper.quarantine is None
    bench.engine.tampered = {"other"}
    seen = await bench.swapper.attest()
    assert seen["p"] is None
    assert "changed" in (seen["other"] or "")
    assert "other" in (bench.swapper.quarantine or "")


@pytest.mark.parametrize("step", ["pause", "forget", "label", "remove"])
async def test_a_swap_that_breaks_off_leaves_the_engine_paused_and_in_quarantine(step: str) -> None:
    bench = Bench()
    if step == "remove":
        bench.engine.fail_places = {0}
    bench.engine.fail = {step}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(1))
    assert bench.swapper.quarantine is not None
    assert "resume" not in bench.engine.calls


async def test_a_digest_that_cannot_be_fetched_changes_nothing() -> None:
    bench = Bench()
    bench.adapters.missing = {digest_of("1")}
    with pytest.raises(DigestMissing):
        await bench.swapper.swap(bench.request(1))
    assert bench.engine.calls == []
    assert bench.swapper.residency.epoch == 0


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
    await bench.swapper.begin()
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
    assert {p: s.digest for p, s in bench.swapper.residency.serves.items()} == bench.engine.slots


async def test_a_controller_that_was_replaced_can_swap_no_more() -> None:
    bench = Bench()
    await bench.swapper.begin()
    await bench.swapper.swap(bench.request(1, fence=7))
    with pytest.raises(Outdated, match="lease 6 has been replaced by 7"):
        await bench.swapper.swap(bench.request(2, fence=6))
    with pytest.raises(Outdated):
        await bench.swapper.swap(bench.request(2))
    assert bench.swapper.residency.serves == {"p": served(1)}
    await bench.swapper.swap(bench.request(2, fence=8))
    assert (bench.swapper.residency.serves, bench.swapper.fence) == ({"p": served(2)}, 8)


async def test_an_operation_repeated_is_the_same_swap_also_while_it_runs() -> None:
    bench = Bench()
    await bench.swapper.begin()
    request = bench.request(1, fence=1, operation="once")
    first, second = await asyncio.gather(bench.swapper.swap(request), bench.swapper.swap(request))
    assert first == second == await bench.swapper.swap(request)
    assert len(bench.engine.paths) == 1
    await bench.swapper.swap(bench.request(2, fence=1, operation="twice"))
    with pytest.raises(Outdated):  # a late repetition of what was done before something else
        await bench.swapper.swap(request)


async def test_a_disk_that_fails_changes_nothing() -> None:
    bench = Bench()
    await bench.swapper.begin()
    await bench.swapper.swap(bench.request(1))
    bench.adapters.disk = PermissionError(13, "Permission denied")
    before = list(bench.engine.calls)
    with pytest.raises(SwapFailed, match="Permission denied"):
        await bench.swapper.swap(bench.request(2))
    assert bench.engine.calls == before
    assert bench.swapper.residency.serves == {"p": served(1)}


async def test_no_policy_takes_the_bases_name() -> None:
    bench = Bench()
    await bench.swapper.begin()
    with pytest.raises(SwapFailed, match="the base model is called"):
        await bench.swapper.swap(bench.request(1, policy="base"))


async def test_a_canary_that_does_not_match_quarantines_and_one_that_does_is_only_noted() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    good = Judgement(policy="p", version=1, verdict="match", floor=1e-6, error=1e-6, effect=1.0, smallest=1e-5)
    await bench.swapper.judged(good)
    assert (bench.swapper.canary, bench.swapper.quarantine) == (good, None)
    await bench.swapper.judged(msgspec.structs.replace(good, verdict="mismatch", error=1.0))
    assert "canary of p version 1 is off by 1 nats" in (bench.swapper.quarantine or "")


async def test_only_what_is_served_is_scored() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    scores = await bench.swapper.score(ScoreRequest(policy="p", sequences=((1, 2),)))
    assert (scores.adapter, scores.base, scores.label) == (((-1.0,),), ((-2.0,),), "i:1")
    with pytest.raises(Outdated):
        await bench.swapper.score(ScoreRequest(policy="other", sequences=((1, 2),)))
