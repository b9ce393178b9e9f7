"""Inside vLLM: what is served, proof of it, and the two doors.

``vllm.endpoint_plugins`` brings ``EndpointPlugin`` into the API server, ``vllm.general_plugins`` brings two methods
into EngineCore, ``--worker-extension-cls`` brings the attestation into every worker. Nothing that vLLM has is replaced.

A swap, from left to right: fetch and verify -> pause -> load from a path of its own -> attest the slot -> put the new
epoch on record -> label -> resume. Only the last five happen while nothing is sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State


class EndpointPlugin:
    """vLLM's ``EndpointPlugin`` protocol (vllm/plugins/endpoint_plugins/interface.py)."""

    name = "lorabridge"
    required_tasks = ("generate",)
    _app: FastAPI

    def attach_router(self, app: FastAPI) -> None:
        """Put the allowlist in front of every route, before the server accepts anything."""
        from lorabridge.rollout.plugin.doors import PublicDoor

        app.add_middleware(PublicDoor, state=app.state)
        self._app = app

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Check the engine, then open the control door. Raises, and so stops the server, if it cannot do its job."""
        from lorabridge.rollout.plugin.doors import put_outermost
        from lorabridge.rollout.plugin.start import start

        put_outermost(self._app)
        await start(engine_client, state, args)
