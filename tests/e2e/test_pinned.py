"""Pinned swaps on the real engine: a sample ends on the adapter it began with, and policies leave each other alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.audit import audit
from lorabridge.bridge.replay.scorer import Scorer
from lorabridge.bridge.trajectory import Trajectory
from tests.e2e.models import commit, make_adapter
from tests.e2e.server import Server
from tests.e2e.traffic import Traffic, generator_of, sample_under_swaps, swap, trajectories_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 12_000


@pytest.fixture(scope="module")
def scorer(server: Server, base: Path) -> Scorer:
    return Scorer(base, server.store)


def versions(server: Server, base: Path, policy: str, *seeds: int) -> list[Manifest]:
    return commit(server.store, base, policy, [make_adapter(base, seed) for seed in seeds])


async def test_every_sample_ends_on_the_adapter_it_began_with(server: Server, base: Path, scorer: Scorer) -> None:
    pair = versions(server, base, "tenant", 21, 22)
    turns, swaps = await sample_under_swaps(server, pair, None, TOKENS, "pinned")
    trajectories = trajectories_of(turns, fingerprint(base).digest)
    report = audit(trajectories, server.store, scorer)
    across = [t for t in trajectories if len({span.epoch for span in t.spans}) > 1]
    print(f"\npinned: {len(turns)} trajectories, {len(across)} across a swap, {swaps} swaps, {report}")
    assert (report.refuted, report.unverifiable) == (0, 0), report
    assert all(len({span.digest for span in t.spans}) == 1 for t in trajectories)
    assert {span.digest for t in trajectories for span in t.spans} == {version.digest for version in pair}
    assert len(across) >= 50
    assert report.discriminated > report.tokens / 2
    assert audit([_as(t, pair) for t in trajectories], server.store, scorer).refuted > report.tokens / 2


async def test_policies_are_updated_side_by_side_and_none_is_refused_or_mislabelled(
    server: Server, base: Path, scorer: Scorer
) -> None:
    """Two pinned ones and one in flight, on one engine, each swapped by turns while all are sampled from."""
    lines = {
        name: versions(server, base, name, seed, seed + 1)
        for name, seed in (("a", 31), ("b", 33), ("c", 35))
    }  # fmt: skip
    async with generator_of(server) as generator:
        for name, line in lines.items():
            await swap(generator, line[0], mode="in_flight" if name == "c" else "pinned")
        traffic = [Traffic(generator, name, TOKENS // 3) for name in lines]
        async with asyncio.TaskGroup() as tasks:
            for one in traffic:
                tasks.create_task(one.run())
            swaps = 0
            while not all(one.done for one in traffic):
                await asyncio.sleep(0.4)
                swaps += 1
                name = "abc"[swaps % 3]
                await swap(generator, lines[name][(swaps // 3) % 2], "keep" if swaps % 2 else "recompute")
        assert (await generator.state()).quarantine is None
    for one, name in zip(traffic, lines, strict=True):
        trajectories = trajectories_of(one.turns, fingerprint(base).digest)
        report = audit(trajectories, server.store, scorer)
        print(f"\n{name}: {len(trajectories)} trajectories, {swaps} swaps in all, {report}")
        assert (report.refuted, report.unverifiable) == (0, 0), report
        assert {span.digest for t in trajectories for span in t.spans} == {version.digest for version in lines[name]}
        assert report.discriminated > report.tokens / 2


async def test_what_has_left_takes_no_memory(server: Server, base: Path) -> None:
    """More versions than the engine has slots: each is out of the engine, and not only of the list, when it is idle."""
    line = versions(server, base, "many", *range(41, 53))
    async with generator_of(server) as generator:
        others = len(await generator.attest())
        for version in line:
            await swap(generator, version, mode="pinned")
        seen = await generator.attest()
        assert line[-1].digest in seen
        assert len(seen) == others + 1
        assert (await generator.state()).quarantine is None


def _as(trajectory: Trajectory, pair: Sequence[Manifest]) -> Trajectory:
    """The same sample as if the other version had made it."""
    (turn,) = trajectory.turns
    other = {1: pair[1], 2: pair[0]}
    spans = tuple(
        msgspec.structs.replace(span, version=other[span.version].version, digest=other[span.version].digest)
        for span in turn.spans
    )
    return msgspec.structs.replace(trajectory, turns=(msgspec.structs.replace(turn, spans=spans),))
