"""Laws 4, 8 and 10 on the real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from lorabridge.bridge.canary import judge
from lorabridge.bridge.errors import GeneratorError, SwapFailed
from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.audit import audit
from lorabridge.bridge.replay.scorer import Scorer
from lorabridge.bridge.trajectory import Sampling
from lorabridge.rollout.generator import Moved
from lorabridge.rollout.wire import GENERATE
from tests.e2e.models import END, commit, make_adapter, make_base, make_canary
from tests.e2e.server import Server
from tests.e2e.traffic import Traffic, generator_of, swap, trajectories_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8]
SAMPLING = Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def misfit(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """An adapter for another, wider base, which the publisher's own checks cannot tell."""
    wider = make_base(tmp_path_factory.mktemp("wider"), hidden=256)
    return commit(server.store, wider, "misfit", [make_adapter(wider, 1)])[0]


async def test_a_failed_swap_puts_the_previous_adapter_back_under_traffic(
    server: Server, base: Path, pair: list[Manifest], misfit: Manifest
) -> None:
    as_pair = _renamed(misfit, "pair")
    async with generator_of(server) as generator:
        before = await swap(generator, pair[1])
        traffic = Traffic(generator, "pair", 4_000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            failures = 0
            while not traffic.done:
                await asyncio.sleep(0.5)
                with pytest.raises(SwapFailed):
                    await swap(generator, as_pair)
                failures += 1
        now = await generator.state()
    assert now.quarantine is None
    assert now.residency.serves == before.serves
    assert now.residency.epoch == before.epoch + failures
    report = audit(trajectories_of(traffic.turns, fingerprint(base).digest), server.store, Scorer(base, server.store))
    assert (report.refuted, report.unverifiable) == (0, 0), report


async def test_slots_are_attested_under_traffic_and_disturb_nothing(
    server: Server, base: Path, pair: list[Manifest]
) -> None:
    async with generator_of(server) as generator:
        await swap(generator, pair[0])
        traffic = Traffic(generator, "pair", 3_000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            while not traffic.done:
                assert set((await generator.attest()).values()) == {None}
                await asyncio.sleep(0.2)
        assert (await generator.state()).quarantine is None
    report = audit(trajectories_of(traffic.turns, fingerprint(base).digest), server.store, Scorer(base, server.store))
    assert (report.refuted, report.unverifiable) == (0, 0), report


async def test_a_canary_matches_what_is_served_and_nothing_else(
    server: Server, base: Path, pair: list[Manifest]
) -> None:
    canary = make_canary(base, 1)
    async with generator_of(server) as generator:
        await swap(generator, pair[0])
        scores = await generator.score("pair", canary.sequences)
        right = judge(canary, "pair", 1, scores.adapter, scores.base, "float32")
        assert right.verdict == "match", right
        assert right.error < 1e-4 < 0.1 < right.effect, right
        # A publication that was withheld: version 1 is announced, and the slot still holds version 2.
        await swap(generator, pair[1])
        scores = await generator.score("pair", canary.sequences)
        assert judge(canary, "pair", 1, scores.adapter, scores.base, "float32").verdict == "mismatch"
        # The base answers for the adapter.
        assert judge(canary, "pair", 1, scores.base, scores.base, "float32").verdict == "mismatch"


async def test_a_first_swap_that_fails_leaves_the_policy_unserved(server: Server, misfit: Manifest) -> None:
    async with generator_of(server) as generator:
        with pytest.raises(SwapFailed):
            await swap(generator, misfit)
        assert "misfit" not in (await generator.state()).residency.serves
        with pytest.raises(GeneratorError, match="no policy 'misfit'"):
            await generator.sample("misfit", PROMPT, SAMPLING, [END])


async def test_a_digest_that_is_not_in_the_store_is_refused_and_nothing_pauses(
    server: Server, pair: list[Manifest]
) -> None:
    async with generator_of(server) as generator:
        before = await swap(generator, pair[0])
        with pytest.raises(SwapFailed, match="not in"):
            await swap(generator, _renamed(pair[0], "pair", digest="sha256:" + "0" * 64))
        assert (await generator.state()).residency == before


async def test_a_swap_for_another_epoch_or_instance_is_refused(server: Server, pair: list[Manifest]) -> None:
    async with generator_of(server) as generator:
        now = await swap(generator, pair[0])
        again = await swap(generator, pair[0])
        assert again == now  # asking for what is served does nothing
        await swap(generator, pair[1])
        with pytest.raises(Moved):
            await generator.swap(pair[0], now)


async def test_the_base_never_answers_for_a_policy(server: Server, pair: list[Manifest]) -> None:
    async with generator_of(server) as generator:
        await swap(generator, pair[0])
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as public:
        for model in (None, "base", "unknown", server.settings.model.path, 7, {"name": "pair"}):
            reply = await public.post(GENERATE, json={**body, "model": model})
            assert reply.status_code in (400, 404), (model, reply.text)
        assert (await public.post(GENERATE, json=body)).status_code == 400
        assert (await public.post(GENERATE, json={**body, "model": "pair"})).status_code == 200


def _renamed(manifest: Manifest, policy: str, **changes: object) -> Manifest:
    return msgspec.structs.replace(manifest, policy=policy, **changes)
