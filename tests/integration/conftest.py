"""What integration tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
import redis.asyncio

from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.keys import Keys
from tests.workers import Bench


@pytest.fixture
def bench(client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, tmp_path: Path) -> Bench:
    """A run with one generator that does what it is told."""
    return Bench(client, async_client, keys, open_store(str(tmp_path / "store")))
