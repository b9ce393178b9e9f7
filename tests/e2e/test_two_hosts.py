"""Nothing is shared but Redis and the store: the trainer's side on one host, sampling on another."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lorabridge.bridge.events import Consumed, Resident
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.sections import (
    GeneratorsSection,
    ModelSection,
    PolicySection,
    PublishSection,
    RedisSection,
    RolloutSection,
    RunSection,
    StoreSection,
    TrainerSection,
)
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.toml import to_toml
from tests import s3_server
from tests.e2e import letters
from tests.e2e.hosts import Host, two_hosts
from tests.e2e.models import RANK, make_base
from tests.servers import redis_config, valkey_binary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 4
SAMPLES = 16  # per step
REDIS_PORT = 6379
TRAIN_S, END_S = 240, 60
MAKE_BUCKET = "import fsspec; fsspec.filesystem('s3').mkdir('bucket')"


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def test_a_trainer_here_and_a_generator_with_its_worker_there(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    run, copy = a.folder / "run", b.folder / "copies/of/the/base"
    make_base(a.folder / "model")
    shutil.copytree(a.folder / "model", copy)
    for file in (run / "config.toml", b.folder / "config.toml"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(to_toml(settings(a, run)))
    for host in hosts:
        shutil.copy(letters.__file__, host.folder)
        host.environment["PYTHONPATH"] = str(host.folder)
    assert "model" in a.run("ls", a.folder).stdout
    assert a.run("ls", b.folder).stdout == b.run("ls", a.folder).stdout == ""
    here = ("--config", run / "config.toml")
    there = ("--config", b.folder / "config.toml", "--set", f"model.path={copy}", "--set", f"run.dir={b.folder}/run")
    with services(a, b):
        with (
            b.running("serve", *lorabridge("serve", *there)) as serve,
            a.running("train", *lorabridge("train", *here)) as train,
            a.running("archiver", *lorabridge("archiver", *here)) as archiver,
            b.running("worker", *lorabridge("worker", *there)) as worker,
        ):
            deadline = time.monotonic() + TRAIN_S
            while train.poll() is None:
                others_live = all(process.poll() is None for process in (serve, archiver, worker))
                assert others_live and time.monotonic() < deadline, a.logs() + b.logs()
                time.sleep(0.1)
            assert train.returncode == 0, a.logs() + b.logs()
            for process in (worker, serve, archiver):
                process.terminate()
                assert process.wait(END_S) == 0, a.logs() + b.logs()
        check_audit(a, run)
    check_ledger(b, run)
    check_secrets(a, b)


def settings(a: Host, run: Path) -> Settings:
    """The one file of the run, as host A has it."""
    return Settings(
        run=RunSection(id="hosts", dir=run),
        model=ModelSection(path=str(a.folder / "model")),
        policy=PolicySection(name="letters", rank=RANK),
        redis=RedisSection(url=f"redis://{a.address}:{REDIS_PORT}/0", connect_s=30),
        store=StoreSection(url="s3://bucket/hosts"),
        trainer=TrainerSection(
            max_steps=STEPS, per_device_train_batch_size=SAMPLES, learning_rate=2e-3, threads=1
        ),
        rollout=RolloutSection(
            environment="letters:environment", num_generations=4, max_completion_length=24, concurrency=4
        ),
        generators=GeneratorsSection(max_model_len=256, max_num_seqs=32, threads=1),
        publish=PublishSection(wait=1),  # so that each version is sampled from before the next
    )  # fmt: skip


@contextmanager
def services(a: Host, b: Host) -> Iterator[None]:
    """Redis and an S3 on A, open to B; both hosts get the secrets that they need in their environments."""
    password = secrets.token_urlsafe(32)
    for host in (a, b):
        host.secrets |= {"LORABRIDGE_REDIS_PASSWORD": password, "AWS_SECRET_ACCESS_KEY": secrets.token_urlsafe(32)}
    b.secrets["LORABRIDGE_CONTROL_TOKEN"] = secrets.token_urlsafe(32)
    config = redis_config(a.folder, a.address, REDIS_PORT, password)
    with (
        a.running("redis", valkey_binary(), "-", stdin=config),
        a.running("s3", sys.executable, s3_server.__file__, a.address),
    ):
        for host in (a, b):
            host.environment |= {
                "AWS_ENDPOINT_URL": f"http://{a.address}:{_port_of_s3(a)}", "AWS_ACCESS_KEY_ID": "key",
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            }  # fmt: skip
        made = a.run(sys.executable, "-c", MAKE_BUCKET)
        assert made.returncode == 0, made.stderr
        yield


def _port_of_s3(host: Host) -> int:
    deadline = time.monotonic() + END_S
    while not (said := host.log("s3")).endswith("\n"):
        assert time.monotonic() < deadline, "the S3 server does not say its port"
        time.sleep(0.1)
    return int(said.splitlines()[0])


def lorabridge(*arguments: object) -> list[object]:
    return [sys.executable, "-m", "lorabridge.bridge.cli", *arguments]


def check_audit(a: Host, run: Path) -> None:
    """A recomputes what B sampled."""
    audited = a.run(*lorabridge("audit", "--run", run, "--json"))
    assert audited.returncode == 0, audited.stdout + audited.stderr
    figures = json.loads(audited.stdout.splitlines()[-1])
    assert figures["refuted"] == figures["unverifiable"] == 0
    assert figures["discriminated"] > 0
    assert figures["tokens"] == sum(trajectory.tokens for trajectory in Ledger(run / "ledger").trajectories())


def check_ledger(b: Host, run: Path) -> None:
    """B's one generator sampled all of it, under several versions, and the trainer trained on it.

    It is known by its host: on B it is at a loopback address, as another would be on a third host.
    """
    ledger = Ledger(run / "ledger")
    trajectories = list(ledger.trajectories())
    epochs = [event.happening for event in ledger.events(Resident)]
    serving = {happening.residency.generator for happening in epochs if isinstance(happening, Resident)}
    assert {t.generator for t in trajectories} == serving == {f"http://{b.name}:8000"}
    assert len({span.digest for t in trajectories for span in t.spans}) >= 2
    happenings = [event.happening for event in ledger.events(Consumed)]
    trained = [id for happening in happenings if isinstance(happening, Consumed) for id in happening.trajectories]
    assert len(set(trained)) == STEPS * SAMPLES
    assert set(trained) <= {t.id for t in trajectories}


def check_secrets(*hosts: Host) -> None:
    """Whatever the hosts wrote holds no secret of theirs."""
    for host in hosts:
        for file in host.folder.rglob("*"):
            if file.is_file():
                held = [name for name, secret in host.secrets.items() if secret.encode() in file.read_bytes()]
                assert not held, (file, held)
