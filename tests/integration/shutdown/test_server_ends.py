"""``lorabridge serve`` is asked to end, or something is killed: vLLM and its engine go with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress

import httpx
import psutil
import pytest

from lorabridge.bridge.sections import GeneratorsSection
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.embedded import free_ports
from lorabridge.rollout.generator import Generator
from lorabridge.rollout.wire import GENERATE
from tests.e2e.models import commit, make_adapter, make_base
from tests.e2e.traffic import swap
from tests.integration.shutdown.conftest import Run
from tests.processes import ENDED_BY_CTRL_C, ENDED_BY_SIGTERM, Process, lorabridge

pytestmark = [pytest.mark.timeout(280), pytest.mark.e2e]

VLLM = "vllm.entrypoints.openai.api_server"
ENGINE = "VLLM::EngineCore"
KILLED = 128 + signal.SIGKILL


def serve(run: Run) -> Process:
    port = free_ports(2)
    doors = GeneratorsSection(
        port=port, control_port=port + 1, max_model_len=1024, max_num_seqs=4, threads=1, kv_cache_gib=1,
        token_file=run.settings.token_file,
    )  # fmt: skip
    run.write(generators=doors)
    return lorabridge(run.folder, "serve")


def maps(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return "".join(each.path for each in process.memory_maps())
    return ""


def beginning(run: Run) -> Process:
    server = serve(run)
    server.until(lambda: bool(server.started("")), "its guard")
    return server


def importing(run: Run) -> Process:
    server = serve(run)
    server.until(lambda: any("libtorch" in maps(each) for each in server.started(VLLM)), "torch")
    return server


def loading(run: Run) -> Process:
    """Its engine is at work on the model, when vLLM hears no SIGTERM."""
    server = serve(run)
    server.until_it_says("(EngineCore")
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


TERM, CTRL_C = (signal.SIGTERM,), (signal.SIGINT,)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("state", "numbers", "code"),
    [
        (importing, CTRL_C, ENDED_BY_CTRL_C),
        (loading, (*TERM, *TERM, *CTRL_C), ENDED_BY_SIGTERM),
        pytest.param(beginning, TERM, ENDED_BY_SIGTERM, marks=SLOW),
        pytest.param(beginning, CTRL_C, ENDED_BY_CTRL_C, marks=SLOW),
        pytest.param(importing, TERM, ENDED_BY_SIGTERM, marks=SLOW),
        pytest.param(loading, CTRL_C, ENDED_BY_CTRL_C, marks=SLOW),
        pytest.param(serving, (*TERM, *TERM), 0, marks=SLOW),
        pytest.param(serving, CTRL_C, 0, marks=SLOW),
    ],
)
def test_a_server_ends_in_whatever_state_and_leaves_no_engine(
    run: Run, state: Callable[[Run], Process], numbers: tuple[signal.Signals, ...], code: int
) -> None:
    with state(run) as server:
        assert server.end(*numbers) == code


@pytest.mark.parametrize("state", [pytest.param(importing, marks=SLOW), pytest.param(loading, marks=SLOW), serving])
def test_a_server_that_is_killed_takes_everything_with_it(run: Run, state: Callable[[Run], Process]) -> None:
    with state(run) as server:
        server.kill()
        server.until_nothing_is_left()


def vllm(server: Process) -> psutil.Process:
    (process,) = server.started(VLLM)
    return process


def engine(server: Process) -> psutil.Process:
    (process,) = server.started(ENGINE)
    return process


def guard(server: Process) -> psutil.Process:
    (process,) = psutil.Process(server.pid).children()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("victim", [vllm, guard, engine])
def test_it_ends_if_a_part_of_it_is_killed(run: Run, victim: Callable[[Process], psutil.Process]) -> None:
    with serving(run) as server:
        victim(server).kill()
        server.until_it_has_ended()
        assert server.code == KILLED
        assert not server.left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_what_is_in_flight_finishes(run: Run, number: int) -> None:
    run.base = make_base(run.folder / "wide")  # as wide as vLLM's attention kernels want it
    run.write(model=run.settings.model.model_copy(update={"path": str(run.base)}))
    with serving(run) as server:
        store, own = open_store(run.settings.store_url), run.settings.generators
        (manifest,) = commit(store, run.base, "policy", [make_adapter(run.base, 1)])
        async with Generator(*own.doors(0), run.settings.token_file.read_text(), 4) as generator:
            await swap(generator, manifest)
            await sample(generator, 1)
            asked = [asyncio.create_task(sample(generator, 200)) for _ in range(3)]
            while (await generator.state()).running < len(asked):  # noqa: ASYNC110  (they are in another process)
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(server.end, number) == 0
            assert [len(await each) for each in asked] == [200] * 3


async def sample(generator: Generator, tokens: int) -> list[int]:
    """So many tokens: it does not end by itself earlier."""
    parameters = {"max_tokens": tokens, "ignore_eos": True}
    body = {"model": "policy", "token_ids": [5, 6, 7, 8], "sampling_params": parameters}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(generator.url + GENERATE, json=body)
    ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_hangs_is_not_waited_for(run: Run, number: int) -> None:
    with serving(run) as server:
        vllm(server).suspend()
        assert server.end(number) == 128 + number
