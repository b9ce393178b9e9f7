"""Law 3 on the real engine: every token of every sample, recomputed under the adapter that its span names.

And the audit's power on the same samples: with labels shifted by one version it refutes them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.audit import audit
from lorabridge.bridge.replay.scorer import Scorer
from lorabridge.bridge.residency import KvMode
from lorabridge.bridge.trajectory import Trajectory
from tests.e2e.server import Server
from tests.e2e.traffic import sample_under_swaps, trajectories_of

TOKENS = 20_000
SEVERAL = 100


@pytest.fixture(scope="module")
def scorer(server: Server, base: Path) -> Scorer:
    return Scorer(base, server.store)


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_every_token_is_confirmed_under_swaps_in_flight(
    kv: KvMode, server: Server, base: Path, pair: list[Manifest], scorer: Scorer
) -> None:
    turns, swaps = await sample_under_swaps(server, pair, kv, TOKENS)
    trajectories = trajectories_of(turns, fingerprint(base).digest)

    report = audit(trajectories, server.store, scorer)

    several = [t for t in trajectories if len(t.spans) > 1]
    print(f"\n{kv}: {len(turns)} trajectories, {len(several)} with several spans, {swaps} swaps, {report}")
    assert report.refuted == 0, report
    assert report.unverifiable == 0, report
    assert report.tokens >= TOKENS
    assert len(several) >= SEVERAL
    assert {span.kv for t in several for span in t.spans[1:]} == ({"kept"} if kv == "keep" else {"fresh"})
    assert report.discriminated > report.tokens / 2

    shifted = [_shifted(t, pair) for t in trajectories]
    found = audit(shifted, server.store, scorer)
    assert found.refuted > found.tokens / 2, found


def _shifted(trajectory: Trajectory, pair: list[Manifest]) -> Trajectory:
    """The same sample with every span's label moved to the other version."""
    (turn,) = trajectory.turns
    other = {1: pair[1], 2: pair[0]}
    spans = tuple(
        msgspec.structs.replace(span, version=other[span.version].version, digest=other[span.version].digest)
        for span in turn.spans
    )
    return msgspec.structs.replace(trajectory, turns=(msgspec.structs.replace(turn, spans=spans),))
