"""Laws 4, 8, 9 and 10 on the real engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from lorabridge.bridge.canary import judge
from lorabridge.bridge.errors import GeneratorError, PluginMissing, SwapFailed, TokenRefused
from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.audit import audit
from lorabridge.bridge.replay.scorer import Scorer
from lorabridge.bridge.trajectory import Sampling
from lorabridge.rollout.generator import Generator, Moved
from lorabridge.rollout.wire import GENERATE
from tests.e2e.models import END, commit, make_adapter, make_base, make_canary
from tests.e2e.server import Server
from tests.e2e.traffic import Traffic, generator_of, swap, trajectories_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = [5, 6, 7, 8]
SAMPLING = Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def misfit(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """An adapter for another, wider base, which the publisher's own checks cannot tell."""
    wider = make_base(tmp_path_factory.mktemp("wider"), hidden=256)
    return commit(server.store, wider, "misfit", [make_adapter(wider, 1)])[0]


async def test_a_failed_swap_puts_the_previous_adapter_back_under_traffic(
    server: Server, base: Path, pair: list[Manifest], misfit: Manifest
) -> None:
    as_pair = _renamed(misfit, "pair")
    async with generator_of(server) as generator:
        before = await swap(generator, pair[1])
        traffic = Traffic(generator, "pair", 4_000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            failures = 0
            while not traffic.done:
                await asyncio.sleep(0.5)
                with pytest.raises(SwapFailed):
                    await swap(generator, as_pair)
                failures += 1
        now = await generator.state()
    assert now.quarantine is None
    assert now.residency.serves == before.serves
    assert now.residency.epoch == before.epoch + failures
    report = audit(trajectories_of(traffic.turns, fingerprint(base).digest), server.store, Scorer(base, server.store))
    assert (report.refuted, report.unverifiable) == (0, 0), report


async def test_slots_are_attested_under_traffic_and_disturb_nothing(
    server: Server, base: Path, pair: list[Manifest]
) -> None:
    async with generator_of(server) as generator:
        await swap(generator, pair[0])
        traffic = Traffic(generator, "pair", 3_000)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            while not traffic.done:
                assert set((await generator.attest()).values()) == {None}
                await asyncio.sleep(0.2)
        assert (await generator.state()).quarantine is None
    report = audit(trajectories_of(traffic.turns, fingerprint(base).digest), server.store, Scorer(base, server.store))
    assert (report.refuted, report.unverifiable) == (0, 0), report


async def test_a_canary_matches_what_is_served_and_nothing_else(
    server: Server, base: Path, pair: list[Manifest]
) -> None:
    canary = make_canary(base, 1)
    async with generator_of(server) as generator:
        await swap(generator, pair[0])
        scores = await generator.score("pair", canary.sequences)
        right = judge(canary, "pair", 1, scores.adapter, scores.base, "float32")
        assert right.verdict == "match", right
        assert right.error < 1e-4 < 0.1 < right.effect, right
        # A publication that was withheld: version 1 is announced, and the slot still holds version 2.
        await swap(generator, pair[1])
        scores = await generator.score("pair", canary.sequences)
        assert judge(canary, "pair", 1, scores.adapter, scores.base, "float32").verdict == "mismatch"
        # The base answers for the adapter.
        assert judge(canary, "pair", 1, scores.base, scores.base, "float32").verdict == "mismatch"


async def test_a_first_swap_that_fails_leaves_the_policy_unserved(server: Server, misfit: Manifest) -> None:
    async with generator_of(server) as generator:
        with pytest.raises(SwapFailed):
            await swap(generator, misfit)
        assert "misfit" not in (await generator.state()).residency.serves
        with pytest.raises(GeneratorError, match="no policy 'misfit'"):
            await generator.sample("misfit", PROMPT, SAMPLING, [END])


async def test_a_digest_that_is_not_in_the_store_is_refused_and_nothing_pauses(
    server: Server, pair: list[Manifest]
) -> None:
    async with generator_of(server) as generator:
        before = await swap(generator, pair[0])
        with pytest.raises(SwapFailed, match="not in"):
            await swap(generator, _renamed(pair[0], "pair", digest="sha256:" + "0" * 64))
        assert (await generator.state()).residency == before


async def test_a_swap_for_another_epoch_or_instance_is_refused(server: Server, pair: list[Manifest]) -> None:
    async with generator_of(server) as generator:
        now = await swap(generator, pair[0])
        again = await swap(generator, pair[0])
        assert again == now  # asking for what is served does nothing
        await swap(generator, pair[1])
        with pytest.raises(Moved):
            await generator.swap(pair[0], now)


async def test_the_base_never_answers_for_a_policy(server: Server, pair: list[Manifest]) -> None:
    async with generator_of(server) as generator:
        await swap(generator, pair[0])
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as public:
        for model in (None, "base", "unknown", server.settings.model.path, 7, {"name": "pair"}):
            reply = await public.post(GENERATE, json={**body, "model": model})
            assert reply.status_code in (400, 404), (model, reply.text)
        assert (await public.post(GENERATE, json=body)).status_code == 400
        assert (await public.post(GENERATE, json={**body, "model": "pair"})).status_code == 200


# In a process of its own: vLLM's development routes are decided by its environment when it is imported.
ROUTES = """
import json
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

arguments = ["--enable-scale-out", "--enable-lora"]
app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments), ("generate",))
routes = [route for route in app.routes if hasattr(route, "path")]
print(json.dumps([(method, r.path) for r in routes for method in getattr(r, "methods", None) or ["GET"]]))
"""


@pytest.fixture(scope="module")
def vllm_routes() -> list[tuple[str, str]]:
    """Every route that this vLLM can have, development ones included: (method, path)."""
    everything_on = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-c", ROUTES], env=os.environ | everything_on, capture_output=True, text=True, check=True
    )
    return [(method, path) for method, path in json.loads(done.stdout.splitlines()[-1])]


