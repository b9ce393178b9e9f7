"""A worker is asked to end, in every state: it gives back what it holds, and is gone within what is promised."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lorabridge.bridge.stream.connection import connect_async
from lorabridge.bridge.stream.groups import GroupQueue
from tests.groups import LONG_S
from tests.integration.shutdown.conftest import Run
from tests.processes import ENDED_BY_CTRL_C, ENDED_BY_SIGTERM, Process, lorabridge

pytestmark = pytest.mark.timeout(200)

WAITS_FOR_THE_RUN = "waiting for the trainer to publish the run"


@pytest.fixture
def started(run: Run) -> Iterator[ExitStack]:
    with ExitStack() as started:
        yield started


def working(run: Run, started: ExitStack) -> tuple[Process, Process]:
    """A worker with groups under way, and their generator."""
    run.server.start()
    run.put_on_record()
    run.publish()
    generator = started.enter_context(run.generator())
    worker = started.enter_context(lorabridge(run.folder, "worker"))
    with run.client() as client:
        worker.until(lambda: client.zcard(run.keys.leases) == 2, "groups under way")
    return worker, generator


def claimed_next(run: Run) -> list[tuple[int, int]]:
    """(group, attempt) of what another worker gets at once."""

    async def claim() -> list[tuple[int, int]]:
        client = connect_async(run.server.section)
        queue = GroupQueue(client, run.keys, "another", ahead=2, lease_s=LONG_S)
        claims = [await queue.claim() for _ in range(2)]
        await client.aclose()
        return sorted((claim.number, claim.attempt) for claim in claims if claim)

    return asyncio.run(claim())


@pytest.mark.parametrize("after_s", [0, pytest.param(0.1, marks=pytest.mark.slow), 0.3, 1])
def test_one_that_has_only_just_started_ends_at_once(run: Run, after_s: float) -> None:
    with lorabridge(run.folder, "worker") as worker:
        time.sleep(after_s)
        assert worker.end() == ENDED_BY_SIGTERM


@pytest.mark.parametrize("after_s", [0.3, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_while_it_is_still_importing_is_no_traceback(run: Run, after_s: float) -> None:
    with lorabridge(run.folder, "worker") as worker:
        time.sleep(after_s)
        assert worker.end(signal.SIGINT) == ENDED_BY_CTRL_C


@pytest.mark.parametrize("frozen", [False, True], ids=["not there", "frozen"])
def test_one_that_waits_for_redis_ends_at_once(run: Run, frozen: bool) -> None:
    if frozen:
        run.server.start()
        run.server.freeze()
    with lorabridge(run.folder, "worker") as worker:
        time.sleep(3)
        assert worker.end() == ENDED_BY_SIGTERM


@pytest.mark.parametrize(
    "numbers", [pytest.param((signal.SIGTERM,), marks=pytest.mark.slow), (signal.SIGINT, signal.SIGINT, signal.SIGTERM)]
)
def test_one_that_waits_for_the_run_has_nothing_to_give_back(run: Run, numbers: tuple[int, ...]) -> None:
    run.server.start()
    with lorabridge(run.folder, "worker") as worker:
        worker.until_it_says(WAITS_FOR_THE_RUN)
        assert worker.end(*numbers) == 0


@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True], ids=["gone", "frozen"])
def test_one_that_waits_for_the_run_does_not_wait_for_redis(run: Run, frozen: bool) -> None:
    run.server.start()
    with lorabridge(run.folder, "worker") as worker:
        worker.until_it_says(WAITS_FOR_THE_RUN)
        run.server.freeze() if frozen else run.server.kill()
        time.sleep(1)
        assert worker.end() == 0


def test_one_that_waits_for_a_generator_ends(run: Run) -> None:
    run.server.start()
    run.put_on_record()
    run.publish()
    with lorabridge(run.folder, "worker") as worker:
        worker.until_it_says("does not answer")
        assert worker.end() == 0


def test_one_that_waits_for_a_version_ends_and_lets_go_of_its_generator(run: Run, started: ExitStack) -> None:
    """The store is not there either."""
    run.server.start()
    run.put_on_record()
    started.enter_context(run.generator())
    with lorabridge(run.folder, "worker") as worker, run.client() as client:
        worker.until(lambda: client.exists(run.control) == 1, "the generator's lease")
        assert worker.end() == 0
        assert not client.exists(run.control)


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM,),
        pytest.param((signal.SIGINT,), marks=pytest.mark.slow),
        (signal.SIGTERM, signal.SIGTERM, signal.SIGINT),
    ],
)
def test_one_that_works_gives_back_what_it_has_begun(run: Run, started: ExitStack, numbers: tuple[int, ...]) -> None:
    worker, _ = working(run, started)
    assert worker.end(*numbers) == 0
    with run.client() as client:
        assert not client.exists(run.keys.holders, run.control)
    assert claimed_next(run) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True], ids=["killed", "frozen"])
def test_one_whose_generator_is_no_more_gives_its_groups_back(run: Run, started: ExitStack, frozen: bool) -> None:
    worker, generator = working(run, started)
    generator.freeze() if frozen else generator.kill()
    time.sleep(0.5)
    assert worker.end() == 0
    assert claimed_next(run) == [(0, 2), (1, 2)]
    with run.client() as client:
        assert not client.exists(run.control)


@pytest.mark.parametrize(
    "numbers", [pytest.param((signal.SIGTERM,), marks=pytest.mark.slow), (signal.SIGINT, signal.SIGTERM, signal.SIGINT)]
)
@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
def test_one_whose_redis_is_no_more_leaves_its_leases_to_run_out(
    run: Run, started: ExitStack, frozen: bool, numbers: tuple[int, ...]
) -> None:
    worker, _ = working(run, started)
    run.server.freeze() if frozen else run.server.kill()
    time.sleep(0.5)
    assert worker.end(*numbers) == 0
    assert "runs out by itself" in worker.said()
