"""Two doors (law 9). The public one lets through what generation needs; the other needs the control token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, State
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorabridge.bridge.canary import Judgement
from lorabridge.bridge.codec import UNREADABLE
from lorabridge.bridge.errors import BridgeError, DiskFull, Quarantined, SlotsBusy, StoreError
from lorabridge.rollout.plugin.control import Control
from lorabridge.rollout.plugin.swap import Outdated
from lorabridge.rollout.wire import BEGAN_ON, GENERATE, ScoreRequest, SwapRequest

_READY = "/readyz"
_ALLOWED = frozenset({("GET", "/health"), ("GET", _READY), ("POST", GENERATE)})
T = TypeVar("T")
_MAX_CONTROL = 64 * 1024


class PublicDoor:
    """ASGI middleware in front of vLLM's routes: an allowlist, and no request without a served policy (law 8).

    ``state.lorabridge`` is the ``Control`` once the plugin has started; before that only ``/health`` answers, and
    ``/readyz`` with 503.
    """

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http" or (scope["method"], scope["path"]) not in _ALLOWED:
            return await _refuse(403, "not served on this port")(scope, receive, send)
        if scope["path"] == _READY:
            return await self._ready()(scope, receive, send)
        if scope["path"] != GENERATE:
            return await self._app(scope, receive, send)
        control = self._control
        if control is None:
            return await _refuse(503, "starting")(scope, receive, send)
        body = await read_capped(scope, receive, control.max_request_bytes)
        if body is None:
            why = f"a request of more than {control.max_request_bytes} bytes, which is more than the context holds"
            return await _refuse(413, why)(scope, receive, send)
        policy = model_of(body)
        refusal = control.refusal(policy)
        if policy is None or refusal is not None:
            return await _refuse(*(refusal or (400, "no model")))(scope, receive, send)
        with control.sampling(policy) as name:
            if name == policy:
                return await self._app(scope, _replay(body, receive), send)
            # The scope's content length is no longer the body's; vLLM reads the body that it is given.
            return await self._app(scope, _replay(for_model(body, name), receive), _telling(name, send))

    @property
    def _control(self) -> Control | None:
        return getattr(self._state, "lorabridge", None)

    def _ready(self) -> Response:
        """For a supervisor or a load balancer: it says no more than whether samples can be had here."""
        ready = self._control is not None and self._control.ready
        return PlainTextResponse("ready\n" if ready else "serves nothing\n", 200 if ready else 503)


def put_outermost(app: Starlette) -> None:
    """Have the public door see a request before whatever else was put in front of the routes: CORS answers preflights
    by itself. To be called before the first request."""
    app.user_middleware.sort(key=lambda each: cast(object, each.cls) is not PublicDoor)
    app.middleware_stack = None  # SageMaker's start-up has had it built already


class _Model(msgspec.Struct):
    model: str | None = None


def model_of(body: bytes) -> str | None:
    """The model that a request names, None if it names none or is not a JSON object."""
    try:
        return msgspec.json.decode(body, type=_Model).model
    except UNREADABLE:
        return None


def for_model(body: bytes, name: str) -> bytes:
    """The same request of another model."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": name})


def _telling(digest: str, send: Send) -> Send:
    """Answer with the digest of the adapter that the request began on."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (BEGAN_ON.encode(), digest.encode())]}
        await send(message)

    return tell


async def read_capped(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """A request's body, or None if it is longer than ``limit`` bytes; no more than that is ever held."""
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        return None
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body once more, then whatever comes next (a client that goes away)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def control_app(control: Control, token: str) -> ASGIApp:
    """The control door: every path, known or not, answers 401 without the token."""
    routes = [
        Route("/state", _guarded(_state), methods=["GET"]),
        Route("/residency", _guarded(_residency), methods=["GET"]),
        Route("/swap", _guarded(_swap), methods=["POST"]),
        Route("/score", _guarded(_score), methods=["POST"]),
        Route("/judged", _guarded(_judged), methods=["POST"]),
        Route("/attest", _guarded(_attest), methods=["POST"]),
        Route("/restarts", _guarded(_restarts), methods=["POST"]),
        Route("/drain", _guarded(_drain), methods=["POST"]),
        Route("/metrics", _guarded(_metrics), methods=["GET"]),
    ]
    app = Starlette(routes=routes)
    app.state.control = control
    return TokenGuard(app, token)


class TokenGuard:
    """ASGI middleware: ``Authorization: Bearer <token>``, compared in constant time, or 401."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                return await _refuse(401, "the control token is wrong or missing")(scope, receive, send)
        elif scope["type"] != "lifespan":
            return await _refuse(403, "not served on this port")(scope, receive, send)
        return await self._app(scope, receive, send)


class _TooLong(Exception):
    """A body of more than the control door takes."""


Handler = Callable[[Control, Request], Awaitable[Response]]


def _guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Turn our errors into status codes, once for every route."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request.app.state.control, request)
        except _TooLong:
            return _refuse(413, f"a request of more than {_MAX_CONTROL} bytes")
        except Outdated as error:
            return _refuse(409, str(error))
        except UNREADABLE as error:
            return _refuse(400, f"not such a request: {error}")
        except (StoreError, DiskFull) as error:
            return _refuse(424, error.diagnostics())
        except Quarantined as error:
            return _refuse(503, error.diagnostics())
        except SlotsBusy as error:
            return _refuse(423, error.diagnostics())
        except BridgeError as error:
            return _refuse(422, error.diagnostics())

    return answer


async def _state(control: Control, request: Request) -> Response:
    return _json(control.state())


async def _residency(control: Control, request: Request) -> Response:
    after = request.query_params.get("after", "-1")
    try:
        epoch = int(after)
    except ValueError:
        return _refuse(400, "after is not an epoch")
    return _json(control.residencies(epoch))


async def _body(request: Request, kind: type[T]) -> T:
    """What a request asks for. Raises ``_TooLong`` or one of ``UNREADABLE``."""
    body = await read_capped(request.scope, request.receive, _MAX_CONTROL)
    if body is None:
        raise _TooLong
    return msgspec.json.decode(body, type=kind)


async def _swap(control: Control, request: Request) -> Response:
    return _json(await control.swap(await _body(request, SwapRequest)))


async def _score(control: Control, request: Request) -> Response:
    return _json(await control.score(await _body(request, ScoreRequest)))


async def _judged(control: Control, request: Request) -> Response:
    await control.judged(await _body(request, Judgement))
    return _json(None)


async def _attest(control: Control, request: Request) -> Response:
    return _json(await control.attest())


async def _restarts(control: Control, request: Request) -> Response:
    return _json(await control.restarts(await _body(request, list[str])))


async def _drain(control: Control, request: Request) -> Response:
    return _json(control.drain())


async def _metrics(control: Control, request: Request) -> Response:
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _refuse(status: int, why: str) -> Response:
    """An answer in OpenAI's error form."""
    return JSONResponse({"error": {"message": f"lorabridge: {why}", "code": status}}, status_code=status)
