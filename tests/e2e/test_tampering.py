"""Law 10 on the real engine: a slot that changed behind the plugin's back is sampled from no more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lorabridge.bridge.errors import Quarantined
from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.audit import audit
from lorabridge.bridge.replay.scorer import Scorer
from lorabridge.bridge.trajectory import Sampling
from lorabridge.rollout.generator import Generator
from tests.e2e.models import END, commit, make_adapter
from tests.e2e.server import Server
from tests.e2e.traffic import Traffic, generator_of, swap, trajectories_of

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def versions(tampered: Server, base: Path) -> list[Manifest]:
    return commit(tampered.store, base, "pair", [make_adapter(base, seed) for seed in (1, 2)])


async def _ends(generator: Generator, order: Path, notice: str, to: Manifest) -> None:
    """Have a slot changed and noticed, by a look or by the next swap, while a long sample is under way."""
    sampling = Sampling(max_tokens=1000)
    under_way = asyncio.create_task(generator.sample("pair", PROMPT, sampling, []))
    while (await generator.state()).running == 0:  # noqa: ASYNC110  (it is in another process)
        await asyncio.sleep(0.02)
    order.write_text("changed")
    if notice == "a look":
        assert "has changed since it was proven" in ((await generator.attest())["pair"] or "")
    else:
        with pytest.raises(Quarantined, match="has changed since it was proven"):
            await swap(generator, to)
    assert (await under_way).finish_reason == "abort"
    state = await generator.state()
    assert "has changed" in (state.quarantine or "")
    assert state.quarantined_ms is not None
    with pytest.raises(Quarantined):
        await generator.sample("pair", PROMPT, Sampling(max_tokens=1), [END])
    with pytest.raises(Quarantined):
        await generator.score("pair", ((1, 2, 3),))


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("notice", ["a look", "a swap"])
async def test_a_slot_that_changed_ends_what_it_samples_and_the_next_swap_heals(
    notice: str, tampered: Server, order: Path, base: Path, versions: list[Manifest]
) -> None:
    async with generator_of(tampered) as generator:
        await swap(generator, versions[0])
        assert (await generator.attest())["pair"] is None
        assert (await generator.state()).facts.kv_tokens > 1024
        await _ends(generator, order, notice, versions[1])
        order.unlink()

        await swap(generator, versions[1])
        assert (await generator.state()).quarantine is None
        assert (await generator.attest())["pair"] is None
        traffic = Traffic(generator, "pair", 1_000)
        await traffic.run()
    store = tampered.store
    report = audit(trajectories_of(traffic.turns, fingerprint(base).digest), store, Scorer(base, store))
    assert (report.refuted, report.unverifiable) == (0, 0), report
