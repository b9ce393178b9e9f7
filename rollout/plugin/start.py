"""Start the plugin inside vLLM's API server: check what it was started with, then open the control door."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.datastructures import State

from lorabridge.bridge.errors import GeneratorError, PortTaken
from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.model import model_folder
from lorabridge.bridge.sections import GeneratorsSection
from lorabridge.bridge.settings import Settings, load
from lorabridge.bridge.store import open_store
from lorabridge.bridge.token import control_token
from lorabridge.rollout.plugin.adapters import FileLog, LocalAdapters
from lorabridge.rollout.plugin.control import Control
from lorabridge.rollout.plugin.doors import control_app
from lorabridge.rollout.plugin.instance import Instance
from lorabridge.rollout.plugin.swap import Swapper
from lorabridge.rollout.plugin.vllm_engine import VllmEngine
from lorabridge.rollout.serve import FOLDER_VARIABLE, SLOTS_LEFT_EMPTY
from lorabridge.rollout.wire import UNIX, EngineFacts, name_of

CONFIG_VARIABLE = "LORABRIDGE_CONFIG"
_OPENERS = ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE")


async def start(client: Any, state: State, args: Namespace) -> None:
    """Put the ``Control`` into ``state.lorabridge`` and open its door.

    Raises:
        GeneratorError: the server was started with something that makes spans or swaps untrue.
        ConfigError: no control token, or a bad configuration.
    """
    file = os.environ.get(CONFIG_VARIABLE)
    settings = load(Path(file) if file else None)
    token = control_token(settings)
    refuse_flags(args, os.environ)
    if client.vllm_config.scheduler_config.async_scheduling:
        raise GeneratorError(
            "asynchronous scheduling is on, with which a label says what the next step has, not this one",
            action="Start it with --no-async-scheduling",
        )
    engine = VllmEngine(client, state.openai_serving_models)
    missing = await engine.missing() if settings.generators.kv == "keep" else []
    if missing:
        raise GeneratorError(
            f"this vLLM lacks {', '.join(missing)}, which kv = 'keep' needs",
            action="Start with generators.kv=recompute",
        )
    # Held by the state, so that the folder goes when the server does.
    state.lorabridge_folder = tempfile.TemporaryDirectory(prefix="lorabridge-", dir=os.environ.get(FOLDER_VARIABLE))
    control = await _control(client, args, engine, settings, Path(state.lorabridge_folder.name))
    state.lorabridge_door = _open_door(control, token, settings.generators)
    state.lorabridge = control


def refuse_flags(args: Namespace, environment: Any) -> None:
    """Refuse a server whose flags would make a span or a swap untrue. Raises ``GeneratorError``."""
    wrong = None
    if (args.api_server_count or 1) != 1:
        wrong = "--api-server-count is not 1: only one of them would learn of a swap"
    elif (getattr(args, "data_parallel_size", 1) or 1) != 1:
        wrong = "--data-parallel-size is not 1: one label cannot say what each of several engines serves"
    elif not args.enable_lora:
        wrong = "--enable-lora is missing"
    elif not args.enable_scale_out:
        wrong = "--enable-scale-out is missing, and with it the route that reports spans"
    elif "Attest" not in (args.worker_extension_cls or ""):
        wrong = "--worker-extension-cls lorabridge.rollout.plugin.attest.Attest is missing"
    elif on := [name for name in _OPENERS if environment.get(name, "").strip().lower() not in ("", "0", "false")]:
        wrong = f"{on[0]} is on, which opens doors that need no token"
    if wrong:
        raise GeneratorError(wrong, action="Start it with `lorabridge serve`, or as `lorabridge serve --print` says")


def usable_slots(max_loras: int, *, on_cpu: bool) -> int:
    """How many adapters may be in at once, so that the base is the base. Raises ``GeneratorError`` if none may."""
    slots = max_loras - (SLOTS_LEFT_EMPTY if on_cpu else 0)
    if slots < 1:
        raise GeneratorError(
            f"--max-loras is {max_loras}, and on a CPU the last slot must stay empty", action="Start it with 2 or more"
        )
    return slots


async def _control(client: Any, args: Namespace, engine: VllmEngine, settings: Settings, folder: Path) -> Control:
    config = client.vllm_config
    name = secrets.token_hex(4)
    log = FileLog(settings.run.dir / "residency" / f"{name}.jsonl")
    store = open_store(settings.store_url, settings.store.max_adapter_bytes)
    own = settings.generators
    slots = usable_slots(config.lora_config.max_loras, on_cpu=config.device_config.device_type == "cpu")
    instance = Instance(
        engine, LocalAdapters(store, folder), log, generator=name_of(_url(args), socket.gethostname()), name=name,
        kv=own.kv, slots=slots,
    )  # fmt: skip
    await instance.begin()
    swapper = Swapper(instance, kv=own.kv, mode=own.swap)
    folder_of_model = model_folder(config.model_config.model, config.model_config.revision, download=False)
    facts = EngineFacts(
        base=await asyncio.to_thread(fingerprint, folder_of_model),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        logprobs_mode=str(config.model_config.logprobs_mode),
        max_lora_rank=config.lora_config.max_lora_rank,
        max_loras=slots,
        max_model_len=config.model_config.max_model_len,
        kv_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
    )
    running = client.output_processor.request_states
    return Control(swapper, log, facts, running=lambda: len(running), restarts=engine.restarts)


def _url(args: Namespace) -> str:
    """Its public door. vLLM without a ``--host`` listens on every address."""
    host = args.host or "0.0.0.0"
    return f"http://[{host}]:{args.port}" if ":" in host else f"http://{host}:{args.port}"


class ControlServer(uvicorn.Server):
    """A second server in vLLM's own event loop; signals stay with vLLM."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _open_door(control: Control, token: str, section: GeneratorsSection) -> asyncio.Task[None]:
    """Serve the control door for as long as the returned task is held."""
    config = uvicorn.Config(control_app(control, token), log_level="warning", lifespan="off")
    return asyncio.create_task(ControlServer(config).serve(sockets=[_listen(section)]))


def _listen(section: GeneratorsSection) -> socket.socket:
    """A bound socket for the control door: a Unix socket for its owner only, or TCP."""
    if section.control_host.startswith(UNIX):
        path = Path(section.control_host.removeprefix(UNIX))
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o600)
        return listener
    try:
        return socket.create_server((section.control_host, section.control_port))
    except OSError as error:
        raise PortTaken(
            f"cannot listen on {section.control_host}:{section.control_port}: {error}",
            action="Choose another [generators] control_port",
        ) from error
