"""What a generator's answers, and its silences, mean to a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lorabridge.bridge.errors import (
    BridgeError,
    GeneratorError,
    GeneratorUnreachable,
    NotServed,
    PluginMissing,
    Quarantined,
    RequestRefused,
    SwapFailed,
    TokenRefused,
)
from lorabridge.bridge.residency import EngineSpan
from lorabridge.bridge.trajectory import Sampling
from lorabridge.rollout.generator import Generator, Moved
from lorabridge.rollout.wire import GENERATE, SwapReply
from tests.factories import make_manifest, make_residency

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOKEN = "the control token of this test"


async def healthy(request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def generator(**routes: Handler) -> AsyncIterator[Generator]:
    """A client of a server whose doors answer as told; both doors are one here."""
    app = web.Application()
    app.router.add_get("/health", routes.get("health", healthy))
    app.router.add_post("/swap", routes.get("swap", healthy))
    app.router.add_get("/state", routes.get("state", healthy))
    app.router.add_post(GENERATE, routes.get("generate", healthy))
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        async with Generator(url, url, TOKEN, 2) as client:
            yield client


def answering(status: int, body: object) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")

    return answer


async def hanging_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestRefused), (401, TokenRefused), (404, NotServed), (413, RequestRefused), (409, Moved),
        (422, SwapFailed), (424, SwapFailed),
        (503, Quarantined), (500, GeneratorError),
    ],
)  # fmt: skip
async def test_every_refusal_is_an_error_of_its_own(status: int, kind: type[Exception]) -> None:
    refusal = {"error": {"message": "lorabridge: the reason", "code": status}}
    async with generator(swap=answering(status, refusal)) as client:
        with pytest.raises(kind, match="the control token" if status == 401 else "the reason") as caught:
            await client.swap(make_manifest(), make_residency(1, 1))
        assert TOKEN not in str(caught.value)


async def test_a_swap_sends_the_token_and_names_instance_epoch_and_digest() -> None:
    seen: list[object] = []
    now = make_residency(3, 1)

    async def swap(request: web.Request) -> web.Response:
        seen.extend([request.headers["Authorization"], await request.json()])
        return web.Response(body=msgspec.json.encode(SwapReply(residency=now, phases_ms={})))

    manifest = make_manifest(7)
    async with generator(swap=swap) as client:
        assert (await client.swap(manifest, now, fence=4)).residency == now
        await client.swap(manifest, now)
    token, first, _, second = seen
    assert token == f"Bearer {TOKEN}"
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first.pop("operation") != second.pop("operation")
    assert first == {
        "policy": "policy", "version": 7, "digest": manifest.digest, "instance": "instance", "epoch": 3, "kv": None,
        "mode": None, "fence": 4,
    }  # fmt: skip


async def test_a_connection_that_is_lost_is_a_passing_failure_and_not_a_missing_plugin() -> None:
    async with generator(state=hanging_up) as client:
        with pytest.raises(GeneratorUnreachable):
            await client.state()


async def test_a_vllm_server_without_our_control_door_is_named_as_such() -> None:
    async with generator() as client, Generator(client.url, "http://127.0.0.1:9", TOKEN, 1) as without:
        with pytest.raises(PluginMissing, match="nothing answers at its control door"):
            await without.state()


async def test_nobody_there_at_all_is_unreachable() -> None:
    async with Generator("http://127.0.0.1:9", "http://127.0.0.1:9", TOKEN, 1) as client:
        with pytest.raises(GeneratorUnreachable):
            await client.state()


async def test_an_answer_that_is_not_ours_is_named_as_such() -> None:
    async with generator(state=answering(200, {"object": "list"})) as client:
        with pytest.raises(PluginMissing, match="not ours"):
            await client.state()


def choice(**changes: object) -> dict[str, object]:
    given = {
        "token_ids": [5, 6], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}, "finish_reason": "stop",
        "weight_versions": [{"version": "i:1", "start": 0, "end": 2}],
    }  # fmt: skip
    return {"choices": [given | changes]}


async def test_a_completion_has_tokens_logprobs_and_the_engines_spans() -> None:
    async with generator(generate=answering(200, choice())) as client:
        completion = await client.sample("policy", [1], Sampling(), [0])
    assert completion.token_ids == (5, 6)
    assert completion.logprobs == (-0.5, -1.0)
    assert completion.spans == (EngineSpan("i:1", 0, 2),)


@pytest.mark.parametrize("changes", [{"logprobs": None}, {"finish_reason": None}, {"finish_reason": "error"}])
async def test_a_completion_that_is_not_whole_is_an_error(changes: dict[str, object]) -> None:
    async with generator(generate=answering(200, choice(**changes))) as client:
        with pytest.raises(BridgeError):
            await client.sample("policy", [1], Sampling(), [0])


async def test_a_completion_without_spans_says_so_and_guesses_nothing() -> None:
    async with generator(generate=answering(200, choice(weight_versions=None))) as client:
        assert (await client.sample("policy", [1], Sampling(), [0])).spans is None
