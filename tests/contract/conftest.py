"""Stores of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lorabridge.bridge.store import Store, open_store
from tests.stores import LIMIT

BACKENDS: dict[str, Callable[[Path, int], Store]] = {"local": lambda folder, limit: open_store(str(folder), limit)}


@pytest.fixture(params=BACKENDS)
def open_at(request: pytest.FixtureRequest) -> Callable[[Path, int], Store]:
    """Opens a store of one kind in a folder, with a limit in bytes."""
    return BACKENDS[request.param]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(open_at: Callable[[Path, int], Store], root: Path) -> Store:
    return open_at(root, LIMIT)
