"""A Valkey of these tests' own, emptied before each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.embedded import embedded_valkey
from lorabridge.bridge.stream.keys import Keys


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSection]:
    with embedded_valkey(tmp_path_factory.mktemp("valkey")) as section:
        yield section


@pytest.fixture
def client(server: RedisSection) -> Iterator[redis.Redis]:
    client = connect(server)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def keys() -> Keys:
    return Keys("run")


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"
