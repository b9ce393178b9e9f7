"""The demo: ``up`` with a task, a base model, a Redis, ports and a folder of its own, so that it needs nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from rich.console import Console

import lorabridge.bridge
from lorabridge.bridge.errors import ConfigError, MachineError
from lorabridge.bridge.run import valkey
from lorabridge.bridge.run.processes import died, last_words
from lorabridge.bridge.run.summary import Summary
from lorabridge.bridge.run.supervisor import Supervisor, with_values
from lorabridge.bridge.run.up import PASSWORD, check_installed, loop, resolved, supervised
from lorabridge.bridge.run_record import environment_digest
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.settings import Settings, load
from lorabridge.bridge.stream.embedded import free_ports

_BASE = "lorabridge.rollout.tasks.sort_base"
_BASE_IS_MADE_OF = (_BASE, "lorabridge.rollout.tasks.sort")


def demo(overrides: Sequence[str], console: Console) -> tuple[Summary, Path]:
    """Run the demo; the summary, and the run's folder.

    Args:
        overrides: ``section.key=value``, on top of ``configs/demo.toml``.
        console: where the panel is.

    Raises:
        ConfigError: an override is wrong, or a package that it needs is not installed.
        MachineError: no folder can be made here, or a process died.
        KeyboardInterrupt: Ctrl-C; everything has been stopped.
    """
    settings = load(configuration(), overrides)
    settings = fitted(settings, cores(), free_ports(2 * settings.generators.count))
    check_installed(serves=True)
    settings = resolved(reserve(settings))
    os.environ.pop(PASSWORD, None)  # of some other Redis: it would win over the file of the embedded one
    with supervised(settings, console) as supervisor:
        model = settings.model.path or str(make_base(supervisor))
        supervisor.settings = with_values(settings, "model", path=model)
        redis = start_redis(supervisor)
        supervisor.settings = supervisor.settings.model_copy(update={"redis": redis})
        return loop(supervisor), settings.run.dir


def configuration() -> Path:
    """``configs/demo.toml``, which is beside ``bridge`` in a checkout as in an installed package."""
    return Path(lorabridge.bridge.__file__).parent.parent / "configs" / "demo.toml"


def reserve(settings: Settings) -> Settings:
    """Make the run's folder, and be the only one to have made it: ``runs/demo``, ``runs/demo-2``, and so on.

    Raises:
        MachineError: it cannot be made.
    """
    wanted, id = settings.run.dir, settings.run.id
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            suffix = "" if number == 1 else f"-{number}"
            folder = wanted.with_name(wanted.name + suffix)
            if _is_ours(folder):
                return with_values(settings, "run", id=id + suffix, dir=folder)
    except OSError as error:
        raise MachineError(
            f"cannot make {wanted}: {error.strerror}", action="Run it in a folder that you can write to"
        ) from error
    raise AssertionError("unreachable")


def _is_ours(folder: Path) -> bool:
    """Make it; whether nobody else has."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def fitted(settings: Settings, cores: int, port: int) -> Settings:
    """``settings`` for a machine with ``cores``: what nobody has chosen is chosen here.

    The trainer and the servers work at the same time, so the trainer gets half of the cores and the servers share the
    other; more threads than cores make both many times slower.

    Args:
        settings: of the demo.
        cores: of this machine.
        port: the first of as many free ones as the servers have doors.
    """
    if settings.generators.urls:
        raise ConfigError("the demo starts its own server", action="Use `lorabridge up` to attach to generators")
    chosen = settings.generators.model_fields_set
    half = max(1, cores // 2)
    return with_values(
        with_values(settings, "trainer", threads=settings.trainer.threads or half),
        "generators",
        threads=settings.generators.threads or max(1, half // settings.generators.count),
        port=settings.generators.port if "port" in chosen else port,
        control_port=settings.generators.control_port if "control_port" in chosen else port + 1,
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def base_folder(environ: Mapping[str, str]) -> Path:
    """Where the base model is kept between demos; another recipe is another folder."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    recipe = hashlib.sha256("".join(environment_digest(module) for module in _BASE_IS_MADE_OF).encode()).hexdigest()
    return cache / "lorabridge" / f"sort-{recipe[:12]}"


def make_base(supervisor: Supervisor) -> Path:
    """The base model's folder, made if it is not there yet. It appears there whole.

    Raises:
        ProcessDied: it could not be made.
    """
    folder = base_folder(os.environ)
    made = folder / "config.json"
    if made.is_file():
        return folder
    # Whoever comes second, of two demos that make it at once, ends with 1 and finds it there.
    child = supervisor.start("base", _BASE, str(folder), ends_with=(0, 1))
    what = "the base model to be made, once, in about 75 s"
    supervisor.attend(lambda: child.code is not None, lambda: f"{what}: {last_words(child.output()) or 'starting'}")
    if not made.is_file():
        raise died(child)
    return folder


def start_redis(supervisor: Supervisor) -> RedisSection:
    """An embedded Valkey with its data in the run's folder; how to reach it.

    Raises:
        ProcessDied: it did not start.
    """
    folder = supervisor.settings.run.dir / "valkey"
    supervisor.start("valkey", "lorabridge.bridge.run.valkey", str(folder))
    supervisor.attend(lambda: valkey.section(folder) is not None, "the embedded Valkey to answer")
    section = valkey.section(folder)
    assert section is not None
    return section
