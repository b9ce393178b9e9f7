"""Look at everything that a run leans on, and say what is wrong and what to do."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import redis

from lorabridge.bridge.errors import BridgeError
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.model import model_folder
from lorabridge.bridge.run_record import RunRecord, resolve_run
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.connection import clock_offset_ms, connect, errors, now_ms
from lorabridge.bridge.stream.head import Head, read_head
from lorabridge.bridge.stream.keys import LEDGER_GROUP, Keys
from lorabridge.bridge.token import control_token
from lorabridge.rollout import findings
from lorabridge.rollout.findings import Finding
from lorabridge.rollout.generator import Generator
from lorabridge.rollout.join import doors, read_run
from lorabridge.rollout.survey import controller
from lorabridge.rollout.wire import GeneratorState

_SECTIONS = ("server", "persistence", "memory")


def examine(settings: Settings) -> list[Finding]:
    """Every finding, in the order in which a person would look. Raises ``ConfigError``: nothing can be looked at."""
    found: list[Finding] = []
    run, mirrored, controllers = _redis(settings, found)
    if run is not None:
        found.append(findings.of_joining(run, _mine(settings)))
    head = _store(settings, mirrored, found)
    found += [findings.of_disk(str(place), shutil.disk_usage(place).free) for place in _places(settings)]
    for url, state, attested in asyncio.run(_generators(settings)):
        found += findings.of_generator(
            url, state, attested, run, head, settings.model.dtype, settings.generators.kv, controllers.get(url, "")
        )
    return found


def _redis(settings: Settings, found: list[Finding]) -> tuple[RunRecord | None, Head | None, Mapping[str, str]]:
    keys = Keys(settings.run.id)
    try:
        with errors(settings.redis), connect(settings.redis) as client:
            info: dict[str, Any] = {}
            for section in _SECTIONS:
                info |= cast(dict[str, Any], client.info(section))
            found += findings.of_redis(info, clock_offset_ms(now_ms(client), time.time()))
            run = read_run(client, keys)
            found += findings.of_streams(_waiting(client, keys), bool(client.exists(keys.archiver)), run)
            controllers = {url: controller(client, keys, url) for url, _ in doors(settings.generators)}
            return run, read_head(client, keys, settings.policy.name), controllers
    except BridgeError as error:
        found.append(findings.failed("Redis", "reachable", error))
        return None, None, {}


def _mine(settings: Settings) -> RunRecord | BridgeError:
    """The run by what is on this machine."""
    try:
        return resolve_run(settings, model_folder(settings.model.path, settings.model.revision))
    except BridgeError as error:
        return error


def _waiting(client: redis.Redis, keys: Keys) -> int:
    """Groups on the stream that the ledger does not have, counted up to where it is a problem."""
    after = "-"
    if client.exists(keys.trajectories):
        for group in client.xinfo_groups(keys.trajectories):
            if group["name"] == LEDGER_GROUP.encode():
                after = f"({group['last-delivered-id'].decode()}"
    return len(cast(list[object], client.xrange(keys.trajectories, min=after, count=findings.BACKLOG + 1)))


def _store(settings: Settings, mirrored: Head | None, found: list[Finding]) -> Manifest | None:
    try:
        store = open_store(settings.store_url, settings.store.max_adapter_bytes)
        newest = store.newest(settings.policy.name)
    except BridgeError as error:
        found.append(findings.failed("store", "readable", error))
        return None
    verified: BridgeError | None = None
    if newest is not None:
        try:
            store.read(newest.digest)
        except BridgeError as error:
            verified = error
    found += findings.of_line(newest, mirrored, verified)
    return newest


def _places(settings: Settings) -> list[Path]:
    """The folders on this machine that a run writes to, each once; those that are there."""
    return [place for place in dict.fromkeys((settings.run.dir, settings.ledger_dir)) if place.is_dir()]


async def _generators(
    settings: Settings,
) -> list[tuple[str, GeneratorState | BridgeError, Mapping[str, str | None] | BridgeError]]:
    token = control_token(settings)
    async with AsyncExitStack() as stack:
        generators = [
            await stack.enter_async_context(Generator(url, control, token, 1))
            for url, control in doors(settings.generators)
        ]
        return await asyncio.gather(*(_look(generator) for generator in generators))


async def _look(
    generator: Generator,
) -> tuple[str, GeneratorState | BridgeError, Mapping[str, str | None] | BridgeError]:
    try:
        attested: Mapping[str, str | None] | BridgeError = await generator.attest()
        return generator.url, await generator.state(), attested
    except BridgeError as error:
        return generator.url, error, error
