"""Workers on a real Redis and a real store, with generators that do what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import redis
import redis.asyncio

from lorabridge.bridge import codec
from lorabridge.bridge.canary import Canary, Judgement, Logprobs
from lorabridge.bridge.errors import (
    NotServed,
    SlotsBusy,
)
from lorabridge.bridge.events import Event, Quarantine, Resident
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import EngineSpan, Residency, Served
from lorabridge.bridge.status import Status
from lorabridge.bridge.store import Store
from lorabridge.bridge.stream.groups import GroupQueue, decode_group
from lorabridge.bridge.stream.head import move_head, repair_head
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.stream.lease import Lease
from lorabridge.bridge.trajectory import Group
from lorabridge.rollout.environment import Environment, Prompts
from lorabridge.rollout.generator import Completion, Moved
from lorabridge.rollout.member import Member
from lorabridge.rollout.sampler import Sampler
from lorabridge.rollout.wire import EngineFacts, GeneratorState, Scores, SwapReply
from lorabridge.rollout.worker import Worker
from tests.factories import BASE, make_adapter, make_manifest, make_run_record

FACTS = EngineFacts(
    base=BASE, dtype="float32", logprobs_mode="processed_logprobs", max_lora_rank=8, max_loras=2, max_model_len=64
)


class FakeGenerator:
    """Serves what it is told to; ``spoil`` may change or refuse a completion, ``away`` is what it answers instead."""

    def __init__(self, url: str = "http://generator") -> None:
        self.url = self.name = url
        self.fences: list[int] = []
        self.preempted_at: list[int] = []
        self.scores: tuple[Logprobs, Logprobs] = ((), ())
        self.judgements: list[Judgement] = []
        self.fail_swaps: list[Exception] = []
        self.away: Exception | None = None
        self.busy = False
        self.pinned = False
        self.spoil: Callable[[Completion], Completion] = lambda completion: completion
        self.hold = asyncio.Event()
        self.hold.set()
        self.restart("i")

    def restart(self, instance: str) -> None:
        self.records = [Residency(generator=self.url, instance=instance, epoch=0, kv="keep", serves={}, at_ms=0)]

    def enter(self, serves: dict[str, Served]) -> Residency:
        last = self.records[-1]
        held = {policy: (*last.pinned.get(policy, ()), served) for policy, served in serves.items()}
        pinned = held if self.pinned else {}
        self.records.append(msgspec.structs.replace(last, epoch=last.epoch + 1, serves=serves, pinned=pinned))
        return self.records[-1]

    @property
    def serves(self) -> int:
        served = self.records[-1].serves.get("policy")
        return served.version if served else 0

    def _answer(self) -> None:
        if self.away:
            raise self.away

    async def state(self) -> GeneratorState:
        self._answer()
        return GeneratorState(
            residency=self.records[-1], quarantine=None, running=0, facts=FACTS, fence=max(self.fences, default=0),
            canary=self.judgements[-1] if self.judgements else None,
        )  # fmt: skip

    async def residencies(self, after: int) -> list[Residency]:
        self._answer()
        return [record for record in self.records if record.epoch > after]

    async def swap(self, manifest: Manifest, now: Residency, *, fence: int) -> SwapReply:
        self._answer()
        self.fences.append(fence)
        last = self.records[-1]
        if self.busy:
            raise SlotsBusy("all slots have samples in flight", action="Wait")
        if self.fail_swaps:
            self.enter(last.serves)  # what was served before was put back, in an epoch of its own
            raise self.fail_swaps.pop(0)
        if now != last:
            raise Moved("look again")
        served = Served(version=manifest.version, digest=manifest.digest)
        return SwapReply(residency=self.enter({**last.serves, manifest.policy: served}), phases_ms={"pause": 1.0})

    async def score(self, policy: str, sequences: tuple[tuple[int, ...], ...]) -> Scores:
        self._answer()
        return Scores(adapter=self.scores[0], base=self.scores[1], label=self.records[-1].label)

    async def judged(self, judgement: Judgement) -> None:
        self.judgements.append(judgement)

    async def restarts(self, request_id: str) -> list[int]:
        return self.preempted_at

    async def sample(self, policy: str, prompt: Sequence[int], *_: object) -> Completion:
        await self.hold.wait()
        self._answer()
        if policy not in self.records[-1].serves:
            raise NotServed("no policy is served here", action="Look again")
        spans = (EngineSpan(self.records[-1].label, 0, 3),)
        return self.spoil(
            Completion(
                request_id="r",
                token_ids=(5, 6, 0),
                logprobs=(-0.1, -0.2, -0.3),
                spans=spans,
                finish_reason="stop",
                began_on=self.records[-1].serves[policy].digest if self.pinned else None,
            )
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
        self.generators = [self.generator]
        self.reward = length
        self.rows = [{"prompt": "ab"}]
        self.ahead = 3
        self.status = Status()
        self.start_s = 60.0
        self.timeout_s = 30.0
        self.lease_s = 60.0
        self.run = make_run_record(num_generations=2, epoch=store.allocate_epoch("policy"))

    def publish(
        self, version: int, *, announce: bool = True, epoch: int | None = None, canary: Canary | None = None
    ) -> Manifest:  # fmt: skip
        digest = self.store.put(make_adapter(version))
        manifest = make_manifest(version, digest=digest, epoch=epoch or self.run.epoch, canary=canary)
        self.store.commit(manifest)
        if announce:
            move_head(self.client, self.keys, manifest)
        return manifest

    def worker(self, name: str = "w") -> Worker:
        sampler = Sampler(
            run=self.run,
            environment=Environment(dataset=lambda seed: self.rows, reward_funcs=(self.reward,)),
            prompts=Prompts(self.rows, 0),
            tokenizer=Letters(),
            now_ms=lambda: 7,
        )
        worker = Worker(
            name=name,
            run=self.run,
            client=self.asynchronous,
            keys=self.keys,
            queue=GroupQueue(self.asynchronous, self.keys, name, ahead=self.ahead, lease_s=self.lease_s),
            sampler=sampler,
            timeout_s=self.timeout_s,
            renew_s=0.1,
            start_s=self.start_s,
            reconcile=lambda: (repair_head(self.client, self.keys, self.store, "policy"), self.run),
            now_ms=lambda: 7,
            status=self.status,
        )
        worker.members = [self._member(worker, generator) for generator in self.generators]
        return worker

    def _member(self, worker: Worker, generator: Any) -> Member:
        keys = self.keys
        return Member(
            generator=generator,
            policy="policy",
            check=lambda state: None,
            lease=Lease(self.asynchronous, keys.control(generator.name), keys.control_fence(generator.name), "w", 10),
            room=2,
            report=worker.report,
            changed=worker.changed,
        )

    @asynccontextmanager
    async def working(self, *names: str) -> AsyncIterator[Worker]:
        workers = [self.worker(name) for name in names or ("w",)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            yield workers[0]
        finally:
            for worker in workers:
                worker.stop()
            await asyncio.gather(*running)

    def quarantines(self) -> list[Quarantine]:
        return [event for event in self.events() if isinstance(event, Quarantine)]

    def residents(self) -> list[str]:
        return [event.residency.label for event in self.events() if isinstance(event, Resident)]

    def groups(self) -> list[Group]:
        return [decode_group(fields) for _, fields in self.client.xrange(self.keys.trajectories)]  # type: ignore[arg-type,union-attr]

    def events(self) -> list[Any]:
        entries: Any = self.client.xrange(self.keys.events)
        return [codec.decode(Event, fields[b"body"]).happening for _, fields in entries]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that a working worker brings about."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
