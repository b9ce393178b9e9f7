"""What a swap every second costs in decoded tokens per second: ``python -m tests.benchmarks.swap --model tiny``.

One server, one run, and 16 requests at once that never let up. Windows of no swaps and of each way to swap take turns,
so that a machine that slows down slows down all of them. Tokens are those that the engine counts between the two ends
of a window. A floor is the share of time that is left when nothing is sampled from pause to resume, and when what KV
was dropped is prefilled again at this server's own rate. Prompts are shorter than a KV block, so none is found cached.
``--model smollm2`` takes SmolLM2-135M in bf16 with adapters of 20 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.sections import GeneratorsSection, ModelSection, PolicySection, RunSection
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store.remote import adapter_name
from lorabridge.bridge.stream.embedded import free_ports
from lorabridge.bridge.trajectory import Sampling
from lorabridge.rollout.generator import Generator
from tests.benchmarks import stock
from tests.benchmarks.legs import Leg, Ours, Phases, Sticky, Trl
from tests.benchmarks.smollm import make_smollm
from tests.benchmarks.table import Goal, conclude
from tests.e2e.models import RANK, commit, make_adapter, make_base
from tests.e2e.server import Server, running

AT_ONCE, PROMPT = 16, 40
_PAUSED = ("pause", "place", "label", "resume")
_BASELINE, _KEEP, _RECOMPUTE, _PINNED, _TRL = "no swaps", "kv keep", "kv recompute", "pinned", "TRL's"


class Model(NamedTuple):
    """A base with its adapters: how many tokens a completion has, and how many adapters are swapped in turn.

    Pinned, as many of them are in at once as swaps happen while a completion lasts.
    """

    make: Callable[[Path], Path]
    dtype: str
    rank: int
    length: int
    adapters: int
    least_kept: float


MODELS = {
    "tiny": Model(make_base, "float32", RANK, 400, 12, 0.97),
    "smollm2": Model(make_smollm, "bfloat16", 16, 32, 16, 0.95),
}


class Endless(Sampling, frozen=True, kw_only=True):
    """As many tokens as are allowed: vLLM's own ``ignore_eos``, so that decoding dominates."""

    ignore_eos: bool = True


@dataclass(kw_only=True)
class Window:
    """Tokens that the engine counted, in how many seconds; the phases of the swaps in milliseconds, and how many
    tokens with KV each swap found."""

    tokens: float
    seconds: float
    phases: list[Phases]
    held: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def paused_s(self) -> float:
        """For how long swaps let nothing be sampled."""
        return sum(phases.get(name, 0.0) for phases in self.phases for name in _PAUSED) / 1000


@dataclass(kw_only=True)
class Bench:
    """A server under traffic."""

    server: Server
    generator: Generator
    length: int
    finished: list[int] = field(default_factory=list)

    async def client(self, leg: Leg, number: int) -> None:
        """One request after another. The first ends early, so that those of all clients do not end together."""
        length, turn = 1 + self.length * (number + 1) // AT_ONCE, 0
        while True:
            prompt = [3 + (number + turn + place) % 20 for place in range(PROMPT)]
            completion = await leg.generator.sample(leg.model, prompt, Endless(max_tokens=length), [])
            self.finished.append(len(completion.token_ids))
            length, turn = self.length, turn + 1

    async def window(self, leg: Leg, seconds: int) -> Window:
        """A swap every second, after as many seconds to warm up as a completion takes, or a few."""
        await leg.begin()
        self.finished, before = [], await self._generated()
        clients = [asyncio.create_task(self.client(leg, number)) for number in range(AT_ONCE)]
        await self._seconds(leg, max(3, seconds // 3))
        tokens, began = await self._generated(), time.perf_counter()
        held = [tokens - before - sum(self.finished)]
        phases = await self._seconds(leg, seconds)
        ended, took = await self._generated(), time.perf_counter() - began
        held.append(ended - before - sum(self.finished))
        for client in clients:
            if client.done():
                client.result()
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for _ in range(100):
            if not (await self.generator.state()).running:
                break
            await asyncio.sleep(0.1)
        await leg.end()
        return Window(tokens=ended - tokens, seconds=took, phases=phases, held=statistics.mean(held) + AT_ONCE * PROMPT)

    async def _seconds(self, leg: Leg, seconds: int) -> list[Phases]:
        """A swap in the middle of each; one that takes longer is followed by the next at once."""
        began, phases = time.perf_counter(), []
        for second in range(seconds):
            await _sleep_until(began + second + 0.5)
            if leg.swaps and time.perf_counter() < began + seconds:
                phases.append(await leg.swap())
        await _sleep_until(began + seconds)
        return phases

    async def _generated(self) -> float:
        """Tokens that the engine has sampled since it started."""
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {self.server.token}"}) as control:
            reply = (await control.get(self.server.control + "/metrics", timeout=30)).raise_for_status()
        samples = [sample for family in text_string_to_metric_families(reply.text) for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "vllm:generation_tokens_total")

    async def prefill_rate(self, leg: Leg) -> float:
        """Tokens per second that the server prefills while it decodes nothing, in prompts as long as what is held."""
        await leg.begin()
        long = PROMPT + self.length // 2
        prompts = [[3 + (7 * n + k * (n + 1)) % 40 for k in range(long)] for n in range(3 * AT_ONCE)]
        rates = []
        for third in (prompts[:AT_ONCE], prompts[AT_ONCE : 2 * AT_ONCE], prompts[2 * AT_ONCE :]):
            began = time.perf_counter()
            await asyncio.gather(*(leg.generator.sample(leg.model, p, Sampling(max_tokens=1), []) for p in third))
            rates.append(AT_ONCE * long / (time.perf_counter() - began))
        return max(rates[1:])  # the first was to warm up


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.perf_counter()))


