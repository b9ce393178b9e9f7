"""Law 10 on a fake engine when something fails: what is sampled no more, and how that ends."""

from __future__ import annotations

import msgspec
import pytest

from lorabridge.bridge.canary import Judgement
from lorabridge.bridge.errors import Quarantined, SwapFailed
from lorabridge.rollout.plugin.swap import Outdated
from lorabridge.rollout.wire import ScoreRequest
from tests.factories import digest_of
from tests.unit.rollout.plugin.bench import Bench, served


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
    assert bench.instance.residency.serves == {"other": served(9)}
    assert bench.instance.quarantine is not None


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
    assert bench.instance.quarantine is None
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
    assert bench.instance.quarantine is not None
    bench.engine.fail, bench.engine.fail_places = set(), set()
    assert (await bench.swapper.swap(bench.request(2))).residency.serves == {"p": served(2)}


async def test_a_slot_that_changed_behind_our_back_is_not_just_overwritten() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    bench.engine.tampered = {"p"}
    with pytest.raises(Quarantined, match="changed since it was proven"):
        await bench.swapper.swap(bench.request(2))
    assert bench.instance.residency.serves == {"p": served(1)}
    assert len(bench.engine.paths) == 1
    assert bench.engine.calls[-2:] == ["pause keep", "abort p"]
    await bench.swapper.swap(bench.request(2))  # proven afresh, on KV of its own
    assert bench.instance.residency.kv == "recompute"
    assert bench.instance.quarantine is None


async def test_slots_are_looked_at_whenever_somebody_asks() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    await bench.swapper.swap(bench.request(1, policy="other"))
    assert await bench.swapper.attest() == {"p": None, "other": None}
    assert bench.instance.quarantine is None
    bench.engine.tampered = {"other"}
    seen = await bench.swapper.attest()
    assert seen["p"] is None
    assert "changed" in (seen["other"] or "")
    assert "other" in (bench.instance.quarantine or "")
    # Nothing more is sampled, and who has tokens from that slot, and from that one alone, is told.
    assert bench.engine.calls[-2:] == ["pause keep", "abort other"]
    await bench.swapper.swap(bench.request(2))
    assert await bench.swapper.attest() == {"p": None, "other": None}
    assert (bench.instance.quarantine, bench.engine.paused) == (None, False)


async def test_a_quarantine_says_since_when_whatever_else_fails_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 100))
    monkeypatch.setattr("lorabridge.rollout.plugin.instance._now_ms", lambda: next(clock))
    bench = Bench()
    seen = [bench.instance.quarantined_ms]
    bench.engine.fail = {"pause"}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(1))
    seen.append(bench.instance.quarantined_ms)
    bench.engine.fail = {"label"}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(1))
    assert "label failed" in (bench.instance.quarantine or "")
    seen.append(bench.instance.quarantined_ms)
    bench.engine.fail = set()
    await bench.swapper.swap(bench.request(1))
    seen.append(bench.instance.quarantined_ms)
    bench.engine.tampered = {"p"}
    await bench.swapper.attest()
    seen.append(bench.instance.quarantined_ms)
    before, since, still, healed, again = seen
    assert (before, still, healed) == (None, since, None)
    assert 0 < (since or 0) < (again or 0)


async def test_nothing_is_scored_in_quarantine_where_it_would_wait_for_ever() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    bench.engine.tampered = {"p"}
    await bench.swapper.attest()
    with pytest.raises(Quarantined, match="changed"):
        await bench.swapper.score(ScoreRequest(policy="p", sequences=((1, 2),)))


@pytest.mark.parametrize("step", ["pause", "forget", "label", "remove"])
async def test_a_swap_that_breaks_off_leaves_the_engine_paused_and_in_quarantine(step: str) -> None:
    bench = Bench()
    if step == "remove":
        bench.engine.fail_places = {0}
    bench.engine.fail = {step}
    with pytest.raises(Quarantined):
        await bench.swapper.swap(bench.request(1))
    assert bench.instance.quarantine is not None
    assert "resume" not in bench.engine.calls


async def test_a_canary_that_does_not_match_quarantines_and_one_that_does_is_only_noted() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    good = Judgement(policy="p", version=1, verdict="match", floor=1e-6, error=1e-6, effect=1.0, smallest=1e-5)
    await bench.swapper.judged(good)
    assert (bench.swapper.canary, bench.instance.quarantine) == (good, None)
    await bench.swapper.judged(msgspec.structs.replace(good, verdict="mismatch", error=1.0))
    assert "canary of p version 1 is off by 1 nats" in (bench.instance.quarantine or "")


async def test_only_what_is_served_is_scored() -> None:
    bench = Bench()
    await bench.swapper.swap(bench.request(1))
    scores = await bench.swapper.score(ScoreRequest(policy="p", sequences=((1, 2),)))
    assert (scores.adapter, scores.base, scores.label) == (((-1.0,),), ((-2.0,),), "i:1")
    with pytest.raises(Outdated):
        await bench.swapper.score(ScoreRequest(policy="other", sequences=((1, 2),)))
