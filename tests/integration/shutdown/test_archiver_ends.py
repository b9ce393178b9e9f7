"""An archiver is asked to end, in every state: what it acknowledged is in the ledger, and nothing else is gone."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import pytest

from tests.archives import acknowledged, assert_holds, drain, forget_lease, make_archiver, send_all
from tests.integration.shutdown.conftest import Run
from tests.processes import ENDED_BY_CTRL_C, ENDED_BY_SIGTERM, Process, lorabridge

pytestmark = pytest.mark.timeout(200)

NUMBERS = range(3)


def archiving(run: Run) -> Process:
    """An archiver that waits for entries."""
    archiver = lorabridge(run.folder, "archiver")
    archiver.until_it_says("continues")
    return archiver


@pytest.mark.parametrize("after_s", [0, 0.1, 0.3, 0.6])
def test_one_that_has_only_just_started_ends_at_once(run: Run, after_s: float) -> None:
    with lorabridge(run.folder, "archiver") as archiver:
        time.sleep(after_s)
        assert archiver.end() == ENDED_BY_SIGTERM


@pytest.mark.parametrize("frozen", [False, True], ids=["not there", "frozen"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, ENDED_BY_SIGTERM), (signal.SIGINT, ENDED_BY_CTRL_C)])
def test_one_that_waits_for_redis_ends_at_once(run: Run, frozen: bool, number: int, code: int) -> None:
    if frozen:
        run.server.start()
        run.server.freeze()
    with lorabridge(run.folder, "archiver") as archiver:
        time.sleep(2)
        assert archiver.end(number) == code


def test_one_that_waits_for_another_to_let_go_of_the_ledger_ends(run: Run) -> None:
    run.server.start()
    with run.client() as client:
        client.set(run.keys.archiver, 1, px=600_000)
        with lorabridge(run.folder, "archiver") as archiver:
            archiver.until(lambda: run.settings.ledger_dir.exists(), "the ledger's folder")
            time.sleep(0.5)
            assert archiver.end() == 0
        assert client.get(run.keys.archiver) == b"1"


def test_one_whose_streams_go_on_filling_ends_as_well(run: Run) -> None:
    run.server.start()
    ended = threading.Event()

    def write() -> None:
        with run.client() as client:
            for number in itertools.count():
                send_all(client, run.keys, range(number, number + 1))
                if ended.wait(0.01):
                    return

    writing = threading.Thread(target=write)
    with archiving(run) as archiver:
        writing.start()
        try:
            time.sleep(1)
            assert archiver.end() == 0
        finally:
            ended.set()
            writing.join()


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)])
def test_one_that_works_writes_what_is_there_and_lets_go_of_the_ledger(run: Run, numbers: tuple[int, ...]) -> None:
    run.server.start()
    with archiving(run) as archiver, run.client() as client:
        ids = send_all(client, run.keys, NUMBERS)
        assert archiver.end(*numbers) == 0
        assert_holds(run.settings.ledger_dir, NUMBERS)
        assert str(acknowledged(client, run.keys.trajectories)) == ids[-1]
        assert not client.exists(run.keys.archiver)


@pytest.mark.parametrize(
    "numbers",
    [pytest.param((signal.SIGTERM,), marks=pytest.mark.slow), (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
def test_one_whose_redis_is_no_more_says_so_and_loses_nothing(
    run: Run, frozen: bool, numbers: tuple[int, ...]
) -> None:  # fmt: skip
    run.server.start()
    with archiving(run) as archiver:
        with run.client() as client:
            send_all(client, run.keys, NUMBERS)
            client.execute_command("WAITAOF", 1, 0, 5000)  # a kill takes back what is not on disk
        run.server.freeze() if frozen else run.server.kill()
        time.sleep(1.5)
        assert archiver.end(*numbers) == 3
        assert "does not answer" in archiver.said()
    if frozen:
        run.server.thaw()
    else:
        run.server.start()
    with run.client() as client:
        forget_lease(client, run.keys)
        drain(make_archiver(client, run.keys, run.settings.ledger_dir))
        assert_holds(run.settings.ledger_dir, NUMBERS)
