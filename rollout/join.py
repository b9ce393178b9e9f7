"""Joining a run: wait for what the trainer published, and check that this worker and its generator are the same."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time

import redis

from lorabridge.bridge import codec
from lorabridge.bridge.errors import ConfigError, GeneratorError, GeneratorUnreachable, RunMismatch
from lorabridge.bridge.model import model_folder
from lorabridge.bridge.run_record import RunRecord, check_base, check_joins, resolve_run
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.connection import clock_offset_ms, connect, connect_async, errors, now_ms
from lorabridge.bridge.stream.groups import GroupQueue
from lorabridge.bridge.stream.head import repair_head
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.token import control_token
from lorabridge.rollout.environment import Environment, Prompts, load_environment
from lorabridge.rollout.generator import Generator
from lorabridge.rollout.sampler import Residencies, Sampler
from lorabridge.rollout.wire import EngineFacts, GeneratorState
from lorabridge.rollout.worker import Worker

log = logging.getLogger("lorabridge.worker")
_LOGPROBS_MODE = "processed_logprobs"
_START_S = 600.0


def doors(settings: Settings) -> tuple[str, str]:
    """Public and control URL of the generator. Raises ``ConfigError`` if they do not pair up."""
    own = settings.generators
    if not own.urls:
        control = (
            own.control_host
            if own.control_host.startswith("unix:")
            else f"http://{own.control_host}:{own.control_port}"
        )
        return f"http://{own.host}:{own.port}", control
    if len(own.urls) != 1 or len(own.control) != 1:
        raise ConfigError(
            f"[generators] urls names {len(own.urls)} servers and control {len(own.control)} doors",
            action="Give one of each; a worker drives one generator",
        )
    return own.urls[0], own.control[0]


async def wait_for_run(client: redis.Redis, keys: Keys, stopping: asyncio.Event) -> RunRecord | None:
    """What the trainer published, as soon as it has; None if told to stop before."""
    said = False
    while not stopping.is_set():
        body = client.get(keys.run)
        if isinstance(body, bytes):
            return codec.decode(RunRecord, body)
        if not said:
            log.info("waiting for the trainer to publish the run")
            said = True
        await asyncio.sleep(0.2)
    return None


async def wait_for_generator(generator: Generator, run: RunRecord, stopping: asyncio.Event) -> EngineFacts | None:
    """The generator's facts, once it is up and fits the run; None if told to stop before.

    Raises:
        RunMismatch: another base model, or too small a slot.
        GeneratorError: no plugin, wrong token, wrong flags, or not up within ten minutes.
    """
    deadline, said = time.monotonic() + _START_S, False
    while not stopping.is_set():
        try:
            state = await generator.state()
            check_generator(run, state, generator.url)
            return state.facts
        except GeneratorUnreachable:
            if time.monotonic() > deadline:
                raise
        if not said:
            log.info("waiting for the generator %s", generator.url)
            said = True
        await asyncio.sleep(0.5)
    return None


def check_generator(run: RunRecord, state: GeneratorState, url: str) -> None:
    """Raise ``RunMismatch`` or ``GeneratorError`` if its samples would not be what the trainer thinks they are."""
    check_base(run.base, state.facts.base, f"the generator {url}")
    if state.facts.logprobs_mode != _LOGPROBS_MODE:
        raise GeneratorError(
            f"{url} reports {state.facts.logprobs_mode}, not the logprobs it samples with",
            action=f"Start it with --logprobs-mode {_LOGPROBS_MODE}",
        )
    if state.facts.max_lora_rank < run.rank:
        raise RunMismatch(
            f"{url} takes LoRA ranks up to {state.facts.max_lora_rank}, and the run publishes rank {run.rank}",
            action="Start it with a larger --max-lora-rank",
        )
    if state.quarantine is not None:
        raise GeneratorError(f"{url} is in quarantine: {state.quarantine}", action="Restart it")


async def work(settings: Settings) -> None:
    """Run a worker until SIGTERM or SIGINT. Raises ``BridgeError``."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    keys = Keys(settings.run.id)
    environment = load_environment(settings.rollout.environment)
    mine = resolve_run(settings, model_folder(settings.model.path, settings.model.revision))
    url, control = doors(settings)
    connections = settings.rollout.concurrency * settings.rollout.num_generations
    with errors(settings.redis):
        client = connect(settings.redis)
        run = await wait_for_run(client, keys, stopping)
        if run is None:
            return
        check_joins(run, mine)
        async with Generator(url, control, control_token(settings), connections) as generator:
            facts = await wait_for_generator(generator, run, stopping)
            if facts is not None:
                await _work(settings, run, environment, generator, facts, client, stopping)


async def _work(
    settings: Settings, run: RunRecord, environment: Environment, generator: Generator, facts: EngineFacts,
    client: redis.Redis, stopping: asyncio.Event,
) -> None:  # fmt: skip
    from transformers import AutoTokenizer

    name = f"{socket.gethostname()}-{os.getpid()}"
    keys = Keys(settings.run.id)
    offset = clock_offset_ms(now_ms(client), time.time())
    store = open_store(settings.store_url, settings.store.max_adapter_bytes)
    residencies = Residencies(generator)
    folder = model_folder(settings.model.path, settings.model.revision)
    async with connect_async(settings.redis) as asynchronous:
        sampler = Sampler(
            run=run,
            environment=environment,
            prompts=Prompts(environment.dataset(run.seed), run.seed),
            tokenizer=AutoTokenizer.from_pretrained(folder),
            generator=generator,
            residencies=residencies,
            dtype=facts.dtype,
            logprobs_mode=facts.logprobs_mode,
            now_ms=lambda: round(time.time() * 1000) + offset,
        )
        queue = GroupQueue(
            asynchronous, keys, name, ahead=settings.rollout.groups_ahead, lease_s=settings.rollout.group_timeout_s
        )
        worker = Worker(
            name=name,
            policy=run.policy,
            client=asynchronous,
            keys=keys,
            queue=queue,
            generator=generator,
            residencies=residencies,
            sampler=sampler,
            concurrency=settings.rollout.concurrency,
            reconcile=lambda: repair_head(client, keys, store, run.policy),
            now_ms=lambda: round(time.time() * 1000) + offset,
        )
        log.info("worker %s samples %s from %s", name, run.policy, generator.url)
        stop = asyncio.create_task(_stop_when(stopping, worker))
        try:
            await worker.run()
        finally:
            stop.cancel()


async def _stop_when(stopping: asyncio.Event, worker: Worker) -> None:
    await stopping.wait()
    worker.stop()
