"""Real processes, some of them unruly: whatever happens to whom, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lorabridge.bridge.run.processes import MOST_RESTARTS, Child, died, stop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")

PATIENCE_S = 60.0

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
POLITE = "import time; print('up', flush=True); time.sleep(600)"


def family(script: str) -> str:
    """A process that starts ``script`` in a session of its own, as torchrun does with its workers."""
    return (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {script!r}, sys.argv[1]], start_new_session=True)\n"
        "time.sleep(600)"
    )


def eventually(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Started:
    """Starts children that all have the test's folder among their arguments, so that they can be found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []

    def __call__(self, script: str, name: str = "child", **options: tuple[int, ...]) -> Child:
        child = Child(
            name, [sys.executable, "-c", script, str(self.folder)], log=self.folder / f"{name}.log",
            environment=os.environ, **options,
        )  # fmt: skip
        self.children.append(child)
        return child

    def left(self) -> list[str]:
        """Command lines of every process that works for the test."""
        found = []
        for process in psutil.process_iter(["cmdline", "status", "pid"]):
            line = process.info["cmdline"] or []
            if str(self.folder) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(line))
        return found

    def up(self, count: int = 1) -> bool:
        """Whether that many children have said so."""
        return sum(log.read_text().count("up\n") for log in self.folder.glob("*.log")) >= count


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    stop([started.children], within_s=0)
    assert not started.left()


def test_a_process_has_its_output_in_its_log(start: Started) -> None:
    child = start("import sys; print('out'); print('err', file=sys.stderr)", ends_with=(0,))
    assert eventually(lambda: child.code == 0)
    assert sorted(child.output().split()) == ["err", "out"]
    assert not child.failed


def test_a_process_that_heeds_sigterm_is_not_killed(start: Started) -> None:
    child = start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('flushed')))\n"
        "print('up', flush=True); time.sleep(600)"
    )
    assert eventually(start.up)
    stop([[child]], within_s=PATIENCE_S)
    assert child.code == 0
    assert "flushed" in child.output()
    assert not child.failed


@pytest.mark.parametrize("script", [STUBBORN, family(STUBBORN), family(family(STUBBORN))])
def test_a_process_that_does_not_is_killed_with_all_it_started(start: Started, script: str) -> None:
    child = start(script)
    assert eventually(start.up)
    stop([[child]], within_s=0.5)
    assert not start.left()


def test_stages_stop_in_order(start: Started) -> None:
    early, late = start(POLITE, "early"), start(POLITE, "late")
    assert eventually(lambda: start.up(2))
    early_was: list[int | None] = []
    ask = late.ask_to_stop

    def ask_late() -> None:
        early_was.append(early.code)
        ask()

    late.ask_to_stop = ask_late  # type: ignore[method-assign]
    stop([[early], [late]], within_s=PATIENCE_S)
    assert early_was == [128 + signal.SIGTERM]
    assert late.code == 128 + signal.SIGTERM


def test_a_hurry_kills_at_once_what_would_have_had_time(start: Started) -> None:
    child = start(STUBBORN)
    assert eventually(start.up)
    stop([[child]], within_s=100 * PATIENCE_S, hurry=lambda: True)
    assert not start.left()


def test_shared_memory_of_a_killed_process_is_removed(start: Started) -> None:
    child = start(f"from multiprocessing.shared_memory import SharedMemory as M; m = M(create=True, size=9)\n"
                  f"print(m.name, flush=True)\n{STUBBORN}")  # fmt: skip
    assert eventually(start.up)
    memory = Path("/dev/shm") / child.output().split()[0]
    assert memory.exists()
    stop([[child]], within_s=0)
    assert not memory.exists()


def test_what_a_dead_process_leaves_is_cleaned_up_at_once(start: Started) -> None:
    child = start(
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}, sys.argv[1]], start_new_session=True)\n"
        f"while 'up' not in open({str(start.folder / 'child.log')!r}).read(): time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert eventually(lambda: child.code is not None)
    assert not start.left()
    assert child.failed
    assert "child ended (killed by signal 9)" in died(child).problem


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("raise ValueError('no such rank')", 9, "worker ended (exit code 1): ValueError: no such rank"),
        ("print('lorabridge: run: seed differs. Use it'); exit(8)", 8, "(exit code 8): run: seed differs. Use it"),
        ("pass", 9, "worker ended (exit code 0): it wrote nothing"),
    ],
)
def test_a_process_that_died_is_named_with_its_last_words(start: Started, script: str, code: int, words: str) -> None:
    child = start(script, "worker")
    assert eventually(lambda: child.code is not None)
    assert child.failed
    error = died(child)
    assert words in error.problem
    assert error.exit_code == code
    assert str(child.log) in error.action


