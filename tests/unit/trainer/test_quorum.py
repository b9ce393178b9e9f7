"""A trainer that wants its version served waits for that, and not for ever."""

from __future__ import annotations

import threading

import pytest
import redis

from lorabridge.bridge.events import Resident, event_fields
from lorabridge.bridge.residency import Residency, Served
from lorabridge.bridge.stream.keys import Keys
from lorabridge.trainer.quorum import Quorum
from tests.factories import digest_of


def serves(client: redis.Redis, keys: Keys, generator: str, version: int | None, epoch: int = 1) -> None:
    policies = {"policy": Served(version=version, digest=digest_of(str(version)))} if version else {}
    record = Residency(generator=generator, instance="i", epoch=epoch, kv="keep", serves=policies, at_ms=1)
    client.xadd(keys.events, event_fields("w", 1, Resident(residency=record, swap_ms={})))


@pytest.mark.parametrize("wanted", [1, 2])
def test_it_waits_until_so_many_serve_it_or_a_later_one(wanted: int, client: redis.Redis, keys: Keys) -> None:
    quorum = Quorum(client, keys, "policy", wanted, timeout_s=30)
    serves(client, keys, "a", 4)
    serves(client, keys, "b", 2)
    later = threading.Timer(0.3 if wanted == 2 else 0, serves, (client, keys, "b", 3))
    later.start()
    assert quorum.wait(3)
    later.join()


def test_training_goes_on_when_a_generator_is_late(client: redis.Redis, keys: Keys) -> None:
    quorum = Quorum(client, keys, "policy", 2, timeout_s=0.2)
    serves(client, keys, "a", 3)
    client.xadd(keys.events, {"body": b"garbage"})
    assert not quorum.wait(3)
    serves(client, keys, "b", 3)
    assert quorum.wait(3)


def test_a_generator_that_lost_it_counts_no_more(client: redis.Redis, keys: Keys) -> None:
    quorum = Quorum(client, keys, "policy", 1, timeout_s=0.2)
    serves(client, keys, "a", 3)
    serves(client, keys, "a", None, epoch=0)  # it has restarted
    assert not quorum.wait(3)
