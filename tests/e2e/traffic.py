"""Traffic on a real server while it swaps, and what the engine said of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import KvMode, Residency, SwapMode, resolve, without_preemptions
from lorabridge.bridge.trajectory import Sampling, Trajectory, Turn
from lorabridge.rollout.generator import Completion, Generator
from lorabridge.rollout.residencies import Residencies
from tests.e2e.models import END
from tests.e2e.server import Server
from tests.factories import make_trajectory

CLIENTS = 24


def generator_of(server: Server) -> Generator:
    """A client of the server's two doors."""
    return Generator(server.url, server.control, server.token, CLIENTS)


async def swap(
    generator: Generator, manifest: Manifest, kv: KvMode | None = None, mode: SwapMode | None = None
) -> Residency:
    """Swap, whatever is served now."""
    state = await generator.state()
    return (await generator.swap(manifest, state.residency, kv, mode=mode, fence=state.fence)).residency


def prompt_for(rng: random.Random, before: Sequence[int]) -> list[int]:
    """Longer than a KV block (128 tokens), from few beginnings; half of them go on from an earlier completion.

    So prefixes are shared with requests in flight, waiting requests find them cached, and prompts are prefilled in
    parts: whatever a swap could get wrong about KV.
    """
    beginning = [3 + rng.randrange(3), 10, 11, 12, 13] * 30
    return beginning + list(before) if before and rng.random() < 0.5 else beginning


async def _unreported(record: Residency, swap_ms: dict[str, float]) -> None:
    """These records go nowhere: the test has them from the generator itself."""


class Traffic:
    """Clients that sample ``policy`` until ``tokens`` have been sampled."""

    def __init__(self, generator: Generator, policy: str, tokens: int) -> None:
        self._generator, self._policy, self._tokens = generator, policy, tokens
        self._residencies = Residencies(generator, _unreported)
        self.sampled = 0
        self.restarts = 0
        self.turns: list[Turn] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self._client(random.Random(number)))

    @property
    def done(self) -> bool:
        return self.sampled >= self._tokens

    async def _client(self, rng: random.Random) -> None:
        before: tuple[int, ...] = ()
        while not self.done:
            prompt = prompt_for(rng, before)
            sampling = Sampling(max_tokens=rng.choice([20, 60, 150]))
            completion = await self._generator.sample(self._policy, prompt, sampling, [END])
            before = completion.token_ids
            self.sampled += len(completion.token_ids)
            self.turns.append(await self.turn(prompt, completion))

    async def turn(self, prompt: Sequence[int], completion: Completion) -> Turn:
        """The completion with its spans as facts."""
        assert completion.spans is not None
        spans, preempted = without_preemptions(completion.spans)
        restarts = await self._generator.restarts(completion.request_id) if preempted else []
        self.restarts += len(restarts)
        records = await self._residencies.of([span.version for span in spans])
        return Turn(
            prompt_ids=tuple(prompt),
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            mask=(1,) * len(completion.token_ids),
            spans=resolve(self._policy, len(completion.token_ids), spans, records, restarts, completion.began_on),
            finish_reason=completion.finish_reason,
        )


async def sample_under_swaps(
    server: Server, pair: Sequence[Manifest], kv: KvMode | None, tokens: int, mode: SwapMode = "in_flight"
) -> tuple[list[Turn], int]:
    """Turns sampled while the server swaps between the two versions about once a second, and how many swaps."""
    async with generator_of(server) as generator:
        await swap(generator, pair[0], kv, mode)
        traffic, swaps = Traffic(generator, pair[0].policy, tokens), 0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            while not traffic.done:
                await asyncio.sleep(1.0)
                swaps += 1
                await swap(generator, pair[swaps % 2], kv, mode)
        return traffic.turns, swaps


def trajectories_of(turns: Sequence[Turn], base: str, **changes: Any) -> list[Trajectory]:
    """One trajectory per turn."""
    return [
        make_trajectory(number, policy=turn.spans[0].policy, turns=(turn,), base=base, **changes)
        for number, turn in enumerate(turns)
    ]
