"""A server that is killed in the middle and comes back: everybody goes on, nothing is lost, nothing enters twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from lorabridge.bridge.errors import StreamRefused, StreamUnreachable
from lorabridge.bridge.stream.connection import connect, connect_async, errors
from lorabridge.bridge.stream.groups import GroupQueue, decode_group, unfinished
from lorabridge.bridge.stream.head import move_head, read_head
from lorabridge.bridge.stream.keys import TRAINER_GROUP, Keys
from tests.factories import make_group, make_manifest
from tests.groups import reader_of
from tests.servers import RedisServer, redis_binary, valkey_binary

GROUPS = 150
KILLED_AT = (20, 60, 100)  # groups trained by then
WORKERS = 4


@pytest.fixture(params=["valkey", "redis-server"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    binary = valkey_binary() if request.param == "valkey" else redis_binary()
    with RedisServer(tmp_path, binary) as server:
        yield server


class Trainer(threading.Thread):
    """Reads and finishes until it has trained on every group; says after each how many there were."""

    def __init__(self, server: RedisServer, keys: Keys) -> None:
        super().__init__()
        self.trained: dict[int, int] = {}  # group -> how often it was counted as finished
        self.read: list[str] = []
        self.acknowledged: list[str] = []
        self.progress = threading.Condition()
        self._server, self._keys = server, keys

    def run(self) -> None:
        with connect(self._server.section) as client:
            reader = reader_of(client, self._keys)
            while len(self.trained) < GROUPS:
                found = reader.read(block_ms=200)
                if found is None:
                    continue
                entry, group = found
                self.read.append(entry)
                reader.finish([entry])
                self.acknowledged.append(entry)
                with self.progress:
                    self.trained[group.group] = self.trained.get(group.group, 0) + 1
                    self.progress.notify_all()

    def wait_until_trained(self, count: int) -> None:
        with self.progress:
            assert self.progress.wait_for(lambda: len(self.trained) >= count or not self.is_alive(), timeout=120)
        assert len(self.trained) >= count


async def work(server: RedisServer, keys: Keys, worker: str, done: asyncio.Event) -> None:
    """Claim, sample in no time, deliver, until the trainer has what it wants."""
    client = connect_async(server.section)
    queue = GroupQueue(client, keys, worker, ahead=8, lease_s=1)
    while not done.is_set():
        claim = await queue.claim()
        if claim is None:
            await asyncio.sleep(0.005)
        elif claim.number >= GROUPS:
            await queue.abandon(claim)
        else:
            await queue.deliver(claim, make_group(claim.number, claim.attempt, worker, size=1))
    await client.aclose()


async def work_all(server: RedisServer, keys: Keys, trainer: Trainer) -> None:
    done = asyncio.Event()
    workers = [asyncio.create_task(work(server, keys, f"worker {n}", done)) for n in range(WORKERS)]
    await asyncio.to_thread(trainer.join)
    done.set()
    await asyncio.gather(*workers)


def test_a_run_outlives_its_server_and_every_group_is_trained_on_once(server: RedisServer, keys: Keys) -> None:
    trainer = Trainer(server, keys)
    trainer.start()
    workers = threading.Thread(target=lambda: asyncio.run(work_all(server, keys, trainer)))
    workers.start()
    for count in KILLED_AT:
        trainer.wait_until_trained(count)
        server.kill()
        server.start()
    trainer.wait_until_trained(GROUPS)
    trainer.join()
    workers.join()

    assert sorted(trainer.trained) == list(range(GROUPS))
    with connect(server.section) as client:
        entries = cast(list[tuple[bytes, dict[bytes, bytes]]], client.xrange(keys.trajectories))
        numbers = [decode_group(fields).group for _, fields in entries]
        assert sorted(numbers) == list(range(GROUPS))  # each entered exactly once
        assert len(set(trainer.read)) == len(entries)
        # What was acknowledged stayed so: nothing of it is given to a trainer that comes back.
        assert cast(dict[str, int], client.xpending(keys.trajectories, TRAINER_GROUP))["pending"] == 0
        assert reader_of(client, keys).read(block_ms=1) is None
        assert unfinished(client, keys) == 0  # only claims whose answer was lost are still open


def test_the_head_and_its_announcements_outlive_the_server(server: RedisServer, keys: Keys) -> None:
    with connect(server.section) as client:
        for version in (1, 2, 3):
            move_head(client, keys, make_manifest(version))
            server.kill()
            server.start()
            assert move_head(client, keys, make_manifest(version)) is False
            head = read_head(client, keys, "policy")
            assert head is not None
            assert head.version == version
        assert client.xlen(keys.announce) == 3


def test_a_reader_that_waits_when_the_server_dies_gets_what_comes_afterwards(server: RedisServer, keys: Keys) -> None:
    found: list[object] = []
    with connect(server.section) as client, connect(server.section) as other:
        reader = reader_of(client, keys)

        def read() -> None:
            while (group := reader.read(block_ms=10_000)) is None:
                pass
            found.append(group[1])

        waiting = threading.Thread(target=read)
        waiting.start()
        while int(other.info("clients")["blocked_clients"]) == 0:
            pass
        server.kill()
        server.start()

        async def send() -> None:
            async_client = connect_async(server.section)
            queue = GroupQueue(async_client, keys, "worker", ahead=1, lease_s=60)
            claim = await queue.claim()
            assert claim is not None
            assert await queue.deliver(claim, make_group(0))
            await async_client.aclose()

        asyncio.run(send())
        waiting.join()
    assert found == [make_group(0)]


def test_a_server_that_stays_away_is_unreachable_in_the_end(server: RedisServer) -> None:
    section = server.section.model_copy(update={"outage_s": 0.3})
    with connect(section) as client:
        server.kill()
        with pytest.raises(StreamUnreachable, match="does not answer") as caught, errors(section):
            client.get("key")
        assert caught.value.exit_code == 3
        server.start()
        assert client.get("key") is None


async def test_an_async_client_of_a_server_that_stays_away_learns_it_too(server: RedisServer) -> None:
    section = server.section.model_copy(update={"outage_s": 0.3})
    client = connect_async(section)
    assert await client.get("key") is None
    server.kill()
    with pytest.raises(StreamUnreachable), errors(section):
        await client.get("key")
    await client.aclose()
    server.start()


def test_a_server_that_comes_back_with_another_password_is_not_waited_for(server: RedisServer) -> None:
    section = server.section.model_copy(update={"outage_s": 600})
    with connect(section) as client:
        client.config_set("requirepass", "another")
        client.connection_pool.disconnect()
        with pytest.raises(StreamRefused), errors(section):
            client.get("key")
