"""Law 9 on the real engine: what answers whom, at which of the two doors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from lorabridge.bridge.errors import PluginMissing, TokenRefused
from lorabridge.bridge.sections import GeneratorsSection, ModelSection, PolicySection, RunSection
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.stream.embedded import free_port
from lorabridge.bridge.token import ensure_token
from lorabridge.bridge.toml import to_toml
from lorabridge.rollout.generator import Generator
from lorabridge.rollout.serve import vllm_command
from lorabridge.rollout.wire import GENERATE
from tests.e2e.models import RANK
from tests.e2e.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

OPENERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}

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
    everything_on = os.environ | OPENERS | {"VLLM_PLUGINS": ""}
    done = subprocess.run([sys.executable, "-c", ROUTES], env=everything_on, capture_output=True, text=True, check=True)
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


def test_a_server_that_was_told_to_open_other_doors_never_answers_at_any(
    base: Path, vllm_routes: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Booted by hand, since ``lorabridge serve`` says no for the user; it ends before its ports listen."""
    settings = Settings(
        run=RunSection(id="opened", dir=tmp_path),
        model=ModelSection(path=str(base)),
        policy=PolicySection(name="pair", rank=RANK),
        generators=GeneratorsSection(port=free_port(), control_port=free_port(), max_model_len=128, threads=1),
    )
    ensure_token(settings)
    file, log = tmp_path / "config.toml", tmp_path / "serve.log"
    file.write_text(to_toml(settings))
    command = vllm_command(settings, base, file, (), on_cpu=True)
    server = Server(settings, log)
    asked = [(server.url, path) for _, path in vllm_routes if "{" not in path] + [(server.control, "/state")]
    with log.open("wb") as output:
        opened = os.environ | command.environment | OPENERS
        process = subprocess.Popen(list(command.arguments), stdout=output, stderr=output, env=opened)
        try:
            while process.poll() is None:
                for door, path in asked:
                    with pytest.raises(httpx.ConnectError):
                        httpx.get(door + path, timeout=5)
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
    assert process.returncode not in (0, -9)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING is on, which opens doors that need no token" in log.read_text()


@pytest.mark.parametrize("path", ["/health", GENERATE, "/v1/models", "/"])
def test_no_preflight_is_answered_in_front_of_the_public_door(path: str, server: Server) -> None:
    preflight = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    assert httpx.options(server.url + path, headers=preflight).status_code == 403


@pytest.mark.parametrize("token", ["", "wrong", "Bearer"])
def test_the_control_door_answers_nobody_without_the_token(server: Server, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for method, path in [
        ("GET", "/state"), ("GET", "/residency"), ("POST", "/swap"), ("POST", "/attest"), ("POST", "/score"),
        ("POST", "/judged"), ("POST", "/restarts"), ("POST", "/drain"), ("GET", "/metrics"), ("GET", "/nothing"),
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
