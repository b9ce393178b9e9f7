"""One vLLM server for the whole session, and two adapters that it can swap between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.sections import GeneratorsSection, ModelSection, PolicySection, RunSection, StoreSection
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.stream.embedded import free_port
from tests.e2e import tamper
from tests.e2e.models import RANK, commit, make_adapter, make_base
from tests.e2e.server import Server, running

WORKER = f"{tamper.__name__}.{tamper.AttestOfWhatWasTamperedWith.__name__}"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = Settings(
        run=RunSection(id="e2e", dir=tmp_path_factory.mktemp("run")),
        model=ModelSection(path=str(base)),
        policy=PolicySection(name="pair", rank=RANK),
        generators=GeneratorsSection(
            port=free_port(),
            control_port=free_port(),
            max_model_len=1024,
            max_num_seqs=32,
            threads=1,
            max_loras=16,
            kv_cache_gib=1,
        ),
    )
    with running(settings) as server:
        yield server


@pytest.fixture(scope="session")
def pair(server: Server, base: Path) -> list[Manifest]:
    """Versions 1 and 2 of the policy ``pair``."""
    return commit(server.store, base, "pair", [make_adapter(base, seed) for seed in (1, 2)])


@pytest.fixture(scope="session")
def order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file whose coming has a slot of the server changed."""
    return tmp_path_factory.mktemp("order") / "tamper"


@pytest.fixture(scope="session")
def tampered(server: Server, base: Path, order: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second server of the same store, in which slots change as ``order`` says."""
    settings = Settings(
        run=RunSection(id="tampered", dir=tmp_path_factory.mktemp("tampered")),
        store=StoreSection(url=server.settings.store_url),
        model=ModelSection(path=str(base)),
        policy=PolicySection(name="pair", rank=RANK),
        generators=GeneratorsSection(
            port=free_port(), control_port=free_port(), max_model_len=1024, max_num_seqs=32, threads=1, max_loras=2,
            kv_cache_gib=1, token_file=server.settings.token_file, args=("--worker-extension-cls", WORKER),
        ),
    )  # fmt: skip
    environment = {tamper.FILE: str(order), "PYTHONPATH": str(Path(__file__).parents[2])}
    with running(settings, environment) as server:
        yield server
