"""A run whose processes are real, on a Valkey and with a generator that can be killed and frozen."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from lorabridge.bridge import codec
from lorabridge.bridge.run_record import resolve_run
from lorabridge.bridge.sections import (
    GeneratorsSection,
    LedgerSection,
    ModelSection,
    PolicySection,
    RolloutSection,
    RunSection,
    TrainerSection,
)
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.embedded import free_port
from lorabridge.bridge.stream.head import move_head
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.toml import to_toml
from lorabridge.rollout.wire import name_of
from tests.e2e.models import make_base
from tests.factories import make_adapter, make_manifest
from tests.processes import Process
from tests.servers import RedisServer, valkey_binary

SAMPLE_S = 600.0  # longer than any test: a group that was begun is still under way


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), hidden=32)


class Run:
    """One run: its file ``run.toml``, its Valkey, and the generator that it attaches to.

    Attributes:
        server: its Valkey; a test starts it, and ends it in whatever way it likes.
        control: key of the lease that a generator's controller holds.
    """

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder
        self.server = RedisServer(folder, valkey_binary())
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        token = folder / "token"
        token.write_text("the control token of this test")
        self.settings = Settings(
            run=RunSection(id=f"shutdown-{uuid.uuid4().hex}", dir=folder / "run"),
            model=ModelSection(path=str(base)),
            policy=PolicySection(name="policy", rank=8),
            redis=self.server.section.model_copy(update={"connect_s": 120.0, "outage_s": 120.0}),
            trainer=TrainerSection(max_steps=3, per_device_train_batch_size=4, threads=1),
            rollout=RolloutSection(environment="lorabridge.rollout.tasks.sort", num_generations=2, concurrency=2),
            generators=GeneratorsSection(urls=(self.url,), control=(self.url,), token_file=token),
            ledger=LedgerSection(flush_s=3600.0),
        )
        self.write()
        self.keys = Keys(self.settings.run.id)
        self.control = self.keys.control(name_of(self.url, socket.gethostname()))

    def write(self, **sections: object) -> None:
        """Write ``run.toml``, with some sections replaced."""
        self.settings = self.settings.model_copy(update=sections)
        (self.folder / "run.toml").write_text(to_toml(self.settings))

    def client(self) -> redis.Redis:
        return connect(self.server.section)

    def put_on_record(self) -> None:
        """What a trainer does before it trains: workers may join."""
        with self.client() as client:
            client.set(self.keys.run, codec.encode(resolve_run(self.settings, self.base)))

    def publish(self) -> None:
        """Version 1."""
        store = open_store(self.settings.store_url)
        manifest = make_manifest(1, digest=store.put(make_adapter(1)), epoch=store.allocate_epoch("policy"))
        store.commit(manifest)
        with self.client() as client:
            move_head(client, self.keys, manifest)

    def generator(self, sample_s: float = SAMPLE_S) -> Process:
        """The generator, as a process."""
        return Process(self.folder, "tests.fake_generator", str(self.port), str(self.base), str(sample_s))


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Iterator[Run]:
    run = Run(base, tmp_path)
    yield run
    run.server.end()
