"""From the trainer's announcement to every worker's acknowledgement: ``python -m tests.benchmarks.fanout``.

One Redis, and workers without an engine in a few processes. Ours: ``move_head``, the worker's own listening loop, and
the event that it reports after a swap. Bare: the same commands with bytes of the same size from redis-py's own clients,
which go on listening while they report, as a worker must.
The two take turns, so that a machine that slows down slows down both. A latency is that of one worker and one
announcement: from just before it is made until the server has answered the worker's event.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, cast

import redis
import redis.asyncio

from lorabridge.bridge import codec
from lorabridge.bridge.events import Resident, event_fields
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.status import Status
from lorabridge.bridge.stream.connection import connect, connect_async
from lorabridge.bridge.stream.embedded import embedded_valkey
from lorabridge.bridge.stream.head import move_head
from lorabridge.bridge.stream.keys import BODY, Keys
from lorabridge.rollout.worker import Worker
from tests.benchmarks.table import Goal, conclude
from tests.factories import make_manifest, make_residency, make_run_record

Side = Literal["ours", "bare"]
_SIDES: tuple[Side, ...] = ("ours", "bare")
_KEYS = {side: Keys(f"fanout-{side}") for side in _SIDES}
_PROCESSES = 2
_WARM_UP, _HEARD = 6, 3  # announcements, and how many of them all must have heard
_PATIENCE_S, _SETTLE_S = 30.0, 0.05
_PHASES_MS = {"fetch": 3.0, "pause": 9.0, "place": 5.0, "label": 1.0, "resume": 0.5}

# As ``move_head``'s, and the version beside the body, so that a bare worker need not look into it.
_MOVE = """
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
local wanted = tonumber(ARGV[1])
if wanted == version and redis.call('HGET', KEYS[1], 'digest') == ARGV[2] then return 0 end
if wanted <= version then return -1 end
redis.call('HSET', KEYS[1], 'version', ARGV[1], 'digest', ARGV[2])
redis.call('XADD', KEYS[2], '*', 'version', ARGV[1], 'body', ARGV[3])
return 1
"""

# What a process of workers tells: of which side and version, and when each was answered (``time.monotonic``, seconds).
Answers = tuple[Side, int, list[float]]


def happening(version: int) -> Resident:
    """What a worker reports once ``version`` is in place."""
    return Resident(residency=make_residency(version, version), swap_ms=_PHASES_MS)


class Answered:
    """Collects when the workers of this process were answered, and tells once all of them were."""

    def __init__(self, workers: int, pipe: Connection) -> None:
        self._workers, self._pipe = workers, pipe
        self._at: dict[tuple[Side, int], list[float]] = defaultdict(list)

    def note(self, side: Side, version: int) -> None:
        at = self._at[side, version]
        at.append(time.monotonic())
        if len(at) == self._workers:
            self._pipe.send((side, version, at))


class Acknowledger:
    """Stands where a worker has a ``Member``: what is wanted is taken as served at once, and reported."""

    def __init__(self, worker: Worker, answered: Answered) -> None:
        self._worker, self._answered = worker, answered
        self._wanted: asyncio.Queue[Manifest] = asyncio.Queue()

    def want(self, manifest: Manifest) -> None:
        self._wanted.put_nowait(manifest)

    async def run(self) -> None:
        while True:
            version = (await self._wanted.get()).version
            await self._worker.report(happening(version))
            self._answered.note("ours", version)


async def our_worker(section: RedisSection, number: int, answered: Answered) -> None:
    nothing = cast(Any, None)  # it neither claims nor samples
    worker = Worker(
        name=f"worker-{number}", run=make_run_record(), client=connect_async(section), keys=_KEYS["ours"],
        queue=nothing, sampler=nothing, timeout_s=60, renew_s=1, start_s=60, reconcile=nothing,
        now_ms=lambda: time.time_ns() // 1_000_000, status=Status(),
    )  # fmt: skip
    acknowledger = Acknowledger(worker, answered)
    worker.members = [cast(Any, acknowledger)]
    await asyncio.gather(worker._listen(), acknowledger.run())


async def bare_worker(client: redis.asyncio.Redis, body: bytes, answered: Answered) -> None:
    last = b"$"

    async def report(version: int) -> None:
        await client.xadd(_KEYS["bare"].events, {BODY: body})
        answered.note("bare", version)

    async with asyncio.TaskGroup() as tasks:
        while True:
            reply = cast(Any, await client.xread({_KEYS["bare"].announce: last}, block=1000))
            for _, entries in reply or []:
                for entry, fields in entries:
                    last = entry
                    tasks.create_task(report(int(fields[b"version"])))
            await asyncio.sleep(0)  # the report is sent before the next read, as on our side


def work(section: RedisSection, workers: int, pipe: Connection) -> None:
    """A process with so many workers of either side."""
    asyncio.run(_work(section, workers, pipe))


async def _work(section: RedisSection, workers: int, pipe: Connection) -> None:
    assert section.password_file is not None
    password, answered = section.password_file.read_text(), Answered(workers, pipe)
    body = cast(bytes, event_fields("worker-0", time.time_ns() // 1_000_000, happening(1))["body"])
    clients = [redis.asyncio.Redis.from_url(section.url, password=password) for _ in range(workers)]
    ours = [our_worker(section, number, answered) for number in range(workers)]
    gc.freeze()  # as a worker does
    await asyncio.gather(*ours, *(bare_worker(client, body, answered) for client in clients))


@dataclass(kw_only=True)
class Trainer:
    """Announces on either side, and waits until every worker was answered."""

    client: redis.Redis
    bare: redis.Redis
    pipes: Sequence[Connection]
    version: int = 0

    def announce(self, side: Side, patience_s: float = _PATIENCE_S) -> list[float] | None:
        """Seconds that it took, per worker; None if a worker was not answered in time."""
        self.version += 1
        manifest = make_manifest(self.version)
        time.sleep(_SETTLE_S)
        began = time.monotonic()
        if side == "ours":
            move_head(self.client, _KEYS["ours"], manifest)
        else:
            self._announce_bare(str(self.version), manifest.digest, codec.encode(manifest))
        answers = self._answers(side, began + patience_s)
        return None if answers is None else [at - began for at in answers]

    def _announce_bare(self, version: str, digest: str, body: bytes) -> None:
        keys = _KEYS["bare"]
        self.bare.eval(_MOVE, 2, keys.head("policy"), keys.announce, version, digest, body)

    def _answers(self, side: Side, until: float) -> list[float] | None:
        waiting, found = set(self.pipes), list[float]()
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                return None
            for pipe in cast(list[Connection], ready):
                of, version, at = cast(Answers, pipe.recv())
                if (of, version) == (side, self.version):
                    waiting.discard(pipe)
                    found += at
        return found


@contextmanager
def processes(section: RedisSection, workers: int) -> Iterator[list[Connection]]:
    """Workers in processes, until the block ends; a pipe from each."""
    spawn = multiprocessing.get_context("spawn")
    pipes, started = [], []
    try:
        for _ in range(_PROCESSES):
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=work, args=(section, workers // _PROCESSES, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            started.append(process)
        yield pipes
    finally:
        for process in started:
            process.terminate()
            process.join()


def warm_up(trainer: Trainer, workers: int) -> None:
    """Until every worker has heard a few: one that has not read yet misses what is announced meanwhile."""
    deadline = time.monotonic() + 120
    while int(trainer.bare.info("clients")["blocked_clients"]) < len(_SIDES) * workers * 0.9:
        if time.monotonic() > deadline:
            raise SystemExit("the workers did not come up")
        time.sleep(0.1)
    for side in _SIDES:
        heard = sum(trainer.announce(side, 3.0) is not None for _ in range(_WARM_UP))
        if heard < _HEARD:
            raise SystemExit(f"{side}: {heard} of {_WARM_UP} announcements were heard by all")


def measure(folder: Path, workers: int, rounds: int) -> dict[Side, list[list[float]]]:
    """Latencies in seconds, per side and announcement, on a Redis of its own."""
    found: dict[Side, list[list[float]]] = {side: [] for side in _SIDES}
    with embedded_valkey(folder) as section, processes(section, workers) as pipes:
        assert section.password_file is not None
        password = section.password_file.read_text()
        bare = redis.Redis.from_url(section.url, password=password)
        trainer = Trainer(client=connect(section), bare=bare, pipes=pipes)
        warm_up(trainer, workers)
        for number in range(rounds):
            for side in _SIDES if number % 2 else reversed(_SIDES):
                latencies = trainer.announce(side)
                if latencies is None:
                    raise SystemExit(f"{side}: not every worker was answered within {_PATIENCE_S:g} s")
                found[side].append(latencies)
        bare.close()
        trainer.client.close()
    return found


def column_of(workers: int, found: dict[Side, list[list[float]]]) -> dict[str, object]:
    """p50 and p99 over every worker and announcement; ``last`` is the slowest worker's, the median announcement."""
    column: dict[str, object] = {"workers": workers, "announcements": len(found["ours"])}
    figures: dict[str, dict[Side, float]] = defaultdict(dict)
    for side in _SIDES:
        cuts = statistics.quantiles(chain.from_iterable(found[side]), n=100, method="inclusive")
        figures["p50"][side], figures["p99"][side] = cuts[49], cuts[98]
        figures["last"][side] = statistics.median(map(max, found[side]))
    for name, of in figures.items():
        column |= {f"{name} ms, {side}": of[side] * 1000 for side in _SIDES}
        column[f"{name}, ours over bare"] = of["ours"] / of["bare"]
    return column


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.benchmarks.fanout", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--rounds", type=int, default=300, help="announcements on either side, per number of workers")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if any(workers < 1 or workers % _PROCESSES for workers in given.workers):
        parser.error(f"--workers: a multiple of {_PROCESSES}, they live in so many processes")
    columns = []
    for workers in given.workers:
        with tempfile.TemporaryDirectory(prefix="fanout-") as folder:
            columns.append(column_of(workers, measure(Path(folder), workers, given.rounds)))
    last = columns[-1]
    ratio = cast(float, last["p99, ours over bare"])
    goal = Goal(name=f"p99 at {last['workers']} workers, ours over bare", value=ratio, most=1.3)
    return conclude("Announced to acknowledged, without an engine", columns, [goal], as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
