"""The whole loop on real parts: TRL under torchrun, Valkey, the store, a worker, vLLM, the archiver and the audit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lorabridge.bridge.events import Consumed
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.sections import (
    GeneratorsSection,
    ModelSection,
    PolicySection,
    RedisSection,
    RolloutSection,
    RunSection,
    StoreSection,
    TrainerSection,
)
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.embedded import embedded_valkey
from lorabridge.bridge.toml import to_toml
from tests.e2e.models import RANK
from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 4
SAMPLES = 16  # per rank and step
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSection]:
    with embedded_valkey(tmp_path_factory.mktemp("valkey")) as section:
        yield section


def configuration(server: Server, base: Path, valkey: RedisSection, folder: Path, name: str) -> Settings:
    """A small run, of one rank by its file, that attaches to the session's server."""
    return Settings(
        run=RunSection(id=name, dir=folder / "run"),
        model=ModelSection(path=str(base)),
        policy=PolicySection(name=name, rank=RANK),
        redis=valkey,
        store=StoreSection(url=server.settings.store_url),
        trainer=TrainerSection(
            max_steps=STEPS,
            per_device_train_batch_size=SAMPLES,
            learning_rate=2e-3,
            threads=1,
        ),
        rollout=RolloutSection(
            environment="tests.e2e.letters:environment", num_generations=4, max_completion_length=24, concurrency=4
        ),
        generators=GeneratorsSection(
            urls=(server.url,), control=(server.control,), token_file=server.settings.token_file
        ),
    )  # fmt: skip


def test_up_trains_publishes_samples_and_audits_clean(
    server: Server, base: Path, valkey: RedisSection, tmp_path: Path
) -> None:
    settings = configuration(server, base, valkey, tmp_path, "loop")
    file = tmp_path / "loop.toml"
    file.write_text(to_toml(settings))
    done = subprocess.run(command("up", "--config", file, "--json"), capture_output=True, text=True, timeout=800,
                          check=False, env=ENVIRONMENT)  # fmt: skip

    logs = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in (tmp_path / "run/logs").glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == STEPS
    assert summary["versions_published"] == STEPS + 1  # the adapter that training starts with is version 1
    assert summary["dropped"] == 0
    assert summary["tokens_refuted"] == 0
    assert summary["tokens_audited"] == summary["tokens"] > 0
    _check_ledger(settings, SAMPLES)


def test_each_process_by_itself_with_two_ranks_that_only_the_trainer_was_told_of(
    server: Server, base: Path, valkey: RedisSection, tmp_path: Path
) -> None:
    settings = configuration(server, base, valkey, tmp_path, "ranks")
    settings.run.dir.mkdir()
    file = settings.run.dir / "config.toml"
    file.write_text(to_toml(settings))
    with (
        running(tmp_path / "archiver.log", "archiver", "--config", file) as archiver,
        running(tmp_path / "worker.log", "worker", "--config", file) as worker,
    ):
        train = ("train", "--nproc-per-node", "2", "--config", file)
        with running(tmp_path / "train.log", *train) as trainer:
            assert trainer.wait(600) == 0, (tmp_path / "train.log").read_text()[-3000:]
        _look_at_the_fleet(file)
        for process in (worker, archiver):
            process.terminate()
            assert process.wait(60) == 0
    audited = subprocess.run(command("audit", "--run", settings.run.dir, "--json"), capture_output=True, text=True,
                             check=False, env=ENVIRONMENT)  # fmt: skip
    assert audited.returncode == 0, audited.stdout + audited.stderr
    _check_ledger(settings, 2 * SAMPLES)


def _look_at_the_fleet(file: Path) -> None:
    """While the worker still holds it, the server is in, at the head, proven, and the doctor finds nothing wrong."""
    deadline = time.monotonic() + 30
    while (seen := _answer("fleet", file))["generators"][0]["health"] != "in":
        assert time.monotonic() < deadline, seen
    (generator,) = seen["generators"]
    assert generator["controller"]
    assert generator["serves"]["ranks"]["version"] == STEPS + 1
    found = _answer("doctor", file)
    assert found["problems"] == 0, found
    checks = {finding["check"] for finding in found["findings"] if finding["level"] == "ok"}
    assert {"version", "line", "bytes", "fits the run", "slots", "canary", "head"} <= checks


def _answer(name: str, file: Path) -> dict[str, Any]:
    done = subprocess.run(command(name, "--config", file, "--json"), capture_output=True, text=True, check=False,
                          env=ENVIRONMENT)  # fmt: skip
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "lorabridge.bridge.cli", *map(str, arguments)]


@contextmanager
def running(log: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """A lorabridge command, ended with the block if it has not by then."""
    with log.open("wb") as output:
        process = subprocess.Popen(command(*arguments), stdout=output, stderr=output, env=ENVIRONMENT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def _check_ledger(settings: Settings, samples: int) -> None:
    """Laws 1, 2, 5 and 6, as the run left them."""
    ledger = Ledger(settings.ledger_dir)
    store = open_store(settings.store_url)
    manifests = ledger.manifests()
    assert [m.version for m in manifests] == list(range(1, STEPS + 2))
    assert [m.parent for m in manifests] == [None, *(m.digest for m in manifests[:-1])]
    for manifest in manifests:
        assert store.manifest(manifest.policy, manifest.version) == manifest
        assert store.read(manifest.digest).digest == manifest.digest
    ids = [t.id for t in ledger.trajectories()]
    assert len(ids) == len(set(ids))
    happenings = [event.happening for event in ledger.events(Consumed)]
    trained = [id for happening in happenings if isinstance(happening, Consumed) for id in happening.trajectories]
    assert len(trained) == len(set(trained)) == STEPS * samples
    assert set(trained) <= set(ids)
