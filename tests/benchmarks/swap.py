"""What a swap every second costs in decoded tokens per second: ``python -m tests.benchmarks.swap``.

One server, one run, equal traffic: 16 requests at once, and rounds of no swaps, swaps that keep KV, and swaps that drop
it, in turn, so that a machine that slows down slows down all of them. Each beside its floor: the share of time in which
nothing may be sampled (pause to resume, by the generator's own clock), and, where KV is dropped, what must be prefilled
again over the prefill rate measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import KvMode
from lorabridge.bridge.settings import GeneratorsSection, ModelSection, PolicySection, RunSection, Settings
from lorabridge.bridge.stream.embedded import free_ports
from lorabridge.bridge.trajectory import Sampling
from lorabridge.rollout.generator import Generator
from tests.benchmarks.table import Goal, conclude
from tests.e2e.models import RANK, commit, make_adapter, make_base
from tests.e2e.server import Server, running

AT_ONCE, LENGTH, PROMPT = 16, 400, 40
_MODES: tuple[KvMode | None, ...] = (None, "keep", "recompute")
_PAUSED = ("pause", "place", "label", "resume")


class Round:
    """Tokens and seconds of one mode, and the phases of its swaps in milliseconds."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self.phases: list[dict[str, float]] = []

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def measure(server: Server, pair: Sequence[Manifest], rounds: int, seconds: float) -> dict[KvMode | None, Round]:
    found: dict[KvMode | None, Round] = {mode: Round() for mode in _MODES}
    async with Generator(server.url, server.control, server.token, AT_ONCE) as generator:
        await swap(generator, pair[0], "keep")
        await one(generator, pair, None, seconds / 2, Round())  # warm up
        for _ in range(rounds):
            for mode in _MODES:
                await one(generator, pair, mode, seconds, found[mode])
    return found


async def one(
    generator: Generator, pair: Sequence[Manifest], kv: KvMode | None, seconds: float, into: Round
) -> None:  # fmt: skip
    """One round: completions that end within it count, and so does the time that it really took."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(AT_ONCE):
            tasks.create_task(client(generator, pair[0].policy, number, began + seconds, into))
        while kv is not None and time.perf_counter() < began + seconds:
            await asyncio.sleep(1.0)
            into.phases.append(await swap(generator, pair[len(into.phases) % 2], kv))
    into.seconds += time.perf_counter() - began


async def client(generator: Generator, policy: str, number: int, until: float, into: Round) -> None:
    sampling = Sampling(max_tokens=LENGTH)
    while time.perf_counter() < until:
        prompt = [3 + (number + place) % 20 for place in range(PROMPT)]
        completion = await generator.sample(policy, prompt, sampling, [])
        into.tokens += len(completion.token_ids)


async def swap(generator: Generator, manifest: Manifest, kv: KvMode) -> dict[str, float]:
    state = await generator.state()
    return (await generator.swap(manifest, state.residency, kv, fence=state.fence)).phases_ms


async def prefill_rate(server: Server, policy: str) -> float:
    """Tokens per second that the engine prefills, in prompts that share nothing."""
    async with Generator(server.url, server.control, server.token, AT_ONCE) as generator:
        began, length = time.perf_counter(), 300
        prompts = [[3 + (7 * n + k * (n + 1)) % 40 for k in range(length)] for n in range(AT_ONCE)]
        await asyncio.gather(*(generator.sample(policy, each, Sampling(max_tokens=1), []) for each in prompts))
        return AT_ONCE * length / (time.perf_counter() - began)


def rows_of(found: dict[KvMode | None, Round], prefill: float) -> tuple[list[dict[str, object]], list[Goal]]:
    base = found[None].rate
    rows: list[dict[str, object]] = [
        {"mode": "no swaps", "tokens/s": base, "ratio": 1.0, "floor": 1.0, "swaps": 0, "paused ms p50": 0.0}
    ]
    goals = []
    for mode in ("keep", "recompute"):
        round_ = found[mode]
        paused = [sum(phases[name] for name in _PAUSED) for phases in round_.phases if phases]
        lost_s = sum(paused) / 1000
        if mode == "recompute":  # half a completion is there on average
            lost_s += len(paused) * AT_ONCE * (PROMPT + LENGTH / 2) / prefill
        floor = max(0.0, 1 - lost_s / round_.seconds)
        ratio = round_.rate / base
        rows.append({
            "mode": f"kv {mode}", "tokens/s": round_.rate, "ratio": ratio, "floor": floor, "swaps": len(paused),
            "paused ms p50": statistics.median(paused),
        })  # fmt: skip
        goals.append(
            Goal(name="kv keep over no swaps", value=ratio, least=0.97)
            if mode == "keep"
            else Goal(name="kv recompute: floor over ratio", value=floor / ratio, most=1.2)
        )
    return rows, goals


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.benchmarks.swap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swap-") as folder:
        base = make_base(Path(folder) / "base")
        port = free_ports(2)
        settings = Settings(
            run=RunSection(id="swap", dir=Path(folder) / "run"),
            model=ModelSection(path=str(base)),
            policy=PolicySection(name="pair", rank=RANK),
            generators=GeneratorsSection(port=port, control_port=port + 1, max_model_len=1024, max_num_seqs=AT_ONCE),
        )
        with running(settings) as server:
            pair = commit(server.store, base, "pair", [make_adapter(base, seed) for seed in (1, 2)])
            found = asyncio.run(measure(server, pair, given.rounds, given.seconds))
            prefill = asyncio.run(prefill_rate(server, "pair"))
    rows, goals = rows_of(found, prefill)
    return conclude("A swap every second, tiny model", rows, goals, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
