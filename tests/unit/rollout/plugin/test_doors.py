"""Laws 8 and 9 without an engine: what each door lets through."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from lorabridge.bridge.canary import Judgement
from lorabridge.bridge.errors import DigestMissing, Quarantined, SlotsBusy, SwapFailed
from lorabridge.rollout.plugin import doors
from lorabridge.rollout.plugin.control import Control
from lorabridge.rollout.plugin.doors import PublicDoor, control_app, model_of
from lorabridge.rollout.plugin.swap import Outdated
from lorabridge.rollout.wire import BEGAN_ON, GENERATE, EngineFacts, SwapReply, SwapRequest
from tests.factories import BASE, make_residency

TOKEN = "the control token of this test"
FACTS = EngineFacts(
    base=BASE, dtype="float32", logprobs_mode="processed_logprobs", max_lora_rank=8, max_loras=2, max_model_len=64
)


class FakeSwapper:
    """Serves ``policy``, and answers a swap with what it is told to."""

    def __init__(self) -> None:
        self.quarantine: str | None = None
        self.quarantined_ms: int | None = None
        self.fence = 0
        self.canary: Judgement | None = None
        self.failed: str | None = None
        self.residency = make_residency(3, 1)
        self.answer: Exception | None = None
        self.asked: list[SwapRequest] = []
        self.instance = self
        self.slot = "policy"
        self.in_flight: list[str] = []

    def begin(self, policy: str) -> str:
        self.in_flight.append(self.slot)
        return self.slot

    def end(self, name: str) -> None:
        self.in_flight.remove(name)

    async def swap(self, request: SwapRequest) -> SwapReply:
        self.asked.append(request)
        if self.answer is not None:
            raise self.answer
        return SwapReply(residency=self.residency, phases_ms={})

    async def attest(self) -> dict[str, str | None]:
        return {"policy": None}


class FakeLog:
    records = [make_residency(epoch, 1) for epoch in range(4)]  # noqa: RUF012


async def restarts(ids: list[str]) -> list[list[int] | None]:
    return [[len(one)] for one in ids]


@pytest.fixture
def swapper() -> FakeSwapper:
    return FakeSwapper()


@pytest.fixture
def control(swapper: FakeSwapper) -> Control:
    fake: Any = swapper
    log: Any = FakeLog()
    return Control(fake, log, FACTS, running=lambda: 5, restarts=restarts)


async def everything(scope: Scope, receive: Receive, send: Send) -> None:
    """A server that answers every request with what it was asked."""
    request = Request(scope, receive)
    body = await request.body()
    await PlainTextResponse(f"{request.method} {request.url.path} {body.decode()}")(scope, receive, send)


@pytest.fixture
def public(control: Control) -> TestClient:
    return TestClient(PublicDoor(everything, State({"lorabridge": control})))


@pytest.fixture
def private(control: Control) -> TestClient:
    return TestClient(control_app(control, TOKEN), headers={"Authorization": f"Bearer {TOKEN}"})


def test_not_even_a_preflight_is_answered_by_somebody_in_front_of_the_door(control: Control) -> None:
    app = Starlette()
    app.state.lorabridge = control
    app.add_middleware(PublicDoor, state=app.state)
    app.add_middleware(CORSMiddleware, allow_origins=["*"])  # as vLLM does, after plugins have had their turn
    app.middleware_stack = app.build_middleware_stack()  # as SageMaker's start-up does after that
    doors.put_outermost(app)
    preflight = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    assert TestClient(app).options("/v1/models", headers=preflight).status_code == 403
    assert TestClient(app).options(GENERATE, headers=preflight).status_code == 403


@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]),
    st.text(alphabet="abz/._-%~ ", max_size=20).map(lambda path: f"/{path}"),
)
async def test_only_the_allowlist_passes(method: str, path: str) -> None:
    """Asked as a server asks, so that no client tidies the path up."""
    answers: list[Message] = []

    async def send(message: Message) -> None:
        answers.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    await PublicDoor(everything, State())(scope, receive, send)
    assert answers[0]["status"] == {("GET", "/health"): 200, ("GET", "/readyz"): 503}.get((method, path), 403)


@pytest.mark.parametrize("path", ["/health", "/health/"])
def test_health_passes_as_it_is_spelled(path: str, public: TestClient) -> None:
    assert public.get(path).status_code == (200 if path == "/health" else 403)


def test_it_is_ready_while_a_policy_can_be_sampled(control: Control, public: TestClient, swapper: FakeSwapper) -> None:
    assert (public.get("/readyz").status_code, public.get("/readyz").text) == (200, "ready\n")
    swapper.quarantine = "a slot was emptied"
    assert (public.get("/readyz").status_code, public.get("/readyz").text) == (503, "serves nothing\n")
    swapper.quarantine, swapper.residency = None, msgspec.structs.replace(swapper.residency, serves={})
    assert public.get("/readyz").status_code == 503


def test_generation_passes_with_its_body_whole(public: TestClient) -> None:
    body = msgspec.json.encode({"model": "policy", "token_ids": list(range(5000))})
    reply = public.post(GENERATE, content=body)
    assert reply.status_code == 200
    assert reply.text == f"POST {GENERATE} {body.decode()}"


def test_a_request_for_a_pinned_policy_gets_its_newest_adapter_and_is_told_which(
    swapper: FakeSwapper, public: TestClient
) -> None:
    swapper.slot = "sha256:newest"
    body = {"token_ids": [1, 2], "model": "policy", "sampling_params": {"stop": ["\u00e9"]}}
    reply = public.post(GENERATE, json=body)
    assert reply.headers[BEGAN_ON] == "sha256:newest"
    assert msgspec.json.decode(reply.text.removeprefix(f"POST {GENERATE} ")) == body | {"model": "sha256:newest"}


def test_nobody_names_a_slot_himself(swapper: FakeSwapper, public: TestClient) -> None:
    swapper.slot = "sha256:newest"
    assert public.post(GENERATE, content=b'{"model": "sha256:newest"}').status_code == 404
    assert BEGAN_ON not in public.post(GENERATE, content=b'{"model": "sha256:newest"}').headers


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_is_in_flight_until_it_has_ended_well_or_not(
    fails: bool, swapper: FakeSwapper, control: Control
) -> None:
    seen: list[list[str]] = []

    async def server(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(list(swapper.in_flight))
        if fails:
            raise RuntimeError("it broke")
        await everything(scope, receive, send)

    client = TestClient(PublicDoor(server, State({"lorabridge": control})), raise_server_exceptions=False)
    assert client.post(GENERATE, content=b'{"model": "policy"}').status_code == (500 if fails else 200)
    assert (seen, swapper.in_flight) == ([["policy"]], [])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": null}', 400), (b"{}", 400), (b"", 400), (b"[]", 400), (b'{"model": 7}', 400), (b"\xff", 400),
        (b'{"model": "base"}', 404), (b'{"model": "other"}', 404), (b'{"model": ""}', 404),
        (b'{"model": "policy", "model": "base"}', 404),
    ],
)  # fmt: skip
def test_a_request_that_names_no_served_policy_is_refused(body: bytes, status: int, public: TestClient) -> None:
    assert public.post(GENERATE, content=body).status_code == status


def test_a_generator_in_quarantine_refuses_and_says_why(swapper: FakeSwapper, public: TestClient) -> None:
    swapper.quarantine = "the slot held something else"
    reply = public.post(GENERATE, content=b'{"model": "policy"}')
    assert reply.status_code == 503
    assert "held something else" in reply.text


def test_a_generator_that_drains_lets_nothing_in_and_counts_what_is_in_flight(
    control: Control, private: TestClient
) -> None:
    inside: list[int] = []

    async def server(scope: Scope, receive: Receive, send: Send) -> None:
        inside.append(private.post("/drain").json())
        await everything(scope, receive, send)

    client = TestClient(PublicDoor(server, State({"lorabridge": control})))
    assert client.post(GENERATE, content=b'{"model": "policy"}').status_code == 200
    assert (inside, private.post("/drain").json()) == ([1], 0)
    reply = client.post(GENERATE, content=b'{"model": "policy"}')
    assert (reply.status_code, len(inside)) == (503, 1)
    assert "ending" in reply.text
    assert client.get("/readyz").status_code == 503


def test_before_the_plugin_has_started_nothing_is_generated() -> None:
    assert TestClient(PublicDoor(everything, State())).post(GENERATE, content=b'{"model": "x"}').status_code == 503


def test_a_body_longer_than_the_context_is_refused(public: TestClient, control: Control) -> None:
    full = {"model": "policy", "token_ids": [4_000_000_000] * FACTS.max_model_len}
    assert len(msgspec.json.encode(full)) < control.max_request_bytes
    assert public.post(GENERATE, content=b"x" * (control.max_request_bytes + 1)).status_code == 413
    control.max_request_bytes = 100
    assert public.post(GENERATE, content=b"x" * 101).status_code == 413
    assert public.post(GENERATE, content=iter([b"x" * 60, b"x" * 60])).status_code == 413


@given(st.binary(max_size=60))
def test_finding_the_model_never_fails(body: bytes) -> None:
    model_of(body)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer wrong", TOKEN, f"bearer {TOKEN}x"])
@pytest.mark.parametrize("path", ["/state", "/residency", "/metrics", "/swap", "/", "/unknown"])
def test_nothing_answers_without_the_token(header: str | None, path: str, control: Control) -> None:
    private = TestClient(control_app(control, TOKEN), headers={"Authorization": header} if header is not None else {})
    assert private.get(path).status_code == 401
    assert private.post(path).status_code == 401


def test_state_and_residency_answer_with_it(private: TestClient) -> None:
    state = private.get("/state").json()
    assert state["residency"]["epoch"] == 3
    assert state["running"] == 5
    assert [record["epoch"] for record in private.get("/residency?after=1").json()] == [2, 3]
    assert private.get("/residency?after=x").status_code == 400


SWAP = {"policy": "p", "version": 1, "digest": "sha256:" + "0" * 64, "instance": "i", "epoch": 0}


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (None, 200),
        (Outdated("moved"), 409),
        (SwapFailed("no", action="see"), 422),
        (SlotsBusy("no", action="see"), 423),
        (DigestMissing("no", action="see"), 424),
        (Quarantined("no", action="see"), 503),
    ],
)
def test_a_swap_answers_with_a_status_of_its_own(
    answer: Exception | None, status: int, swapper: FakeSwapper, private: TestClient
) -> None:
    swapper.answer = answer
    assert private.post("/swap", json=SWAP).status_code == status


@pytest.mark.parametrize("wrong", [{"path": "/etc"}, {"version": "1"}, {"kv": "drop"}, {"policy": None}])
def test_a_swap_request_with_anything_else_in_it_is_refused(
    wrong: dict[str, object], swapper: FakeSwapper, private: TestClient
) -> None:
    assert private.post("/swap", json=SWAP | wrong).status_code == 400
    assert swapper.asked == []
