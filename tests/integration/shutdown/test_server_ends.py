"""``lorabridge serve``, which is vLLM, is asked to end: its engine goes with it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import httpx
import pytest

from lorabridge.bridge.sections import GeneratorsSection
from lorabridge.bridge.stream.embedded import free_ports
from tests.integration.shutdown.conftest import Run
from tests.processes import ENDED_BY_CTRL_C, ENDED_BY_SIGTERM, Process, lorabridge

pytestmark = [pytest.mark.timeout(280), pytest.mark.e2e]


def serve(run: Run) -> Process:
    port = free_ports(2)
    run.write(
        generators=GeneratorsSection(
            port=port, control_port=port + 1, max_model_len=512, max_num_seqs=4, threads=1, kv_cache_gib=1
        )
    )
    return lorabridge(run.folder, "serve")


def importing(run: Run) -> Process:
    server = serve(run)
    server.until(lambda: b"libtorch" in server.maps(), "torch")
    return server


def healthy(run: Run) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{run.settings.generators.port}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def serving(run: Run) -> Process:
    server = serve(run)
    server.until(lambda: healthy(run), "its public door")
    return server


@pytest.mark.parametrize(
    ("state", "numbers"),
    [
        (importing, (signal.SIGTERM,)),
        pytest.param(serving, (signal.SIGTERM, signal.SIGTERM), marks=pytest.mark.slow),
        pytest.param(serving, (signal.SIGINT,), marks=pytest.mark.slow),
    ],
)
def test_a_server_leaves_no_engine(
    run: Run, state: Callable[[Run], Process], numbers: tuple[signal.Signals, ...]
) -> None:
    with state(run) as server:
        code = server.end(*numbers)
        assert code in (0, ENDED_BY_SIGTERM, ENDED_BY_CTRL_C)
