"""What makes weeks of strange training, injected into one server of two: caught within one publish, by both the worker
that runs and the doctor, with the reason, and over when its cause is."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import redis

from lorabridge.bridge import codec
from lorabridge.bridge.events import Event, Quarantine
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.run_record import resolve_run
from lorabridge.bridge.sections import (
    GeneratorsSection,
    ModelSection,
    PolicySection,
    RolloutSection,
    RunSection,
    StoreSection,
)
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.store.remote import adapter_name
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.embedded import embedded_valkey
from lorabridge.bridge.stream.head import move_head
from lorabridge.bridge.stream.keys import BODY, Keys
from lorabridge.bridge.toml import to_toml
from lorabridge.rollout.doctor import examine
from lorabridge.rollout.findings import Finding
from tests.e2e.models import RANK, commit_next, make_adapter, make_canary
from tests.e2e.server import Server
from tests.e2e.tamper import Fault
from tests.e2e.test_loop import running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_START_S = 400  # a worker that is imported for the first time in a fresh environment takes its time

# What goes wrong, how it is brought about, what the worker says, and which of the doctor's checks says what.
FAULTS: dict[str, tuple[Fault, str, str, str]] = {
    "the base is sampled": ("ignored, unnoticed", "the canary of", "canary", "mismatch"),
    "rollouts stay on the first adapter": ("kept, unnoticed", "the canary of", "canary", "mismatch"),
    "a load answers success and changes nothing, on one replica": (
        "kept",
        "held something else",
        "head",
        "1 behind .* held something else",
    ),
    "an adapter is loaded twice over": (
        "twice",
        "could not be put back",
        "head",
        "does not serve .* held something else",
    ),
    "the slot is emptied": ("emptied", "has changed since it was proven", "slots", "has changed since"),
    "another policy's adapter sits in the slot": ("another's", "has changed since it was proven", "slots", "changed"),
}


class Run:
    """A trainer's part, played by the test, on two servers; a real worker drives them."""

    def __init__(self, settings: Settings, client: redis.Redis, base: Path, order: Path) -> None:
        self.settings, self._client, self._base, self.order = settings, client, base, order
        self.keys = Keys(settings.run.id)
        self.store: Store = open_store(settings.store_url)
        self._epoch = self.store.allocate_epoch(settings.policy.name)
        self._seed = 100
        record = resolve_run(settings, base)
        client.set(self.keys.run, codec.encode(msgspec.structs.replace(record, epoch=self._epoch, groups_ahead=4)))

    def publish(self, *, delivered: bool = True) -> Manifest:
        """The next version, with a canary."""
        self._seed += 1
        manifest = commit_next(
            self.store, self._base, self.settings.policy.name, make_adapter(self._base, self._seed), self._epoch,
            make_canary(self._base, self._seed),
        )  # fmt: skip
        if not delivered:
            shutil.rmtree(Path(self.settings.store_url) / adapter_name(manifest.digest))
        move_head(self._client, self.keys, manifest)
        return manifest

    def reasons(self, after: bytes) -> list[str]:
        """Why something was quarantined since then."""
        happenings = [codec.decode(Event, fields[BODY]).happening for _, fields in self._entries(after)]
        return [each.reason for each in happenings if isinstance(each, Quarantine)]

    def now(self) -> bytes:
        entries = cast(list[Any], self._client.xrevrange(self.keys.events, count=1))
        return cast(bytes, entries[0][0]) if entries else b"0-0"

    def _entries(self, after: bytes) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return list(self._client.xrange(self.keys.events, min=b"(" + after))  # type: ignore[arg-type]

    def problems(self) -> list[Finding]:
        return [finding for finding in examine(self.settings) if finding.level == "problem"]


@pytest.fixture(scope="module")
def run(
    server: Server, tampered: Server, order: Path, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("faults")
    with embedded_valkey(folder / "valkey") as section:
        settings = Settings(
            run=RunSection(id="faults", dir=folder / "run"),
            model=ModelSection(path=str(base)),
            policy=PolicySection(name="faults", rank=RANK),
            redis=section,
            store=StoreSection(url=server.settings.store_url),
            rollout=RolloutSection(
                environment="tests.e2e.letters:environment", num_generations=2, max_completion_length=16, concurrency=2
            ),
            generators=GeneratorsSection(
                urls=(server.url, tampered.url), control=(server.control, tampered.control),
                token_file=server.settings.token_file,
            ),
        )  # fmt: skip
        settings.run.dir.mkdir()
        file = settings.run.dir / "config.toml"
        file.write_text(to_toml(settings))
        with connect(section) as client:
            run = Run(settings, client, base, order)
            run.publish()
            log = folder / "worker.log"
            with running(log, "worker", "--config", file) as worker:
                until(lambda: alive(worker) and "samples faults from" in log.read_text(), _START_S)
                until(lambda: alive(worker) and run.problems() == [])
                yield run


def alive(worker: subprocess.Popen[bytes]) -> bool:
    assert worker.poll() is None, "the worker has ended"
    return True


def until(holds: Callable[[], bool], patience_s: float = 90) -> None:
    """Asked once a second: the doctor's questions take time from servers and worker."""
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(1)


def says(run: Run, after: bytes, reason: str) -> bool:
    return any(re.search(reason, found) for found in run.reasons(after))


def finds(run: Run, url: str, check: str, what: str) -> bool:
    return any(
        (finding.subject, finding.check) == (url, check) and re.search(what, finding.says) for finding in run.problems()
    )


@pytest.mark.parametrize("what", FAULTS)
def test_it_is_caught_within_one_publish_by_the_worker_and_by_the_doctor(what: str, run: Run, tampered: Server) -> None:
    fault, reason, check, found = FAULTS[what]
    before = run.now()
    run.order.write_text(fault)
    try:
        run.publish()
        until(lambda: says(run, before, reason))
        until(lambda: finds(run, tampered.url, check, found))
    finally:
        run.order.unlink()
    until(lambda: run.problems() == [])


def test_an_adapter_that_is_announced_and_never_delivered_is_caught_by_the_worker_and_by_the_doctor(run: Run) -> None:
    before = run.now()
    missing = run.publish(delivered=False)
    until(lambda: says(run, before, f"{missing.digest} is not in"))
    until(lambda: finds(run, "store", "bytes", "is not in"))
    run.publish()
    until(lambda: run.problems() == [])


def test_a_slot_that_is_emptied_between_swaps_is_caught_by_the_doctors_look_alone(run: Run, tampered: Server) -> None:
    run.order.write_text("emptied")
    try:
        assert finds(run, tampered.url, "slots", "has changed since it was proven")
    finally:
        run.order.unlink()
    until(lambda: run.problems() == [])
