"""A server that is short of everything: KV, so that requests are preempted, and slots."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from lorabridge.bridge.canary import judge
from lorabridge.bridge.errors import SwapFailed
from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.audit import audit
from lorabridge.bridge.replay.scorer import Scorer
from lorabridge.bridge.sections import GeneratorsSection, ModelSection, PolicySection, RunSection, StoreSection
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store.local import LocalStore
from lorabridge.bridge.stream.embedded import free_port
from lorabridge.bridge.trajectory import Span, Trajectory
from tests.e2e.models import RANK, commit, make_adapter, make_canary
from tests.e2e.server import Server, running
from tests.e2e.traffic import Traffic, generator_of, sample_under_swaps, swap, trajectories_of

TOKENS, ROUNDS = 8_000, 6  # tokens a round; rounds at most, until there is enough to tell by
BLOCKS = 18  # of 128 tokens; the traffic's 24 clients would like three each


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """The trainer's store, in a folder that the server does not know."""
    return LocalStore(tmp_path_factory.mktemp("trainer") / "store", 2**30)


@pytest.fixture(scope="module")
def web(store: LocalStore) -> Iterator[str]:
    """The URL of a web server over that folder."""
    store.root.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(store.root))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def tight(base: Path, web: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with KV for a few requests, that has its adapters from a web server."""
    settings = Settings(
        run=RunSection(id="tight", dir=tmp_path_factory.mktemp("tight")),
        store=StoreSection(url=web),
        model=ModelSection(path=str(base)),
        policy=PolicySection(name="pair", rank=RANK),
        generators=GeneratorsSection(
            port=free_port(), control_port=free_port(), max_model_len=1024, max_num_seqs=32, threads=1, max_loras=2,
            args=("--num-gpu-blocks-override", str(BLOCKS)),
        ),
    )  # fmt: skip
    with running(settings) as server:
        yield server


@pytest.mark.e2e
@pytest.mark.timeout(600)
async def test_tokens_of_preempted_requests_are_confirmed_and_only_because_the_cuts_are_known(
    tight: Server, store: LocalStore, base: Path
) -> None:
    pair: list[Manifest] = commit(store, base, "pair", [make_adapter(base, seed) for seed in (1, 2)])
    scorer = Scorer(base, store)
    cut: list[Trajectory] = []
    telling: list[Trajectory] = []
    for _ in range(ROUNDS):  # which requests are preempted is the engine's choice, and the machine's speed
        turns, swaps = await sample_under_swaps(tight, pair, "keep", TOKENS)
        trajectories = trajectories_of(turns, fingerprint(base).digest)
        report = audit(trajectories, store, scorer)
        assert (report.refuted, report.unverifiable) == (0, 0), report
        cut += [t for t in trajectories if any(span.kv == "fresh" for span in t.spans[1:])]
        telling += [t for t in trajectories if _begins_afresh_under_another(t)]
        print(f"\n{len(turns)} trajectories, {len(cut)} preempted, {len(telling)} telling, {swaps} swaps, {report}")
        if len(cut) >= 5 and len(telling) >= 3:
            break
    assert len(cut) >= 5, "nothing was preempted: the test shows nothing"
    assert len(telling) >= 3, "no preemption came after a swap: the test shows nothing"

    # Had nobody told where the KV began afresh, the chain would be another one.
    unaware = audit([_unaware(t) for t in telling], store, scorer)
    assert unaware.refuted > 0, unaware


def _begins_afresh_under_another(trajectory: Trajectory) -> bool:
    """Whether KV of one version was computed again under another, with enough tokens after it to show in."""
    spans = trajectory.spans
    return any(
        span.kv == "fresh" and any(earlier.digest != span.digest for earlier in spans[:place])
        and trajectory.tokens - span.start >= 10
        for place, span in enumerate(spans)
    )  # fmt: skip


def _unaware(trajectory: Trajectory) -> Trajectory:
    (turn,) = trajectory.turns
    first, *others = turn.spans
    spans: tuple[Span, ...] = (first, *(msgspec.structs.replace(span, kv="kept") for span in others))
    return msgspec.structs.replace(trajectory, turns=(msgspec.structs.replace(turn, spans=spans),))


@pytest.mark.e2e
@pytest.mark.timeout(600)
async def test_with_every_slot_taken_the_base_is_the_base_under_traffic(
    tight: Server, store: LocalStore, base: Path
) -> None:
    """vLLM's CPU kernels take "no adapter" for the last slot when a batch has adapters in it: it must stay empty."""
    x, *others = (
        commit(store, base, name, [make_adapter(base, seed)])[0] for name, seed in zip("xyz", (5, 6, 7), strict=True)
    )
    canary = make_canary(base, 5)
    async with generator_of(tight) as generator:
        await swap(generator, x)
        with pytest.raises(SwapFailed, match="slots are taken"):
            for other in others:
                await swap(generator, other)
        traffic = Traffic(generator, "x", 3_000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            while not traffic.done:
                scores = await generator.score("x", canary.sequences)
                judgement = judge(canary, "x", 1, scores.adapter, scores.base, "float32")
                assert judgement.verdict == "match", judgement
                assert judgement.floor < 1e-3, judgement
                await asyncio.sleep(0.2)
