"""How every generator of a run stands now: what it serves, who controls it, and if it is out, why."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Literal, cast

import msgspec
import redis

from lorabridge.bridge.errors import BridgeError
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.stream.connection import connect, errors
from lorabridge.bridge.stream.head import Head, read_head
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.stream.lease import holder_key
from lorabridge.bridge.token import control_token
from lorabridge.rollout.generator import Generator
from lorabridge.rollout.join import doors
from lorabridge.rollout.wire import GeneratorState, name_of

Health = Literal["in", "behind", "empty", "out"]


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A policy on a generator. ``behind`` is in versions, None if the policy's head is not known here."""

    version: int
    digest: str
    behind: int | None


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One generator.

    Attributes:
        generator: its public URL.
        health: ``in`` at the head, ``behind`` it, ``empty`` if it does not serve the run's policy, ``out`` if it must
            not be sampled from or cannot be asked.
        why: of ``out``, else ''.
        controller: worker that holds its lease, '' if none does.
        instance, epoch, kv, running: as it says itself; '', 0, '' and 0 if it cannot be asked.
        serves: by policy.
        canary: the last one's verdict, and of which version; '' if there was none.
    """

    generator: str
    health: Health
    why: str
    controller: str
    instance: str = ""
    epoch: int = 0
    kv: str = ""
    running: int = 0
    serves: dict[str, Serving] = {}
    canary: str = ""


def judge(
    url: str, state: GeneratorState | BridgeError, heads: Mapping[str, Head], policy: str, controller: str
) -> Seen:
    """What a generator's answer, or its failure to answer, says of it. Pure.

    Args:
        url: of its public door.
        state: what it answered.
        heads: of the policies that are known.
        policy: the run's.
        controller: who holds its lease.
    """
    if isinstance(state, BridgeError):
        return Seen(generator=url, health="out", why=f"{state.problem}. {state.action}", controller=controller)
    serves = {
        name: Serving(
            version=served.version,
            digest=served.digest,
            behind=max(0, heads[name].version - served.version) if name in heads else None,
        )
        for name, served in state.residency.serves.items()
    }
    health: Health = "in"
    if state.quarantine is not None:
        health = "out"
    elif policy not in serves:
        health = "empty"
    elif policy in heads and heads[policy].digest != serves[policy].digest:
        health = "behind"
    return Seen(
        generator=url,
        health=health,
        why=state.quarantine or "",
        controller=controller,
        instance=state.residency.instance,
        epoch=state.residency.epoch,
        kv=state.residency.kv,
        running=state.running,
        serves=serves,
        canary=f"{state.canary.verdict} {state.canary.version}" if state.canary else "",
    )


async def survey(settings: Settings) -> list[Seen]:
    """Ask every generator of the run. Raises ``StreamError`` or ``ConfigError``; a generator that fails is reported."""
    policy, keys = settings.policy.name, Keys(settings.run.id)
    with errors(settings.redis), connect(settings.redis) as client:
        head = read_head(client, keys, policy)
        controllers = {url: controller(client, keys, url) for url, _ in doors(settings.generators)}
    states = await ask(settings)
    heads = {policy: head} if head else {}
    return [judge(url, state, heads, policy, controllers[url]) for url, state in states]


async def ask(settings: Settings) -> Sequence[tuple[str, GeneratorState | BridgeError]]:
    """The state of every generator, or why it cannot be had, in the configuration's order."""
    token = control_token(settings)
    async with AsyncExitStack() as stack:
        generators = [
            await stack.enter_async_context(Generator(url, control, token, 1))
            for url, control in doors(settings.generators)
        ]
        states = await asyncio.gather(*(_state(generator) for generator in generators))
        return [(generator.url, state) for generator, state in zip(generators, states, strict=True)]


def controller(client: redis.Redis, keys: Keys, url: str) -> str:
    """The worker that holds a generator's lease now, '' if none does."""
    key = keys.control(name_of(url, socket.gethostname()))
    held, holder = cast(list[bytes | None], client.mget([key, holder_key(key)]))
    return (holder or b"?").decode() if held else ""


async def _state(generator: Generator) -> GeneratorState | BridgeError:
    try:
        return await generator.state()
    except BridgeError as error:
        return error
