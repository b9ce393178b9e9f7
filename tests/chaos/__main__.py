"""Kill one process of a real run after another, and see that nothing was lost: ``python -m tests.chaos``.

Each round kills one process of {trainer, worker, generator, Redis, archiver} of a running demo with SIGKILL, and waits
until two more versions have been published. When enough rounds are done, or training has ended, the run finishes and
audits itself. Then: it exited with 0; its versions form one line; every trajectory that was trained on is in the
ledger, once; nothing is refuted or unverifiable. A line of figures per run is appended to the results, so that several
calls add up.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from lorabridge.bridge.events import Consumed
from lorabridge.bridge.ledger.commits import read_log
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.run.feed import Feed
from lorabridge.bridge.settings import Settings, load
from lorabridge.bridge.store import open_store

# What a process of each kind has on its command line; the ones that do the work, not their guards.
KINDS = {
    "trainer": "lorabridge.trainer.grpo",
    "worker": "lorabridge.bridge.cli worker",
    "generator": "vllm.entrypoints.openai.api_server",
    "redis": "valkey-server",
    "archiver": "lorabridge.bridge.cli archiver",
}
_GUARD = "lorabridge.bridge.run.guard"
_TRAINER_S = 10.0
_START_S, _PROGRESS_S, _END_S = 300.0, 300.0, 900.0


class Failed(Exception):
    """What should not have happened."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="kills in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run")
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as of lorabridge demo")
    parser.add_argument("--results", type=Path, default=Path("runs/chaos.jsonl"))
    given = parser.parse_args()
    rng = random.Random(given.seed)
    kills: Counter[str] = Counter()
    while kills.total() < given.rounds:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            killed, figures = one_run(Path(folder), given, rng, given.rounds - kills.total())
        kills.update(killed)
        given.results.parent.mkdir(parents=True, exist_ok=True)
        with given.results.open("a") as results:
            results.write(json.dumps({"seed": given.seed, "kills": killed, **figures}) + "\n")
        print(json.dumps({"kills": killed, **figures}), flush=True)
    return 0


def one_run(
    folder: Path, given: argparse.Namespace, rng: random.Random, rounds: int
) -> tuple[dict[str, int], dict[str, object]]:  # fmt: skip
    """One demo with up to ``rounds`` kills: how often each kind was killed, and its figures. Raises ``Failed``."""
    run = folder / "run"
    command = [
        sys.executable, "-m", "lorabridge.bridge.cli", "demo", "--steps", str(given.steps), "--json",
        "--generators", str(given.generators), "--set", f"run.dir={run}",
        *(part for change in given.set for part in ("--set", change)),
    ]  # fmt: skip
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        demo = subprocess.Popen(command, stdout=out, stderr=err)
    try:
        kills = harass(demo, run, given.kinds, rng, rounds)
        code = demo.wait(_END_S)
        if code != 0:
            raise Failed(f"the run ended with {code}")
        return kills, check(load(run / "config.toml"))
    except BaseException:
        print((folder / "err").read_text()[-4000:], file=sys.stderr)
        for log in sorted((run / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}", file=sys.stderr)
        raise
    finally:
        if demo.poll() is None:
            demo.send_signal(signal.SIGINT)
            demo.wait(60)


def harass(
    demo: subprocess.Popen[bytes], run: Path, kinds: list[str], rng: random.Random, rounds: int
) -> dict[str, int]:  # fmt: skip
    """Kill, wait for progress, and again; how often each kind was killed."""
    kills: Counter[str] = Counter()
    settings = wait_for_config(demo, run)
    with Feed(settings) as feed:
        if not progress(demo, feed, 3, _START_S):
            return dict(kills)
        for _ in range(rounds):
            kind = rng.choice(kinds)
            victims = processes(demo, KINDS[kind])
            if not victims:
                raise Failed(f"no {kind} is running")
            victim = rng.choice(victims)
            print(f"kill {kind} {victim.pid} at version {feed.news.head}", flush=True)
            victim.kill()
            kills[kind] += 1
            if not progress(demo, feed, 2, _PROGRESS_S):
                break
    return dict(kills)


def wait_for_config(demo: subprocess.Popen[bytes], run: Path) -> Settings:
    deadline = time.monotonic() + _START_S
    while not (run / "config.toml").exists():
        if demo.poll() is not None or time.monotonic() > deadline:
            raise Failed("the run did not start")
        time.sleep(0.5)
    return load(run / "config.toml")


def progress(demo: subprocess.Popen[bytes], feed: Feed, versions: int, within_s: float) -> bool:
    """Wait until so many more versions are published; False if training has ended. Raises ``Failed``."""
    wanted, deadline = feed.news.head + versions, time.monotonic() + within_s
    trains = time.monotonic()
    while feed.news.head < wanted:
        if demo.poll() is None and processes(demo, "lorabridge.bridge.cli train"):
            trains = time.monotonic()
        if time.monotonic() > trains + _TRAINER_S:  # not one that is being started again
            return False
        if time.monotonic() > deadline:
            raise Failed(f"no progress within {within_s:.0f} s: {feed.news.head} of version {wanted}")
        time.sleep(0.3)
    return True


def processes(demo: subprocess.Popen[bytes], words: str) -> list[psutil.Process]:
    """Descendants of the demo whose command line holds ``words``."""
    found = []
    for process in psutil.Process(demo.pid).children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if words in line and _GUARD not in line:
            found.append(process)
    return found


def check(settings: Settings) -> dict[str, object]:
    """What a run left behind, checked; its figures. Raises ``Failed``."""
    summary = json.loads((settings.run.dir / "summary.json").read_text())
    if summary["tokens_refuted"] or summary["tokens_unverifiable"] or not summary["tokens"]:
        raise Failed(f"the audit: {summary}")
    store, policy = open_store(settings.store_url), settings.policy.name
    newest = store.newest(policy)
    line = [store.manifest(policy, version) for version in range(1, (newest.version if newest else 0) + 1)]
    if [m.parent for m in line] != [None, *(m.digest for m in line[:-1])]:
        raise Failed("the versions do not form one line")
    ledger = Ledger(settings.ledger_dir)
    files = [file.path for file in read_log(settings.ledger_dir).files if file.table == "trajectories"]
    rows = Counter(id for path in files for id in pq.read_table(settings.ledger_dir / path)["id"].to_pylist())
    twice = [id for id, count in rows.items() if count > 1]
    happenings = [event.happening for event in ledger.events(Consumed)]
    trained = [id for one in happenings if isinstance(one, Consumed) for id in one.trajectories]
    if twice or len(trained) != len(set(trained)) or not set(trained) <= set(rows):
        raise Failed(f"{len(twice)} in the ledger twice, {len(trained) - len(set(trained))} trained on twice")
    names = ("steps", "versions_published", "trajectories", "tokens", "tokens_refuted", "tokens_unverifiable", "wall_s")
    return {name: summary[name] for name in names} | {"trained": len(trained)}


if __name__ == "__main__":
    sys.exit(main())
