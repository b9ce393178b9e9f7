"""A generator as a process, both doors on one port: ``python -m tests.fake_generator PORT BASE SECONDS``.

It does what it is told to as ``tests.workers.FakeGenerator`` does; each sample takes ``SECONDS`` and is another one.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.trajectory import Sampling
from lorabridge.rollout.generator import Completion
from lorabridge.rollout.wire import GENERATE, SwapRequest
from tests.factories import make_manifest
from tests.workers import FACTS, FakeGenerator


def application(url: str, base: Path, seconds: float) -> web.Application:
    """Its two doors, as routes of one server."""
    fake = FakeGenerator(url)
    fake.spoil = _written
    facts = msgspec.structs.replace(FACTS, base=fingerprint(base))

    async def healthy(request: web.Request) -> web.Response:
        return web.Response()

    async def state(request: web.Request) -> web.Response:
        return _json(msgspec.structs.replace(await fake.state(), facts=facts))

    async def residency(request: web.Request) -> web.Response:
        return _json(await fake.residencies(int(request.query["after"])))

    async def swap(request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=SwapRequest)
        manifest = make_manifest(wanted.version, digest=wanted.digest, policy=wanted.policy)
        return _json(await fake.swap(manifest, fake.records[-1], fence=wanted.fence))

    async def restarts(request: web.Request) -> web.Response:
        return _json([[]])

    async def generate(request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read())
        await asyncio.sleep(seconds)
        return _json(_as_vllm(await fake.sample(asked["model"], asked["token_ids"], Sampling())))

    app = web.Application()
    app.router.add_get("/health", healthy)
    app.router.add_get("/state", state)
    app.router.add_get("/residency", residency)
    app.router.add_post("/swap", swap)
    app.router.add_post("/restarts", restarts)
    app.router.add_post(GENERATE, generate)
    return app


def _written(completion: Completion) -> Completion:
    """As long, of letters, some of them lower-case, and with the same end."""
    *letters, end = completion.token_ids
    return msgspec.structs.replace(completion, token_ids=(*random.choices(range(3, 55), k=len(letters)), end))


def _as_vllm(completion: Completion) -> dict[str, Any]:
    choice = {
        "token_ids": completion.token_ids,
        "logprobs": {"content": [{"logprob": logprob} for logprob in completion.logprobs]},
        "weight_versions": completion.spans,
        "finish_reason": completion.finish_reason,
    }
    return {"choices": [choice], "request_id": completion.request_id}


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


if __name__ == "__main__":
    port = int(sys.argv[1])
    app = application(f"http://127.0.0.1:{port}", Path(sys.argv[2]), float(sys.argv[3]))
    web.run_app(app, host="127.0.0.1", port=port, print=lambda *_: None)
