"""Ctrl-C and SIGTERM at ``fleet --watch``, at ``demo`` and at the embedded Valkey."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import psutil
import pytest

from tests.integration.shutdown.conftest import Run
from tests.processes import ENDED_BY_CTRL_C, ENDED_BY_SIGTERM, Process, lorabridge

pytestmark = pytest.mark.timeout(200)

CODES = [pytest.param(signal.SIGTERM, ENDED_BY_SIGTERM, marks=pytest.mark.slow), (signal.SIGINT, ENDED_BY_CTRL_C)]


@pytest.mark.parametrize(("number", "code"), CODES, ids=["SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize("state", ["no redis", "redis frozen", "generator frozen", "working"])
def test_who_watches_the_fleet_may_stop_at_any_time(run: Run, state: str, number: int, code: int) -> None:
    with ExitStack() as started:
        if state != "no redis":
            run.server.start()
            generator = started.enter_context(run.generator())
            generator.until(lambda: bool(psutil.Process(generator.pid).net_connections()), "its doors")
        if state == "redis frozen":
            run.server.freeze()
        if state == "generator frozen":
            generator.freeze()
        watching = started.enter_context(lorabridge(run.folder, "fleet", "--watch"))
        time.sleep(2.5)
        assert watching.running, watching.said()
        assert watching.end(number) == code


@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["working", "frozen"])
def test_an_embedded_valkey_ends_with_its_server(run: Run, frozen: bool) -> None:
    with Process(run.folder, "lorabridge.bridge.run.valkey", str(run.folder / "valkey")) as valkey:
        valkey.until((run.folder / "valkey" / "url").exists, "its URL")
        if frozen:
            (server,) = psutil.Process(valkey.pid).children()
            server.suspend()
            time.sleep(1)
        assert valkey.end(signal.SIGTERM, signal.SIGTERM) == 0


@pytest.mark.parametrize(("number", "code"), CODES, ids=["SIGTERM", "Ctrl-C"])
def test_a_demo_that_has_only_just_started_ends_at_once(run: Run, number: int, code: int) -> None:
    with Process(run.folder, "lorabridge.bridge.cli", "demo") as demo:
        time.sleep(0.3)
        assert demo.end(number) == code


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGTERM)])
def test_a_demo_that_makes_its_base_model_stops_that(run: Run, numbers: tuple[int, ...]) -> None:
    nothing_made_before = {"XDG_CACHE_HOME": str(run.folder / "cache")}
    with Process(run.folder, "lorabridge.bridge.cli", "demo", environment=nothing_made_before) as demo:
        demo.until_it_says("the base model to be made")
        assert demo.end(*numbers) == ENDED_BY_CTRL_C
