"""Whole trainings of a tiny model under torchrun, with a worker that needs no server: it makes its samples up."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

import pytest

from lorabridge.bridge import codec
from lorabridge.bridge.errors import TooLarge
from lorabridge.bridge.events import Consumed, Dropped, Event, Quarantine
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.run_record import RunRecord
from lorabridge.bridge.sections import (
    CanarySection,
    ModelSection,
    PolicySection,
    PublishSection,
    RedisSection,
    RolloutSection,
    RunSection,
    TrainerSection,
)
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.connection import connect, connect_async
from lorabridge.bridge.stream.embedded import embedded_valkey
from lorabridge.bridge.stream.groups import Claim, GroupQueue
from lorabridge.bridge.stream.head import Head, read_head
from lorabridge.bridge.stream.keys import BODY, Keys
from lorabridge.bridge.toml import to_toml
from lorabridge.bridge.trajectory import Group
from tests.e2e.models import make_base
from tests.factories import make_span, make_trajectory, make_turn
from tests.groups import LONG_S, counts, pending

pytestmark = pytest.mark.timeout(200)

STEPS, EVERY = 3, 2  # the last step is between two publishes
BATCH, ACCUMULATION, SIZE = 4, 2, 4
HUNG_S = 150.0

H = TypeVar("H")


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSection]:
    with embedded_valkey(tmp_path_factory.mktemp("valkey")) as section:
        yield section


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), hidden=32)


class Bench:
    """One run: its file, and what it leaves in Valkey and in the store."""

    def __init__(self, base: Path, valkey: RedisSection, folder: Path) -> None:
        self.settings = Settings(
            run=RunSection(id=f"training-{uuid.uuid4().hex}", dir=folder / "run"),
            model=ModelSection(path=str(base)),
            policy=PolicySection(name="policy", rank=8),
            redis=valkey,
            trainer=TrainerSection(
                max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATION,
                learning_rate=1e-3, threads=1,
            ),
            rollout=RolloutSection(environment="lorabridge.rollout.tasks.sort", num_generations=SIZE),
            publish=PublishSection(every=EVERY),
            canary=CanarySection(every=0),
        )  # fmt: skip
        self.file = folder / "run.toml"
        self.file.write_text(to_toml(self.settings))
        self.log = folder / "train.log"
        self.keys = Keys(self.settings.run.id)
        self.client = connect(valkey)
        self.sampled: dict[str, int] = {}  # trajectory id -> the trainer epoch of the version that it names
        self.store = open_store(self.settings.store_url)

    def run(self) -> RunRecord | None:
        body = self.client.get(self.keys.run)
        return codec.decode(RunRecord, body) if isinstance(body, bytes) else None

    def versions(self) -> list[Manifest]:
        newest = self.store.newest("policy")
        return [self.store.manifest("policy", version + 1) for version in range(newest.version if newest else 0)]

    def happened(self, kind: type[H]) -> list[H]:
        entries = cast(list[tuple[bytes, dict[bytes, bytes]]], self.client.xrange(self.keys.events))
        happenings = [codec.decode(Event, fields[BODY]).happening for _, fields in entries]
        return [happening for happening in happenings if isinstance(happening, kind)]

    async def train(self, *command: str) -> int:
        """Run it to its end; its exit code."""
        with self.log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, "--config", str(self.file), stdout=output, stderr=output,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        try:
            return await asyncio.wait_for(process.wait(), HUNG_S)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """A worker that goes by what the trainer has on record and has no other bound."""
        worker = asyncio.create_task(self._work())
        try:
            yield
        finally:
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker

    async def _work(self) -> None:
        asynchronous = connect_async(self.settings.redis)
        queue = GroupQueue(asynchronous, self.keys, "worker", ahead=0, lease_s=LONG_S)
        try:
            while True:
                run, newest = self.run(), self.store.newest("policy")
                queue.ahead = run.groups_ahead if run else 0
                claim = await queue.claim() if newest else None
                if newest is None or claim is None:
                    await asyncio.sleep(0.02)
                else:
                    await queue.deliver(claim, self._group(claim, newest))
        finally:
            await asynchronous.aclose()

    def _group(self, claim: Claim, by: Manifest) -> Group:
        turn = make_turn((make_span(by.version, 0, 6, digest=by.digest),))
        trajectories = tuple(
            make_trajectory(
                claim.number, claim.attempt, index, run=self.settings.run.id, turns=(turn,), advantage=(-1.0) ** index
            )
            for index in range(SIZE)
        )
        self.sampled |= {trajectory.id: by.epoch for trajectory in trajectories}
        return Group(group=claim.number, attempt=claim.attempt, worker="worker", trajectories=trajectories)


@pytest.fixture
def bench(base: Path, valkey: RedisSection, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(base, valkey, tmp_path)
    yield bench
    bench.client.close()


def torchrun(ranks: int) -> list[str]:
    module = ["-m", "lorabridge.trainer.grpo"]
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *module]


def lorabridge_train(ranks: int) -> list[str]:
    return ["-m", "lorabridge.bridge.cli", "train", f"--nproc-per-node={ranks}"]


@pytest.mark.parametrize(
    ("command", "ranks", "ahead"),
    [
        (torchrun(1), 1, 3 + 2),  # the least that fits, and one step's worth
        (torchrun(2), 2, 6 + 4),
        ([*lorabridge_train(2), "--set", "rollout.groups_ahead=6"], 2, 6),
    ],
    ids=["torchrun with 1 rank", "torchrun with 2 ranks", "lorabridge train with 2 ranks"],
)
async def test_a_training_ends_with_as_many_ranks_as_were_asked_for_and_its_last_weights_published(
    command: list[str], ranks: int, ahead: int, bench: Bench
) -> None:
    async with bench.working():
        assert await bench.train(*command) == 0, bench.log.read_text()

    run, versions = bench.run(), bench.versions()
    assert run is not None
    assert run.groups_ahead == ahead
    assert [(m.version, m.step, m.epoch) for m in versions] == [(1, 0, run.epoch), (2, 2, run.epoch), (3, 3, run.epoch)]
    assert len({m.digest for m in versions}) == 3
    assert read_head(bench.client, bench.keys, "policy") == Head(3, versions[-1].digest)
    per_step = BATCH * ACCUMULATION * ranks
    steps = bench.happened(Consumed)
    assert [(step.step, len(step.trajectories)) for step in steps] == [(step, per_step) for step in range(STEPS)]
    trained = [id for step in steps for id in step.trajectories]
    assert len(set(trained)) == len(trained)
    begun, still_open = counts(bench.client, bench.keys)
    assert begun - still_open == STEPS * per_step // SIZE


async def test_a_trainer_that_comes_back_trains_on_nothing_that_an_earlier_one_left(bench: Bench) -> None:
    async with bench.working():
        assert await bench.train(*torchrun(1)) == 0, bench.log.read_text()
        first = len(bench.happened(Consumed))
        assert pending(bench.client, bench.keys) > 0
        entry = bench.client.xadd(bench.keys.trajectories, {BODY: b"garbage"})
        assert await bench.train(*torchrun(1)) == 0, bench.log.read_text()

    versions = bench.versions()
    assert [(m.version, m.step, m.epoch) for m in versions[STEPS:]] == [(4, 0, 2), (5, 2, 2), (6, 3, 2)]
    assert [m.parent for m in versions] == [None, *(m.digest for m in versions[:-1])]
    steps = bench.happened(Consumed)[first:]
    assert {bench.sampled[id] for step in steps for id in step.trajectories} == {2}
    assert [step.step for step in steps] == list(range(STEPS))
    assert all(0 <= step.lag_total <= step.step * step.tokens for step in steps)
    dropped = bench.happened(Dropped)
    assert {(bench.sampled[id], drop.reason) for drop in dropped for id in drop.trajectories} == {
        (1, "of an earlier trainer")
    }
    (unreadable,) = bench.happened(Quarantine)
    assert isinstance(entry, bytes)
    assert unreadable.subject == f"entry {entry.decode()}"
    assert "not a readable Group" in unreadable.reason


async def test_a_version_that_cannot_be_published_ends_every_rank_and_is_what_is_said(bench: Bench) -> None:
    assert await bench.train(*lorabridge_train(2), "--set", "store.max_adapter_bytes=1") == TooLarge.exit_code
    said = bench.log.read_text()
    assert f"lorabridge: {TooLarge.boundary}: " in said
    assert "Traceback" not in said
    assert bench.versions() == []
