"""Laws 1 and 2 at the trainer: nobody hears of a version before its bytes are durable and the store has ordered it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis

from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.errors import AdapterUnservable, DiskFull, StaleTrainer, StoreError
from lorabridge.bridge.events import Resident, event_fields
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import Served
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.store.in_use import Residents
from lorabridge.bridge.store.retention import Retention
from lorabridge.bridge.stream.head import Head, read_head
from lorabridge.bridge.stream.keys import Keys
from lorabridge.trainer.publisher import Publisher, take_over
from tests.factories import BASE, MODULE, SHAPES, make_adapter, make_arrays, make_config, make_residency, make_tensors


class Bench:
    def __init__(self, folder: Path, client: redis.Redis, keys: Keys) -> None:
        self.store: Store = open_store(str(folder))
        self.client, self.keys = client, keys

    def publisher(
        self, store: Store | None = None, max_rank: int = 8, retain: Callable[[], Collection[str]] = tuple
    ) -> Publisher:  # fmt: skip
        store = store or self.store
        return Publisher(
            line=take_over(self.client, self.keys, self.store, "policy", "run"), client=self.client, keys=self.keys,
            store=store, base=BASE, shapes=SHAPES, max_rank=max_rank, serialise=_serialise, now_ms=lambda: 1,
            retain=retain,
        )  # fmt: skip

    def head(self) -> Head | None:
        return read_head(self.client, self.keys, "policy")


def _serialise(tensors: Any) -> Adapter:
    return tensors() if callable(tensors) else make_adapter(seed=tensors)


class Broken:
    """A store of which one call fails."""

    def __init__(self, store: Store, call: str) -> None:
        self._store, self._call = store, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            return self._fail
        return getattr(self._store, name)

    def _fail(self, *_: object) -> None:
        raise DiskFull("no room left", action="Free some space")


@pytest.fixture
def bench(tmp_path: Path, client: redis.Redis, keys: Keys) -> Bench:
    return Bench(tmp_path / "store", client, keys)


def test_versions_are_dense_and_each_names_its_parent(bench: Bench) -> None:
    publisher = bench.publisher()
    for seed in range(3):
        publisher.publish(seed, step=seed * 10, since=0.0)
    publisher.close()
    line = [bench.store.manifest("policy", version) for version in (1, 2, 3)]
    assert [m.step for m in line] == [0, 10, 20]
    assert [m.parent for m in line] == [None, line[0].digest, line[1].digest]
    assert bench.head() == Head(3, line[2].digest)
    assert bench.client.xlen(bench.keys.announce) == 3


@pytest.mark.parametrize("call", ["put", "commit"])
def test_nobody_hears_of_a_version_whose_bytes_or_name_did_not_get_there(call: str, bench: Bench) -> None:
    broken: Any = Broken(bench.store, call)
    publisher = bench.publisher(store=broken)
    publisher.publish(1, step=0, since=0.0)
    with pytest.raises(DiskFull):
        publisher.close()
    assert bench.head() is None
    assert bench.client.xlen(bench.keys.announce) == 0
    assert bench.store.newest("policy") is None


def test_an_adapter_that_would_be_served_wrong_gets_nowhere_near_the_store(bench: Bench) -> None:
    def diverged() -> Adapter:
        arrays = make_arrays()
        arrays[f"{MODULE}.lora_B.weight"][3, 4] = np.nan
        return Adapter.of(make_config(), make_tensors(arrays))

    broken: Any = Broken(bench.store, "put")
    publisher = bench.publisher(store=broken)
    publisher.publish(diverged, step=0, since=0.0)
    with pytest.raises(AdapterUnservable, match=r"lora_B.weight holds a value that is no finite number, at 28"):
        publisher.close()
    assert bench.head() is None
    assert bench.client.xlen(bench.keys.announce) == 0


def test_the_training_thread_hears_of_a_failed_publish_at_the_next_one(bench: Bench) -> None:
    publisher = bench.publisher(max_rank=1)
    publisher.publish(1, step=0, since=0.0)
    publisher._thread.submit(lambda: None).result()
    with pytest.raises(AdapterUnservable, match="rank 8"):
        publisher.publish(2, step=1, since=0.0)


def test_after_a_failure_nothing_more_is_published(bench: Bench) -> None:
    publisher, go = bench.publisher(), threading.Event()

    def fails() -> Adapter:
        assert go.wait(30)
        raise DiskFull("no room left", action="Free some space")

    publisher.publish(fails, step=0, since=0.0)
    publisher.publish(2, step=1, since=0.0)  # queued already when the first one fails
    go.set()
    with pytest.raises(DiskFull):
        publisher.close()
    assert bench.store.newest("policy") is None


def test_a_publisher_that_is_abandoned_publishes_nothing_that_was_queued(bench: Bench) -> None:
    publisher, started, go = bench.publisher(), threading.Event(), threading.Event()

    def slowly() -> Adapter:
        started.set()
        assert go.wait(30)
        return make_adapter(1)

    publisher.publish(slowly, step=0, since=0.0)
    publisher.publish(2, step=1, since=0.0)
    assert started.wait(30)
    publisher.abandon()
    go.set()
    publisher._thread.shutdown(wait=True)
    newest = bench.store.newest("policy")
    assert newest is not None
    assert newest.version == 1


def test_publishing_does_not_wait_for_the_store(bench: Bench) -> None:
    publisher, go = bench.publisher(), threading.Event()

    def slowly() -> Adapter:
        assert go.wait(30)
        return make_adapter(1)

    publisher.publish(slowly, step=0, since=0.0)
    publisher.publish(2, step=1, since=0.0)
    assert bench.head() is None
    go.set()
    publisher.close()
    head = bench.head()
    assert head is not None
    assert head.version == 2


def test_a_trainer_that_restarts_continues_the_line_and_the_old_one_can_commit_no_more(bench: Bench) -> None:
    old = bench.publisher()
    old.publish(1, step=0, since=0.0)
    old._thread.submit(lambda: None).result()
    new = bench.publisher()
    new.publish(2, step=0, since=0.0)
    new.close()
    old.publish(3, step=1, since=0.0)
    with pytest.raises(StaleTrainer):
        old.close()
    newest = bench.store.newest("policy")
    assert isinstance(newest, Manifest)
    assert (newest.version, newest.epoch) == (2, 2)
    assert bench.head() == Head(2, newest.digest)


def test_taking_over_repairs_a_redis_that_lost_its_memory(bench: Bench) -> None:
    publisher = bench.publisher()
    publisher.publish(1, step=0, since=0.0)
    publisher.close()
    bench.client.delete(bench.keys.head("policy"))
    bench.publisher().close()
    newest = bench.store.newest("policy")
    assert newest is not None
    assert bench.head() == Head(1, newest.digest)


def test_old_adapters_go_when_nobody_uses_them_and_their_versions_stay(bench: Bench) -> None:
    served = make_residency(1, 1)
    residents = Residents(bench.client, bench.keys)
    publisher = bench.publisher(retain=Retention(bench.store, "policy", 2, residents.digests).apply)
    for seed in range(5):
        publisher.publish(seed, step=seed, since=0.0)
        publisher._thread.submit(lambda: None).result()
        if seed == 0:  # a generator serves the first, and goes on doing so
            record = msgspec.structs.replace(
                served, serves={"policy": Served(version=1, digest=bench.store.manifest("policy", 1).digest)}
            )
            happening = Resident(residency=record, swap_ms={})
            bench.client.xadd(bench.keys.events, event_fields("w", 1, happening))
    publisher.close()
    line = [bench.store.manifest("policy", version).digest for version in range(1, 6)]
    assert set(bench.store.adapters()) == {line[0], line[3], line[4]}


def test_training_does_not_end_when_old_adapters_cannot_be_removed(bench: Bench) -> None:
    def fails() -> list[str]:
        raise StoreError("it is read only", action="Look")

    publisher = bench.publisher(retain=fails)
    for seed in range(2):
        publisher.publish(seed, step=seed, since=0.0)
    publisher.close()
    newest = bench.store.newest("policy")
    assert newest is not None
    assert newest.version == 2
