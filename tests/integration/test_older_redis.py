"""A Valkey that comes back older in the middle of a run, with an earlier copy of its append-only file: the store and
the processes make up for what it forgot, and the ledger has everything in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq
import pytest

from lorabridge.bridge.events import Consumed, Happening, Published, Resident
from lorabridge.bridge.ledger import tables
from lorabridge.bridge.ledger.commits import read_log
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.run.summary import consumed
from lorabridge.bridge.sections import CanarySection, LedgerSection, RolloutSection, TrainerSection
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.head import Head, read_head
from tests.e2e.models import make_base
from tests.integration.shutdown.conftest import Run
from tests.processes import Process, lorabridge

pytestmark = pytest.mark.timeout(280)

STEPS = 24
COPIED_AT, KILLED_AT = 5, 10  # versions
BATCH, SIZE = 4, 2
SAMPLE_S = 0.2
END_S = 120.0

H = TypeVar("H", bound=Happening)


class Older:
    """A run of four processes and its Valkey; what it leaves."""

    def __init__(self, run: Run, started: ExitStack) -> None:
        self.run, self._started = run, started
        self.store = open_store(run.settings.store_url)
        run.server.start()
        self.client = started.enter_context(run.client())
        self.generator = started.enter_context(run.generator(SAMPLE_S))
        self.train = self.start("train")
        self.archiver, self.worker = self.start("archiver"), self.start("worker")

    def start(self, name: str) -> Process:
        return self._started.enter_context(lorabridge(self.run.folder, name))

    def until_version(self, version: int) -> None:
        self.train.until(lambda: self.newest() >= version, f"version {version}")

    def newest(self) -> int:
        newest = self.store.newest("policy")
        return newest.version if newest else 0

    def line(self) -> list[Manifest]:
        return [self.store.manifest("policy", version) for version in range(1, self.newest() + 1)]

    def comes_back_older(self, copy: Path) -> None:
        """With a copy that knows of the version at which it was made, and not of the newest."""
        held = b"".join(file.read_bytes() for file in copy.rglob("*") if file.is_file())
        then, now = (self.store.manifest("policy", version).digest for version in (COPIED_AT, self.newest()))
        assert then.encode() in held and now.encode() not in held
        self.run.server.come_back_older(copy)

    def end(self) -> None:
        """The training ends by itself, then the others as they are told to."""
        deadline = time.monotonic() + END_S
        while self.train.running:
            assert self.worker.running, self.worker.said()
            assert self.archiver.running, self.archiver.said()
            assert time.monotonic() < deadline, self.train.said() + self.worker.said()
            time.sleep(0.1)
        assert self.train.code == 0, self.train.said()
        assert self.worker.end() == 0
        assert self.archiver.end() == 0

    def everything(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in sorted(self.run.folder.glob("*.log")))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), hidden=32)


@pytest.fixture
def older(base: Path, tmp_path: Path) -> Iterator[Older]:
    run = Run(base, tmp_path)
    run.write(
        trainer=TrainerSection(
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            threads=1,
            extra={"logging_steps": 100},
        ),
        rollout=RolloutSection(environment="tests.e2e.letters:environment", num_generations=SIZE, concurrency=2),
        canary=CanarySection(every=0),
        ledger=LedgerSection(flush_s=0.5),
    )
    with ExitStack() as started:
        started.callback(run.server.end)
        yield Older(run, started)


def happened(ledger: Ledger, kind: type[H]) -> list[H]:
    return [event.happening for event in ledger.events() if isinstance(event.happening, kind)]


def check(older: Older) -> None:
    """Laws 1, 2, 5 and 6, as the run left them."""
    line, ledger = older.line(), Ledger(older.run.settings.ledger_dir)
    assert [manifest.step for manifest in line] == list(range(STEPS + 1))
    assert [manifest.parent for manifest in line] == [None, *(manifest.digest for manifest in line[:-1])]
    assert len({manifest.digest for manifest in line}) > STEPS / 2  # it did train
    assert read_head(older.client, older.run.keys, "policy") == Head(line[-1].version, line[-1].digest)
    assert {m.version: m for m in ledger.manifests()} == {m.version: m for m in line}, older.everything()
    assert {one.version for one in happened(ledger, Published)} == {manifest.version for manifest in line}

    steps = happened(ledger, Consumed)
    assert sorted(step.step for step in steps) == list(range(STEPS)), older.everything()
    assert [step.step for _, step in consumed(ledger.events(), "policy")] == list(range(STEPS))
    trained = [id for step in steps for id in step.trajectories]
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    sampled = {trajectory.id: trajectory for trajectory in ledger.trajectories()}
    assert not (missing := set(trained) - set(sampled)), f"{missing}\n{older.everything()}"
    records = {one.residency.label for one in happened(ledger, Resident)}
    assert {f"{each.instance}:{span.epoch}" for each in sampled.values() for span in each.spans} <= records
    assert older.client.xlen(older.run.keys.trajectories) <= older.run.settings.groups_ahead + 2 * BATCH // SIZE
    # A group may have been sent twice; never was a number with its attempt given to two.
    folder, files = older.run.settings.ledger_dir, read_log(older.run.settings.ledger_dir).files
    for table in (pq.read_table(folder / file.path) for file in files if file.table == "trajectories"):
        assert [sampled[each.id] for each in tables.trajectories(table)] == list(tables.trajectories(table))


def test_everybody_lives_through_it(older: Older, tmp_path: Path) -> None:
    older.until_version(COPIED_AT)
    older.run.server.copy(tmp_path / "copy")
    older.until_version(KILLED_AT)
    older.run.server.kill()
    older.comes_back_older(tmp_path / "copy")
    older.end()
    check(older)


def test_what_was_trained_on_and_not_archived_gets_into_the_ledger_and_a_new_worker_repeats_no_attempt(
    older: Older, tmp_path: Path
) -> None:
    """The archiver stands still for as long as the server will have forgotten; then it and the worker are others."""
    older.until_version(COPIED_AT)
    older.run.server.copy(tmp_path / "copy")
    older.archiver.freeze()
    older.until_version(KILLED_AT)
    older.run.server.kill()
    older.archiver.kill()
    older.worker.kill()
    older.comes_back_older(tmp_path / "copy")
    older.archiver, older.worker = older.start("archiver"), older.start("worker")
    older.archiver.until_it_says("continues")
    older.end()
    check(older)
