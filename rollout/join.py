"""Joining a run: wait for what the trainer published, and check that this worker and its generator are the same."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import redis
import redis.asyncio

from lorabridge.bridge import codec
from lorabridge.bridge.errors import ConfigError, GeneratorError, RunMismatch, StreamUnreachable
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.model import model_folder
from lorabridge.bridge.run_record import RunRecord, check_base, check_joins, resolve_run
from lorabridge.bridge.sections import GeneratorsSection, RedisSection
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.status import Status, answering
from lorabridge.bridge.stopping import ANSWER_S, Drain
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.connection import Patience, clock_offset_ms, connect, connect_async, errors, now_ms
from lorabridge.bridge.stream.groups import GroupQueue
from lorabridge.bridge.stream.head import repair_head
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.stream.lease import Lease
from lorabridge.bridge.token import control_token
from lorabridge.rollout.environment import Environment, Prompts, load_environment
from lorabridge.rollout.generator import Generator
from lorabridge.rollout.member import LEASE_S, Member
from lorabridge.rollout.sampler import Sampler
from lorabridge.rollout.wire import GeneratorState
from lorabridge.rollout.worker import Worker

log = logging.getLogger("lorabridge.worker")
_LOGPROBS_MODE = "processed_logprobs"
_OUTAGE_S = 2.0
_LEASE_S = 15.0
_BEATS_S = 30.0


def doors(section: GeneratorsSection) -> list[tuple[str, str]]:
    """(public, control) URL of every generator. Raises ``ConfigError`` if they do not pair up."""
    if not section.urls:
        return [section.doors(place) for place in range(section.count)]
    if len(section.urls) != len(section.control):
        raise ConfigError(
            f"[generators] urls names {len(section.urls)} servers and control {len(section.control)} doors",
            action="Give a control door for each, in the same order",
        )
    return list(zip(section.urls, section.control, strict=True))


async def wait_for_run(
    client: redis.Redis, keys: Keys, section: RedisSection, stopping: asyncio.Event
) -> RunRecord | None:
    """What the trainer published, as soon as it has; None if told to stop before.

    Raises:
        StreamUnreachable: Redis was away for longer than the outage allowed.
    """
    said, patience = False, Patience(section.outage_s)
    while not stopping.is_set():
        try:
            with errors(section):
                run = await asyncio.to_thread(read_run, client, keys)
        except StreamUnreachable as error:
            if not stopping.is_set() and not patience(error):
                raise
            continue
        if run:
            return run
        if not said:
            log.info("waiting for the trainer to publish the run")
            said = True
        patience = Patience(section.outage_s)
        await asyncio.sleep(0.2)
    return None


def read_run(client: redis.Redis, keys: Keys) -> RunRecord | None:
    """The run as it is on record now."""
    body = client.get(keys.run)
    return codec.decode(RunRecord, body) if isinstance(body, bytes) else None


def check_generator(run: RunRecord, state: GeneratorState, url: str, dtype: str) -> None:
    """Raise ``RunMismatch`` or ``GeneratorError`` if its samples would not be what the trainer thinks they are."""
    check_base(run.base, state.facts.base, f"the generator {url}")
    if state.facts.logprobs_mode != _LOGPROBS_MODE:
        raise GeneratorError(
            f"{url} reports {state.facts.logprobs_mode}, not the logprobs it samples with",
            action=f"Start it with --logprobs-mode {_LOGPROBS_MODE}",
        )
    if state.facts.dtype != dtype:
        raise RunMismatch(
            f"{url} computes in {state.facts.dtype}, and [model] dtype is {dtype}",
            action="Start it with the run's configuration, or correct [model] dtype",
        )
    if state.facts.max_lora_rank < run.rank:
        raise RunMismatch(
            f"{url} takes LoRA ranks up to {state.facts.max_lora_rank}, and the run publishes rank {run.rank}",
            action="Start it with a larger --max-lora-rank",
        )


async def work(settings: Settings) -> None:
    """Run a worker until SIGTERM or Ctrl-C. Raises ``BridgeError``."""
    from transformers import AutoTokenizer

    keys = Keys(settings.run.id)
    environment = load_environment(settings.rollout.environment)
    folder = model_folder(settings.model.path, settings.model.revision)
    mine = resolve_run(settings, folder)
    token = control_token(settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    drain = Drain(lambda: loop.call_soon_threadsafe(stopping.set))
    # A thread that waits for Redis is given up soon, and asks again.
    impatient = settings.redis.model_copy(update={"outage_s": _OUTAGE_S})
    client = connect(impatient, drain.asked, ANSWER_S)
    async with AsyncExitStack() as stack:
        stack.enter_context(drain)  # so nothing below may hold the loop
        status = await stack.enter_async_context(_status(settings.rollout.status))
        stack.enter_context(errors(settings.redis))
        run = await wait_for_run(client, keys, settings.redis, stopping)
        if run is None:
            return
        check_joins(run, mine)
        connections = settings.rollout.concurrency * settings.rollout.num_generations
        generators = [
            await stack.enter_async_context(Generator(url, control, token, connections))
            for url, control in doors(settings.generators)
        ]
        asynchronous = await stack.enter_async_context(connect_async(settings.redis, drain.asked))
        worker = _worker(settings, run, environment, tokenizer, generators, client, asynchronous, status)
        gc.freeze()  # a full collection then leaves out all that was imported, which held the loop for its whole length
        stop = asyncio.create_task(_stop_when(stopping, worker))
        try:
            await worker.run()
        finally:
            stop.cancel()


def _worker(
    settings: Settings, run: RunRecord, environment: Environment, tokenizer: Any, generators: Sequence[Generator],
    client: redis.Redis, asynchronous: redis.asyncio.Redis, status: Status,
) -> Worker:  # fmt: skip
    name, keys = f"{socket.gethostname()}-{os.getpid()}", Keys(run.run)
    offset = clock_offset_ms(now_ms(client), time.time())
    store = open_store(settings.store_url, settings.store.max_adapter_bytes)
    timeout_s = settings.rollout.group_timeout_s

    def clock() -> int:
        return round(time.time() * 1000) + offset

    def reconcile() -> tuple[Manifest | None, RunRecord | None]:
        with errors(settings.redis):
            return repair_head(client, keys, store, run.policy), read_run(client, keys)

    worker = Worker(
        name=name,
        run=run,
        client=asynchronous,
        keys=keys,
        queue=GroupQueue(asynchronous, keys, name, ahead=run.groups_ahead, lease_s=_LEASE_S),
        sampler=Sampler(
            run=run,
            environment=environment,
            prompts=Prompts(environment.dataset(run.seed), run.seed),
            tokenizer=tokenizer,
            now_ms=clock,
        ),
        timeout_s=timeout_s,
        renew_s=_LEASE_S / 4,
        start_s=settings.generators.start_s,
        reconcile=reconcile,
        now_ms=clock,
        status=status,
    )
    worker.members = [
        Member(
            generator=generator,
            policy=run.policy,
            check=partial(check_generator, run, url=generator.url, dtype=settings.model.dtype),
            lease=Lease(asynchronous, keys.control(generator.name), keys.control_fence(generator.name), name, LEASE_S),
            room=settings.rollout.concurrency,
            report=worker.report,
            changed=worker.changed,
        )
        for generator in generators
    ]
    log.info("worker %s samples %s from %s", name, run.policy, ", ".join(each.url for each in generators))
    return worker


@asynccontextmanager
async def _status(address: str) -> AsyncIterator[Status]:
    """A status that beats while this loop turns; what waits for Redis or a generator does not hold it."""
    status = Status(_BEATS_S)
    status.ready("the trainer to publish the run")

    async def beat() -> None:
        while True:
            status.beat()
            await asyncio.sleep(1)

    with answering(address, status):
        beating = asyncio.create_task(beat())
        try:
            yield status
        finally:
            beating.cancel()


async def _stop_when(stopping: asyncio.Event, worker: Worker) -> None:
    await stopping.wait()
    worker.stop()