def test_a_log_of_an_earlier_process_is_not_quoted(start: Started) -> None:
    for script in ("print('ValueError: of before')", "print('now')"):
        child = start(script)
        assert eventually(lambda child=child: child.code is not None)  # type: ignore[misc]
    assert child.output() == "now\n"


SUPERVISED = """
import sys
from pathlib import Path
from rich.console import Console
from lorabridge.bridge.run.supervisor import with_values
from lorabridge.bridge.run.up import supervised
from lorabridge.bridge.settings import (Settings)
from lorabridge.bridge import cli

def main():
    folder = Path(sys.argv[1])
    with supervised(with_values(Settings(), "run", dir=folder), Console()) as supervisor:
        for name in ("stubborn", "polite", "archiver"):
            supervisor.start(name, name, sys.argv[1])
        supervisor.attend(lambda: False, "the end of the world")

cli.build = lambda: lambda **options: main()
cli.main()
"""


class Supervising:
    """A supervisor in a process of its own, whose three children have children."""

    def __init__(self, start: Started) -> None:
        self._start = start
        modules = {"stubborn": family(STUBBORN), "polite": family(POLITE), "archiver": POLITE + " # " + "archiver"}
        for name, script in modules.items():
            (start.folder / f"{name}.py").write_text(script)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISED, str(start.folder)],
            env={**os.environ, "PYTHONPATH": str(start.folder)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def up(self) -> bool:
        logs = (self._start.folder / "logs").glob("*.log")
        return sum(log.read_text().count("up\n") for log in logs) == 3


@pytest.fixture
def supervising(start: Started) -> Iterator[Supervising]:
    it = Supervising(start)
    assert eventually(it.up)
    yield it
    if it.process.poll() is None:
        it.process.kill()
    it.process.communicate(timeout=PATIENCE_S)
    assert eventually(lambda: not start.left())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_leaves_nothing(start: Started, supervising: Supervising, number: int) -> None:
    os.killpg(supervising.process.pid, number)
    output, errors = supervising.process.communicate(timeout=PATIENCE_S)
    assert supervising.process.returncode == 130
    assert not start.left()
    assert "every process to stop" in output
    assert "Traceback" not in errors


def test_a_second_ctrl_c_leaves_nothing_either(start: Started, supervising: Supervising) -> None:
    supervising.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    for _ in range(5):
        supervising.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    supervising.process.communicate(timeout=PATIENCE_S)
    assert supervising.process.returncode == 130
    assert not start.left()


def test_a_supervisor_that_is_killed_leaves_nothing(start: Started, supervising: Supervising) -> None:
    supervising.process.kill()
    assert eventually(lambda: not start.left())


def polite(supervising: Supervising) -> list[psutil.Process]:
    try:
        everyone = psutil.Process(supervising.process.pid).children(recursive=True)
        return [process for process in everyone if process.cmdline()[1:4] == ["-P", "-m", "polite"]]
    except psutil.NoSuchProcess:
        return []


def test_one_that_is_killed_is_started_again_but_not_for_ever(start: Started, supervising: Supervising) -> None:
    (first,) = polite(supervising)
    first.kill()
    assert eventually(lambda: any(process.pid != first.pid for process in polite(supervising)))
    while supervising.process.poll() is None:
        for process in polite(supervising):
            process.kill()
        time.sleep(0.01)
    said, errors = supervising.process.communicate(timeout=PATIENCE_S)
    assert said.count("polite was killed by signal 9: started again") == MOST_RESTARTS
    assert supervising.process.returncode == 9
    assert not start.left()
    assert errors.startswith("lorabridge: machine: polite ended (killed by signal 9)")
    assert f"Its log is {start.folder}/logs/polite.log" in errors
