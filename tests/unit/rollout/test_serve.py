"""The vLLM command: what must be in it, and what must not."""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path

import pytest

from lorabridge.bridge.errors import GeneratorError, PortTaken
from lorabridge.bridge.sections import GeneratorsSection
from lorabridge.bridge.settings import load
from lorabridge.rollout.plugin.start import refuse_flags, usable_slots
from lorabridge.rollout.serve import (
    ATTEST,
    FOLDER_VARIABLE,
    Command,
    check_doors,
    in_folder,
    vllm_command,
    with_environment,
)


def command(*overrides: str, on_cpu: bool = True) -> Command:
    return vllm_command(load(None, overrides), Path("/models/base"), Path("run.toml"), overrides, on_cpu)


def flag(given: Command, name: str) -> str:
    return given.arguments[given.arguments.index(name) + 1]


def test_the_command_has_what_spans_and_swaps_need() -> None:
    given = command("policy.rank=12", "generators.max_loras=3")
    assert flag(given, "--max-lora-rank") == "16"
    assert flag(given, "--max-loras") == "4"  # on a CPU one stays empty
    assert flag(command("generators.max_loras=3", on_cpu=False), "--max-loras") == "3"
    assert flag(given, "--logprobs-mode") == "processed_logprobs"
    assert flag(given, "--generation-config") == "vllm"
    assert flag(given, "--api-server-count") == "1"
    assert flag(given, "--worker-extension-cls") == ATTEST
    assert {"--enable-lora", "--enable-scale-out", "--enforce-eager"} <= set(given.arguments)
    assert "--enforce-eager" not in command(on_cpu=False).arguments


def test_a_door_that_the_shell_left_open_is_closed() -> None:
    inherited = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1", "PATH": "/bin"}
    environment = with_environment(command(), inherited)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert environment["VLLM_SERVER_DEV_MODE"] == "0"
    assert environment["PATH"] == "/bin"


def test_its_files_are_in_the_folder_that_goes_with_it() -> None:
    given = in_folder(command(), "/tmp/gone-later")
    assert given.arguments == command().arguments
    assert command().environment.items() < given.environment.items()
    assert given.environment[FOLDER_VARIABLE] == given.environment["VLLM_RPC_BASE_PATH"] == "/tmp/gone-later"


def test_overrides_reach_the_plugin_through_its_environment() -> None:
    given = command("generators.kv=recompute", "generators.urls=['http://a']")
    assert given.environment["LORABRIDGE_GENERATORS__KV"] == "recompute"
    assert given.environment["LORABRIDGE_GENERATORS__URLS"] == '["http://a"]'


def test_the_shell_form_is_the_whole_command() -> None:
    import shlex

    given = command("run.id=x")
    words = shlex.split(given.shell().replace("\\\n", " "))
    assert words == [f"{k}={v}" for k, v in given.environment.items()] + list(given.arguments)


GOOD = {"api_server_count": 1, "enable_lora": True, "enable_scale_out": True, "worker_extension_cls": ATTEST}


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        ({"api_server_count": 2}, {}, "--api-server-count"),
        ({"data_parallel_size": 2}, {}, "--data-parallel-size"),
        ({"enable_lora": False}, {}, "--enable-lora"),
        ({"enable_scale_out": False}, {}, "--enable-scale-out"),
        ({"worker_extension_cls": ""}, {}, "--worker-extension-cls"),
        ({}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": " True "}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({}, {"VLLM_SERVER_DEV_MODE": "true"}, "VLLM_SERVER_DEV_MODE"),
        ({}, {"VLLM_SERVER_DEV_MODE": "2"}, "VLLM_SERVER_DEV_MODE"),  # any number but 0, to vLLM
    ],
)
def test_a_server_started_otherwise_is_refused_at_start(
    flags: dict[str, object], environment: dict[str, str], named: str
) -> None:
    off = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0", "VLLM_SERVER_DEV_MODE": "0"}
    refuse_flags(Namespace(**GOOD), {})
    refuse_flags(Namespace(**GOOD), off)
    with pytest.raises(GeneratorError, match=named):
        refuse_flags(Namespace(**{**GOOD, **flags}), environment)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_is_named_before_anything_is_loaded(host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=f"{host}:{port}"):
            check_doors(GeneratorsSection(host=host, port=port, control_host="unix:/nowhere"))
    check_doors(GeneratorsSection(host=host, port=port, control_host="unix:/nowhere"))


def test_on_a_cpu_the_last_slot_stays_empty() -> None:
    assert usable_slots(3, on_cpu=True) == 2
    assert usable_slots(1, on_cpu=False) == 1
    with pytest.raises(GeneratorError, match="last slot"):
        usable_slots(1, on_cpu=True)
