"""A worker on a real Redis and a real store, with a generator that does what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio

from lorabridge.bridge import codec
from lorabridge.bridge.errors import GeneratorUnreachable, Quarantined, SwapFailed
from lorabridge.bridge.events import Event, Quarantine, Resident
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import EngineSpan, Residency, Served
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.stream.groups import GroupQueue, decode_group
from lorabridge.bridge.stream.head import move_head, repair_head
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.trajectory import Group
from lorabridge.rollout.environment import Environment, Prompts
from lorabridge.rollout.generator import Completion, Moved
from lorabridge.rollout.sampler import Residencies, Sampler
from lorabridge.rollout.wire import EngineFacts, GeneratorState, SwapReply
from lorabridge.rollout.worker import Worker
from tests.factories import BASE, make_adapter, make_manifest, make_run_record

FACTS = EngineFacts(
    base=BASE, dtype="float32", logprobs_mode="processed_logprobs", max_lora_rank=8, max_loras=2, max_model_len=64
)


class FakeGenerator:
    """Serves what it is told to; ``spoil`` may change or refuse a completion."""

    url = "http://generator"

    def __init__(self) -> None:
        self.records = [Residency(generator=self.url, instance="i", epoch=0, kv="keep", serves={}, at_ms=0)]
        self.fail_swaps: list[Exception] = []
        self.spoil: Callable[[Completion], Completion] = lambda completion: completion
        self.hold = asyncio.Event()
        self.hold.set()

    async def state(self) -> GeneratorState:
        return GeneratorState(residency=self.records[-1], quarantine=None, running=0, facts=FACTS)

    async def residencies(self, after: int) -> list[Residency]:
        return [record for record in self.records if record.epoch > after]

    async def swap(self, manifest: Manifest, now: Residency) -> SwapReply:
        if self.fail_swaps:
            raise self.fail_swaps.pop(0)
        last = self.records[-1]
        if now != last:
            raise Moved("look again")
        serves = {**last.serves, manifest.policy: Served(version=manifest.version, digest=manifest.digest)}
        self.records.append(Residency(
            generator=self.url, instance="i", epoch=last.epoch + 1, kv="keep", serves=serves, at_ms=0
        ))  # fmt: skip
        return SwapReply(residency=self.records[-1], phases_ms={"pause": 1.0})

    async def sample(self, policy: str, prompt: Sequence[int], *_: object) -> Completion:
        await self.hold.wait()
        spans = (EngineSpan(self.records[-1].label, 0, 3),)
        return self.spoil(
            Completion(token_ids=(5, 6, 0), logprobs=(-0.1, -0.2, -0.3), spans=spans, finish_reason="stop")
        )


class Letters:
    """A tokenizer of sorts."""

    def apply_chat_template(self, conversation: Any, **_: Any) -> list[int]:
        return [1, 2, 3]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i) for i in token_ids)


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c)) for c in completions]


class Bench:
    def __init__(self, client: redis.Redis, asynchronous: redis.asyncio.Redis, keys: Keys, store: Store) -> None:
        self.client, self.asynchronous, self.keys, self.store = client, asynchronous, keys, store
        self.generator = FakeGenerator()
        self.epoch = store.allocate_epoch("policy")

    def publish(self, version: int, *, announce: bool = True) -> Manifest:
        manifest = make_manifest(version, digest=self.store.put(make_adapter(version)), epoch=self.epoch)
        self.store.commit(manifest)
        if announce:
            move_head(self.client, self.keys, manifest)
        return manifest

    def worker(self) -> Worker:
        generator: Any = self.generator
        residencies = Residencies(generator)
        sampler = Sampler(
            run=make_run_record(num_generations=2),
            environment=Environment(dataset=lambda seed: [{"prompt": "ab"}], reward_funcs=(length,)),
            prompts=Prompts([{"prompt": "ab"}], 0),
            tokenizer=Letters(),
            generator=generator,
            residencies=residencies,
            dtype="float32",
            logprobs_mode="processed_logprobs",
            now_ms=lambda: 7,
        )
        return Worker(
            name="w",
            policy="policy",
            client=self.asynchronous,
            keys=self.keys,
            queue=GroupQueue(self.asynchronous, self.keys, "w", ahead=3, lease_s=60),
            generator=generator,
            residencies=residencies,
            sampler=sampler,
            concurrency=2,
            reconcile=lambda: repair_head(self.client, self.keys, self.store, "policy"),
            now_ms=lambda: 7,
        )

    @asynccontextmanager
    async def working(self) -> AsyncIterator[Worker]:
        worker = self.worker()
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await running

    def groups(self) -> list[Group]:
        return [decode_group(fields) for _, fields in self.client.xrange(self.keys.trajectories)]  # type: ignore[arg-type,union-attr]

    def events(self) -> list[Any]:
        entries: Any = self.client.xrange(self.keys.events)
        return [codec.decode(Event, fields[b"body"]).happening for _, fields in entries]


@pytest.fixture
def bench(client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, tmp_path: Path) -> Bench:
    return Bench(client, async_client, keys, open_store(str(tmp_path / "store")))


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that a working worker brings about."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_worker_swaps_to_the_head_samples_and_delivers_whole_groups(bench: Bench) -> None:
    first = bench.publish(1)
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)  # as many as may run ahead
    for group in bench.groups():
        assert len(group.trajectories) == 2
        for trajectory in group.trajectories:
            (span,) = trajectory.spans
            assert (span.version, span.digest, span.start, span.end) == (1, first.digest, 0, 3)
            assert (trajectory.reward, trajectory.advantage, trajectory.instance) == (3.0, 0.0, "i")
    assert sorted(g.group for g in bench.groups()) == [0, 1, 2]
    resident = [event for event in bench.events() if isinstance(event, Resident)]
    assert [event.residency.epoch for event in resident] == [1]


async def test_it_follows_announcements_and_skips_to_the_newest(bench: Bench) -> None:
    bench.publish(1)
    async with bench.working():
        await until(lambda: len(bench.generator.records) == 2)
        bench.publish(2)
        await until(lambda: bench.generator.records[-1].serves["policy"].version == 2)


async def test_a_redis_that_lost_the_head_is_repaired_from_the_store_and_followed(bench: Bench) -> None:
    bench.publish(1)
    bench.publish(2, announce=False)  # the store has it, Redis never heard or forgot
    async with bench.working():
        await until(lambda: bench.generator.records[-1].serves.get("policy", Served(version=0, digest="")).version == 2)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: _with(c, spans=(EngineSpan("i:99", 0, 3),)), "no residency record"),
        (lambda c: _with(c, spans=(EngineSpan("default", 0, 3),)), "no residency record"),
        (lambda c: _with(c, spans=(EngineSpan("i:0", 0, 3),)), "does not serve"),
        (lambda c: _with(c, spans=(EngineSpan("i:1", 0, 2),)), "cover 2 of 3"),
        (lambda c: _with(c, spans=None), "no spans"),
        (lambda c: _with(c, finish_reason="abort"), "aborted"),
        (lambda c: _with(c, logprobs=(-0.1,)), "logprobs"),
    ],
)
async def test_what_cannot_be_established_is_quarantined_with_its_reason_and_never_delivered(
    spoil: Callable[[Completion], Completion], reason: str, bench: Bench
) -> None:
    bench.publish(1)
    spoiled: list[Completion] = []

    def once(completion: Completion) -> Completion:
        if spoiled:
            return completion
        spoiled.append(completion)
        return spoil(completion)

    bench.generator.spoil = once
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
    (quarantine,) = [event for event in bench.events() if isinstance(event, Quarantine)]
    assert reason in quarantine.reason
    assert sorted(g.group for g in bench.groups()) == [0, 1, 2]  # it was tried again, under another attempt
    assert sorted(g.attempt for g in bench.groups()) == [1, 1, 2]


async def test_a_failed_swap_is_reported_and_tried_again(bench: Bench) -> None:
    bench.generator.fail_swaps = [
        SwapFailed("the slot held something else", action="See the log"),
        GeneratorUnreachable("it does not answer", action="Is it up?"),
    ]
    manifest = bench.publish(1)
    async with bench.working():
        await until(lambda: bool(bench.groups()))
    (quarantine,) = [event for event in bench.events() if isinstance(event, Quarantine)]
    assert manifest.digest in quarantine.subject
    assert "held something else" in quarantine.reason


async def test_a_generator_in_quarantine_ends_the_worker_with_its_reason(bench: Bench) -> None:
    bench.generator.fail_swaps = [Quarantined("it samples no more: wrong slot", action="Restart this generator")]
    bench.publish(1)
    with pytest.raises(Quarantined, match="wrong slot"):
        async with asyncio.timeout(30):
            await bench.worker().run()
    assert any(isinstance(event, Quarantine) for event in bench.events())


async def test_a_worker_that_is_stopped_gives_back_what_it_had_claimed(bench: Bench) -> None:
    bench.publish(1)
    bench.generator.hold.clear()
    async with bench.working():
        await until(lambda: bench.client.hlen(bench.keys.holders) == 2)
    assert bench.client.hlen(bench.keys.holders) == 0
    bench.generator.hold.set()
    async with bench.working():
        await until(lambda: len(bench.groups()) == 3)
    assert sorted(g.group for g in bench.groups()) == [0, 1, 2]


def _with(completion: Completion, **changes: Any) -> Completion:
    return msgspec.structs.replace(completion, **changes)