def test_the_public_door_lets_generation_through_and_nothing_else(
    server: Server, vllm_routes: list[tuple[str, str]]
) -> None:
    assert ("POST", "/v1/load_lora_adapter") in vllm_routes  # the list is of what could be open
    answered = set()
    for method, path in [
        *vllm_routes,
        ("GET", "/readyz"),
        ("POST", "/swap"),
        ("GET", "/state"),
        ("GET", "/residency"),
        ("GET", "/"),
    ]:
        reply = httpx.request(method, server.url + path.replace("{", "").replace("}", ""))
        if reply.status_code != 403:
            answered.add((method, path))
    assert answered == {("GET", "/health"), ("GET", "/readyz"), ("POST", GENERATE)}


@pytest.mark.parametrize("path", ["/health", GENERATE, "/v1/models", "/"])
def test_no_preflight_is_answered_in_front_of_the_public_door(path: str, server: Server) -> None:
    preflight = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    assert httpx.options(server.url + path, headers=preflight).status_code == 403


@pytest.mark.parametrize("token", ["", "wrong", "Bearer"])
def test_the_control_door_answers_nobody_without_the_token(server: Server, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for method, path in [
        ("GET", "/state"), ("GET", "/residency"), ("POST", "/swap"), ("POST", "/attest"), ("POST", "/score"),
        ("POST", "/judged"), ("POST", "/restarts"), ("GET", "/metrics"), ("GET", "/nothing"),
    ]:  # fmt: skip
        assert httpx.request(method, server.control + path, headers=headers).status_code == 401


def test_the_control_door_loads_by_digest_only(server: Server) -> None:
    headers = {"Authorization": f"Bearer {server.token}"}
    state = httpx.get(server.control + "/state", headers=headers).json()["residency"]
    asked = {"policy": "x", "version": 1, "instance": state["instance"], "epoch": state["epoch"]}
    for wrong in ({"path": "/tmp"}, {"digest": "/etc"}, {"digest": "../../adapters"}):
        reply = httpx.post(server.control + "/swap", headers=headers, json={**asked, **wrong})
        assert 400 <= reply.status_code < 500, reply.text
    assert httpx.post(server.control + "/swap", headers=headers, content=b"x" * 70_000).status_code == 413


async def test_wrong_token_and_missing_plugin_have_a_sentence_each(server: Server) -> None:
    async with Generator(server.url, server.control, "not the control token", 1) as generator:
        with pytest.raises(TokenRefused, match="control token"):
            await generator.state()
    async with Generator(server.url, "http://127.0.0.1:9", server.token, 1) as generator:
        with pytest.raises(PluginMissing, match="control door"):
            await generator.state()


def test_the_token_is_in_no_log_and_no_command_line(server: Server) -> None:
    assert server.token not in server.log.read_text()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert server.token.encode() not in process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue


def _renamed(manifest: Manifest, policy: str, **changes: object) -> Manifest:
    return msgspec.structs.replace(manifest, policy=policy, **changes)
