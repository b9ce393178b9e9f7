"""What a swap every second costs in decoded tokens per second: ``python -m tests.benchmarks.swap``.

One server, one run, and 16 requests at once that never let up. Windows of no swaps, of swaps that keep KV and of swaps
that drop it take turns, so that a machine that slows down slows down all of them. Tokens are those that the engine
counts between the two ends of a window. The floor is the share of time that is left when nothing is sampled from pause
to resume, by the generator's own clock. Where KV is dropped, what there is of it is prefilled again as well: what that
takes at the prefill rate of this server is taken off in ``floor, prefilled``, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import KvMode
from lorabridge.bridge.sections import GeneratorsSection, ModelSection, PolicySection, RunSection
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.stream.embedded import free_ports
from lorabridge.bridge.trajectory import Sampling
from lorabridge.rollout.generator import Generator
from tests.benchmarks.table import Goal, conclude
from tests.e2e.models import RANK, commit, make_adapter, make_base
from tests.e2e.server import Server, running

AT_ONCE, LENGTH, PROMPT = 16, 400, 40
_MODES: tuple[KvMode | None, ...] = (None, "keep", "recompute")
_NAMES = {None: "no swaps", "keep": "kv keep", "recompute": "kv recompute"}
_PAUSED = ("pause", "place", "label", "resume")
_PREFILLED = 400  # tokens of a prompt, to measure prefill with


class Endless(Sampling, frozen=True, kw_only=True):
    """As many tokens as are allowed: vLLM's own ``ignore_eos``, so that decoding dominates."""

    ignore_eos: bool = True


@dataclass(kw_only=True)
class Window:
    """Tokens that the engine counted, in how many seconds, and the phases of the swaps in milliseconds."""

    tokens: float
    seconds: float
    phases: list[dict[str, float]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def paused(self) -> list[float]:
        """Milliseconds that each swap let nothing be sampled."""
        return [sum(phases[name] for name in _PAUSED) for phases in self.phases]


@dataclass(kw_only=True)
class Bench:
    """A server under traffic, with two versions to swap between."""

    server: Server
    generator: Generator
    swaps: Iterator[Manifest]
    policy: str
    lengths: list[int] = field(default_factory=list)

    async def client(self, number: int) -> None:
        """One request after another. The first ends early, so that those of all clients do not end together."""
        length = LENGTH * (number + 1) // AT_ONCE
        for turn in count():
            prompt = [3 + (number + turn + place) % 20 for place in range(PROMPT)]
            completion = await self.generator.sample(self.policy, prompt, Endless(max_tokens=length), [])
            self.lengths.append(len(completion.token_ids))
            length = LENGTH

    async def swap(self, kv: KvMode) -> dict[str, float]:
        state = await self.generator.state()
        return (await self.generator.swap(next(self.swaps), state.residency, kv, fence=state.fence)).phases_ms

    async def window(self, kv: KvMode | None, seconds: int) -> Window:
        """A swap in the middle of each second, unless ``kv`` is None."""
        tokens, began = await self._generated(), time.perf_counter()
        phases = []
        for second in range(seconds):
            await _sleep_until(began + second + 0.5)
            if kv is not None:
                phases.append(await self.swap(kv))
        await _sleep_until(began + seconds)
        more = await self._generated() - tokens
        return Window(tokens=more, seconds=time.perf_counter() - began, phases=phases)

    async def _generated(self) -> float:
        """Tokens that the engine has sampled since it started."""
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {self.server.token}"}) as control:
            reply = (await control.get(self.server.control + "/metrics", timeout=30)).raise_for_status()
        samples = [sample for family in text_string_to_metric_families(reply.text) for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "vllm:generation_tokens_total")

    async def prefill_rate(self) -> float:
        """Tokens per second that the server prefills while it decodes nothing, in prompts that share nothing."""
        prompts = [[3 + (7 * n + k * (n + 1)) % 40 for k in range(_PREFILLED)] for n in range(2 * AT_ONCE)]
        for half in (prompts[:AT_ONCE], prompts[AT_ONCE:]):  # the first to warm up
            began = time.perf_counter()
            await asyncio.gather(*(self.generator.sample(self.policy, p, Sampling(max_tokens=1), []) for p in half))
        return AT_ONCE * _PREFILLED / (time.perf_counter() - began)


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.perf_counter()))


Rounds = list[dict[KvMode | None, Window]]


async def measure(server: Server, pair: list[Manifest], rounds: int, seconds: int) -> tuple[Rounds, float, float]:
    """The windows of every round, prefilled tokens per second, and the mean length of a completion."""
    async with Generator(server.url, server.control, server.token, AT_ONCE) as generator:
        bench = Bench(server=server, generator=generator, swaps=cycle(pair), policy=pair[0].policy)
        await bench.swap("keep")
        prefill = await bench.prefill_rate()
        clients = [asyncio.create_task(bench.client(number)) for number in range(AT_ONCE)]
        for mode in _MODES:
            await bench.window(mode, max(2, seconds // 2))  # to warm up
        found: Rounds = []
        for number in range(rounds):
            order = _MODES[number % 3 :] + _MODES[: number % 3]
            found.append({mode: await bench.window(mode, seconds) for mode in order})
        for client in clients:
            if client.done():
                client.result()
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return found, prefill, statistics.mean(bench.lengths)


def column_of(mode: KvMode | None, rounds: Rounds, prefill: float) -> dict[str, object]:
    windows = [round_[mode] for round_ in rounds]
    ratios = [round_[mode].rate / round_[None].rate for round_ in rounds]
    phases = [each for window in windows for each in window.phases]
    seconds, paused_s = sum(w.seconds for w in windows), sum(sum(w.paused) for w in windows) / 1000
    # Half of each completion is there on average.
    again = len(phases) * AT_ONCE * (PROMPT + LENGTH / 2) / prefill if mode == "recompute" else 0.0
    column: dict[str, object] = {
        "": _NAMES[mode],
        "tokens/s": sum(w.tokens for w in windows) / seconds,
        "over no swaps": statistics.median(ratios),
        "of the rounds": " ".join(f"{ratio:.3f}" for ratio in ratios),
        "floor": 1 - paused_s / seconds,
        "floor, prefilled": max(0.0, 1 - (paused_s + again) / seconds),
        "swaps": len(phases),
    }
    for name in ("fetch", *_PAUSED):
        column[f"{name} ms p50"] = statistics.median([each[name] for each in phases]) if phases else None
    return column


def goals_of(keep: dict[str, object], recompute: dict[str, object]) -> list[Goal]:
    kept, again, floor = (
        float(str(value)) for value in (keep["over no swaps"], recompute["over no swaps"], recompute["floor"])
    )
    return [
        Goal(name="kv keep, over no swaps", value=kept, least=0.97),
        Goal(name="kv recompute, its floor over what it reached", value=floor / again, most=1.2),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.benchmarks.swap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=10, help="of each window")
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
            rounds, prefill, length = asyncio.run(measure(server, pair, given.rounds, given.seconds))
    columns = [column_of(mode, rounds, prefill) for mode in _MODES]
    title = f"A swap every second, {AT_ONCE} requests of {length:.0f} tokens at once, {prefill:.0f} tokens/s prefilled"
    return conclude(title, columns, goals_of(columns[1], columns[2]), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
