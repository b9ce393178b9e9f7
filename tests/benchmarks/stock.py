"""vLLM's own routes beside ours on one server: a second socket without the public door, for what TRL and others use.

``--middleware tests.benchmarks.stock.StockDoor`` brings it, and ``PORT`` says where. It opens doors that need no token.
"""

from __future__ import annotations

import asyncio
import os

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

PORT = "BENCHMARK_STOCK_PORT"
MIDDLEWARE = "tests.benchmarks.stock.StockDoor"


class StockDoor:
    """ASGI middleware that changes nothing, and with the first request opens the second socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._door: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._door is None and scope["type"] == "http":
            self._door = asyncio.create_task(_serve(scope["app"]))
        await self._app(scope, receive, send)


async def _serve(app: object) -> None:
    """The server's routes, and those that it has only in dev mode and with adapters that are loaded at run time."""
    from fastapi import FastAPI
    from vllm.entrypoints.rl.online.api_router import router as pausing
    from vllm.entrypoints.serve.lora.api_router import _attach_router

    assert isinstance(app, FastAPI)
    stock = FastAPI()
    stock.state = app.state
    _attach_router(stock)
    stock.include_router(pausing)
    stock.router.routes += app.router.routes
    config = uvicorn.Config(stock, port=int(os.environ[PORT]), log_level="warning", lifespan="off")
    await uvicorn.Server(config)._serve()
