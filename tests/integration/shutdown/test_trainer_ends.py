"""``lorabridge train`` is asked to end: no rank is left, no traceback is printed, whatever it waits for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.shutdown.conftest import Run
from tests.processes import ENDED_BY_CTRL_C, ENDED_BY_SIGTERM, Process, lorabridge

pytestmark = pytest.mark.timeout(250)

CODES = {signal.SIGTERM: ENDED_BY_SIGTERM, signal.SIGINT: ENDED_BY_CTRL_C}


def importing(run: Run) -> Process:
    run.server.start()
    train = lorabridge(run.folder, "train")
    train.until(lambda: b"libtorch" in train.maps(), "torch in the launcher")
    return train


def starting_ranks(run: Run) -> Process:
    run.server.start()
    train = lorabridge(run.folder, "train", "--nproc-per-node=2")
    train.until(lambda: len(train.left()) == 2, "its ranks")
    return train


def waiting_for_samples(run: Run) -> Process:
    run.server.start()
    train = lorabridge(run.folder, "train")
    with run.client() as client:
        train.until(lambda: client.exists(run.keys.head("policy")) == 1, "version 1")
    return train


def redis_gone(run: Run) -> Process:
    train = waiting_for_samples(run)
    run.server.kill()
    time.sleep(1)
    return train


def redis_frozen(run: Run) -> Process:
    train = waiting_for_samples(run)
    run.server.freeze()
    time.sleep(1)
    return train


@pytest.mark.parametrize(("number", "code"), CODES.items(), ids=["SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize("frozen", [False, True], ids=["not there", "frozen"])
def test_one_that_waits_for_redis_ends_at_once(run: Run, frozen: bool, number: int, code: int) -> None:
    if frozen:
        run.server.start()
        run.server.freeze()
    with lorabridge(run.folder, "train") as train:
        time.sleep(2)
        assert train.end(number) == code


@pytest.mark.parametrize(
    ("state", "numbers"),
    [
        pytest.param(importing, (signal.SIGTERM,), marks=pytest.mark.slow),
        pytest.param(importing, (signal.SIGINT,), marks=pytest.mark.slow),
        (starting_ranks, (signal.SIGINT, signal.SIGINT)),
        pytest.param(starting_ranks, (signal.SIGTERM,), marks=pytest.mark.slow),
        (waiting_for_samples, (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)),
        pytest.param(waiting_for_samples, (signal.SIGINT,), marks=pytest.mark.slow),
        pytest.param(redis_gone, (signal.SIGTERM,), marks=pytest.mark.slow),
        pytest.param(redis_frozen, (signal.SIGTERM,), marks=pytest.mark.slow),
        pytest.param(redis_frozen, (signal.SIGINT, signal.SIGTERM), marks=pytest.mark.slow),
    ],
)
def test_no_rank_is_left_and_the_code_is_that_of_the_signal(
    run: Run, state: Callable[[Run], Process], numbers: tuple[signal.Signals, ...]
) -> None:
    with state(run) as train:
        assert train.end(*numbers) == CODES[numbers[0]]
