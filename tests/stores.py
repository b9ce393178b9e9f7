"""What a trainer does with a store, and what lies in it."""

from __future__ import annotations

from pathlib import Path

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import Store
from tests.factories import make_adapter, make_manifest

LIMIT = 64 * 1024


def publish(store: Store, version: int = 1, epoch: int = 1, seed: int | None = None) -> Manifest:
    """What a trainer does: bytes, then their name."""
    manifest = make_manifest(version, store.put(make_adapter(version if seed is None else seed)), epoch=epoch)
    store.commit(manifest)
    return manifest


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