Rounds = list[dict[str, Window]]


async def measure(
    server: Server, stock_url: str, model: Model, versions: dict[str, list[Manifest]], folders: Sequence[Path],
    rounds: int, seconds: int,
) -> tuple[list[Leg], Rounds, float]:  # fmt: skip
    """The ways to swap, the windows of every round by their names, and prefilled tokens per second."""
    console = Console(stderr=True, highlight=False)
    async with AsyncExitStack() as stack:
        ours, others = [
            await stack.enter_async_context(Generator(url, server.control, server.token, AT_ONCE))
            for url in (server.url, stock_url)
        ]
        flying, adapters = cycle(versions["in_flight"]), cycle(folders)
        legs: list[Leg] = [
            Ours(_BASELINE, ours, flying, swaps=False),
            Ours(_KEEP, ours, flying, kv="keep"),
            Ours(_RECOMPUTE, ours, flying, kv="recompute"),
            Ours(_PINNED, ours, cycle(versions["pinned"]), mode="pinned"),
            Trl(_TRL, others, adapters),
            Sticky("sticky load_inplace", others, adapters),
        ]
        bench, found = Bench(server=server, generator=ours, length=model.length), Rounds()
        prefill = await bench.prefill_rate(legs[0])
        for number in range(rounds):
            turn = number % len(legs)
            found.append({leg.title: await bench.window(leg, seconds) for leg in legs[turn:] + legs[:turn]})
            rates = ", ".join(f"{leg.title} {found[-1][leg.title].rate:.0f}" for leg in legs)
            console.print(f"round {number + 1} of {rounds}, tokens/s: {rates}")
        return legs, found, prefill


def column_of(leg: Leg, rounds: Rounds, prefill: float) -> dict[str, object]:
    windows = [round_[leg.title] for round_ in rounds]
    reached = statistics.median(round_[leg.title].rate / round_[_BASELINE].rate for round_ in rounds)
    phases = [each for window in windows for each in window.phases]
    seconds = sum(window.seconds for window in windows)
    again_s = sum(len(window.phases) * window.held for window in windows) / prefill if leg.drops_kv else 0.0
    floor = max(0.0, 1 - (sum(window.paused_s for window in windows) + again_s) / seconds)
    column: dict[str, object] = {
        "": leg.title,
        "tokens/s": sum(window.tokens for window in windows) / seconds,
        "over no swaps": reached,
        "of the rounds": " ".join(f"{round_[leg.title].rate / round_[_BASELINE].rate:.3f}" for round_ in rounds),
        "floor": floor,
        "floor over what it reached": floor / reached,
        "swaps": len(phases),
        "tokens held": statistics.mean(window.held for window in windows),
    }
    for name in ("fetch", *_PAUSED):
        times = [each[name] for each in phases if name in each]
        column[f"{name} ms p50"] = statistics.median(times) if times else None
    return column


def goals_of(columns: Sequence[dict[str, object]], least_kept: float, *, twice: bool) -> list[Goal]:
    def figure(leg: str, name: str) -> float:
        return next(float(str(column[name])) for column in columns if column[""] == leg)

    kept, of_floor = figure(_KEEP, "over no swaps"), "floor over what it reached"
    goals = [Goal(name="kv keep, over no swaps", value=kept, least=least_kept)]
    if twice:
        goals.append(Goal(name="kv keep, over TRL's", value=kept / figure(_TRL, "over no swaps"), least=2))
    return [*goals, *(Goal(name=f"{leg}, {of_floor}", value=figure(leg, of_floor), most=1.2) for leg in (
        _RECOMPUTE, _PINNED
    ))]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.benchmarks.swap", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=10, help="of each window")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    model = MODELS[given.model]
    with tempfile.TemporaryDirectory(prefix="swap-") as name:
        folder = Path(name)
        base, port = model.make(folder / "base"), free_ports(3)
        settings = Settings(
            run=RunSection(id="swap", dir=folder / "run"),
            model=ModelSection(path=str(base), dtype=model.dtype),
            policy=PolicySection(name="in_flight", rank=model.rank),
            generators=GeneratorsSection(
                port=port, control_port=port + 1, max_model_len=1024, max_num_seqs=AT_ONCE, threads=1,
                max_loras=2 * model.adapters + 8, args=("--middleware", stock.MIDDLEWARE),
            ),
        )  # fmt: skip
        environment = {stock.PORT: str(port + 2), "PYTHONPATH": str(Path(__file__).parents[2])}
        with running(settings, environment) as server:
            adapters = [make_adapter(base, seed, model.rank) for seed in range(model.adapters)]
            versions = {policy: commit(server.store, base, policy, adapters) for policy in ("in_flight", "pinned")}
            store = Path(server.settings.store_url)
            folders = [store / adapter_name(manifest.digest) for manifest in versions["in_flight"]]
            legs, rounds, prefill = asyncio.run(
                measure(server, f"http://127.0.0.1:{port + 2}", model, versions, folders, given.rounds, given.seconds)
            )
    columns = [column_of(leg, rounds, prefill) for leg in legs]
    title = f"A swap every second, {given.model}, {AT_ONCE} requests of {model.length} tokens at once, {prefill:.0f} "
    goals = goals_of(columns, model.least_kept, twice=given.model == "smollm2")
    return conclude(title + "tokens/s prefilled", columns, goals, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
