"""What every test may ask for: a server of each kind, a run of its own on it, and clients that are closed."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import hypothesis
import pytest
import redis
import redis.asyncio

from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.stream.connection import connect, connect_async
from lorabridge.bridge.stream.embedded import embedded_valkey
from lorabridge.bridge.stream.keys import Keys
from tests.servers import RedisServer, redis_binary

hypothesis.settings.register_profile("desk", deadline=None, database=None)
hypothesis.settings.register_profile("ci", deadline=None, database=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "desk")


@contextmanager
def _debian_redis(folder: Path) -> Iterator[RedisSection]:
    with RedisServer(folder, redis_binary()) as server:
        yield server.section


@pytest.fixture(scope="session", params=["embedded-valkey", "redis-server"])
def redis_section(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSection]:
    """How to reach a running server: once per backend and session, shared by tests that each have a run of their own.

    It is not to be stopped or flushed; a test that does either starts its own (``tests.servers``).
    """
    folder = tmp_path_factory.mktemp(request.param)
    server: AbstractContextManager[RedisSection]
    server = embedded_valkey(folder) if request.param == "embedded-valkey" else _debian_redis(folder)
    with server as section:
        yield section


@pytest.fixture
def run_id() -> str:
    """A run that no other test uses."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def keys(run_id: str) -> Keys:
    """The keys of this test's run."""
    return Keys(run_id)


@pytest.fixture
def client(redis_section: RedisSection) -> Iterator[redis.Redis]:
    """A client as a process of a run has it."""
    with connect(redis_section) as client:
        yield client


@pytest.fixture
async def async_client(redis_section: RedisSection) -> AsyncIterator[redis.asyncio.Redis]:
    """As ``client``, for asyncio."""
    client = connect_async(redis_section)
    yield client
    await client.aclose()
