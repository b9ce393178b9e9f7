"""A whole run on one machine: every process started, the training awaited, the ledger closed, the audit read.

serve, archiver, train, worker --(train ends)--> worker, archiver, serve stop --> audit --> summary, pictures
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import msgspec
from rich.console import Console

from lorabridge.bridge.errors import ConfigError, GeneratorUnreachable, MachineError
from lorabridge.bridge.replay.verdict import Audit
from lorabridge.bridge.run.feed import Feed
from lorabridge.bridge.run.interrupts import Interrupts
from lorabridge.bridge.run.panel import Display
from lorabridge.bridge.run.pictures import draw
from lorabridge.bridge.run.processes import Child, died
from lorabridge.bridge.run.summary import Summary, consumed, summarise
from lorabridge.bridge.run.supervisor import Supervisor, with_values
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.token import ensure_token
from lorabridge.bridge.toml import to_toml

PASSWORD = "LORABRIDGE_REDIS_PASSWORD"
_CLI = "lorabridge.bridge.cli"
_PACKAGES = ("trl", "torch", "peft", "transformers", "aiohttp", "matplotlib")
_DRAIN_S, _FLUSH_S, _END_S = 30.0, 60.0, 15.0


def up(settings: Settings, console: Console) -> tuple[Summary, Path]:
    """Run everything that ``settings`` describe, on the Redis that they name; the summary, and the run's folder.

    Raises:
        ConfigError: a package that a process of the run needs is not installed, or the folder holds a finished run.
        StreamError: that Redis cannot be used.
        MachineError: another supervisor holds the run's folder, it cannot be written, or a process died.
        KeyboardInterrupt: Ctrl-C; everything has been stopped.
    """
    settings = resolved(settings)
    check_new(settings.run.dir)
    check_installed(not settings.generators.urls)
    connect(settings.redis).close()
    _make(settings.run.dir)
    with supervised(settings, console) as supervisor:
        return loop(supervisor), settings.run.dir


@contextmanager
def supervised(settings: Settings, console: Console) -> Iterator[Supervisor]:
    """The only supervisor of a run's folder; at the end of the block nothing it started is left."""
    interrupts, display = Interrupts(), Display(console)
    with _alone(settings.run.dir), interrupts, display, Supervisor(settings, display, interrupts) as supervisor:
        yield supervisor


def loop(supervisor: Supervisor) -> Summary:
    """Train, wind down, audit and sum up. The supervisor's settings name a Redis that answers."""
    settings = supervisor.settings
    write_configuration(settings)
    config = ("--config", str(settings.run.dir / "config.toml"))
    servers = [] if settings.generators.urls else _serve(supervisor, config)
    archiver = supervisor.start("archiver", _CLI, "archiver", *config)
    train = supervisor.start("train", _CLI, "train", *config, ends_with=(0,))
    worker = supervisor.start("worker", _CLI, "worker", *config)
    with Feed(settings) as feed:
        supervisor.feed = feed
        start_s = settings.generators.start_s
        late = time.monotonic() + start_s

        def trained() -> bool:
            if servers and not feed.healthy and time.monotonic() > late:
                raise GeneratorUnreachable(f"no answer within {start_s:.0f} s", action=f"See {servers[0].log}")
            return train.code is not None

        supervisor.attend(trained)
        supervisor.finish(worker, "the worker to give back what it has begun", _DRAIN_S)
        supervisor.finish(archiver, "the archiver to write down the last of it", _FLUSH_S)
    if archiver.code != 0:
        raise died(archiver)
    for server in servers:
        supervisor.finish(server, f"{server.name} to end", _END_S)
    return _sum_up(supervisor, _audited(supervisor))


def _serve(supervisor: Supervisor, config: tuple[str, ...]) -> list[Child]:
    """Start the servers that the configuration asks for, each with doors of its own."""
    own = supervisor.settings.generators
    servers = []
    for place in range(own.count):
        url, control = own.doors(place)
        doors = [f"generators.port={urlsplit(url).port}"]
        doors.append(
            f"generators.control_host={control}"
            if control.startswith("unix:")
            else f"generators.control_port={urlsplit(control).port}"
        )
        name = "serve" if own.count == 1 else f"serve-{place + 1}"
        changes = [part for change in doors for part in ("--set", change)]
        servers.append(supervisor.start(name, _CLI, "serve", *config, *changes))
    return servers


def _audited(supervisor: Supervisor) -> Audit:
    """The audit's answer: in a process of its own, as its packages and its memory are no business of this one."""
    arguments = ("audit", "--run", str(supervisor.settings.run.dir), "--json")
    child = supervisor.start("audit", _CLI, *arguments, ends_with=(0, 1))
    supervisor.attend(lambda: child.code is not None, "the audit, which recomputes every token")
    return read_audit(child)


def read_audit(child: Child) -> Audit:
    """The answer in the output of an audit that has ended. Raises ``ProcessDied`` if there is none."""
    for line in reversed(child.output().splitlines()):
        try:
            return msgspec.json.decode(line, type=Audit)
        except msgspec.DecodeError:
            continue
    raise died(child)


def _sum_up(supervisor: Supervisor, audit: Audit) -> Summary:
    from lorabridge.bridge.ledger.reader import Ledger

    settings = supervisor.settings
    folder, policy = settings.run.dir, settings.policy.name
    ledger = Ledger(settings.ledger_dir)
    events = list(ledger.events())
    summary = summarise(
        run=settings.run.id,
        policy=policy,
        manifests=ledger.manifests(),
        events=events,
        trajectories=ledger.trajectories(),
        audit=audit,
        wall_s=round(supervisor.elapsed_s, 1),
    )
    draw([step for _, step in consumed(events, policy)], settings.run.id, folder)
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return summary


def check_new(folder: Path) -> None:
    """Two runs in one folder would be summed up as one. Raises ``ConfigError`` if it holds a finished run."""
    if (folder / "summary.json").exists():
        raise ConfigError(
            f"{folder} holds a finished run", action="Give another [run] id and dir, or move that folder away"
        )


def check_installed(serves: bool) -> None:
    """Find out now what a process would find out minutes later. ``serves``: a vLLM server is to be started.

    Raises:
        ConfigError: a package is not installed.
    """
    needed = (*_PACKAGES, "vllm") if serves else _PACKAGES
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"a whole run on this machine needs {', '.join(missing)}, not installed here",
            action="pip install 'lorabridge[trainer,rollout,audit]' and vLLM, or start each process where it can run",
        )


def resolved(settings: Settings) -> Settings:
    """``settings`` that mean the same from any folder, and hold no password: that moves to the environment."""
    redis, generators = settings.redis, settings.generators
    url, password = without_password(redis.url)
    if password is not None:
        os.environ[PASSWORD] = password
        settings = with_values(settings, "redis", url=url)
    settings = with_values(settings, "run", dir=settings.run.dir.absolute())
    settings = with_values(settings, "ledger", dir=settings.ledger_dir.absolute())
    settings = with_values(settings, "redis", password_file=_absolute(redis.password_file))
    settings = with_values(settings, "generators", token_file=_absolute(generators.token_file))
    if "://" not in settings.store.url:
        settings = with_values(settings, "store", url=str(Path(settings.store_url).absolute()))
    if settings.model.path and Path(settings.model.path).is_dir():
        settings = with_values(settings, "model", path=str(Path(settings.model.path).absolute()))
    return settings


def without_password(url: str) -> tuple[str, str | None]:
    """A Redis URL without its password, and the password: the user's, or else the query's, as in redis-py."""
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    given = [value for name, value in query if name == "password"]
    password = unquote(parts.password) if parts.password is not None else (given[0] if given else None)
    host = parts.netloc.rpartition("@")[2]
    netloc = f"{parts.username}@{host}" if parts.username else host
    kept = urlencode([(name, value) for name, value in query if name != "password"])
    return urlunsplit(parts._replace(netloc=netloc, query=kept)), password


def write_configuration(settings: Settings) -> None:
    """Leave the resolved ``config.toml``, and a control token if servers of ours need one (owner-readable only)."""
    (settings.run.dir / "config.toml").write_text(to_toml(settings))
    if not settings.generators.urls:
        ensure_token(settings)


def _absolute(path: Path | None) -> Path | None:
    return path.absolute() if path else None


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"cannot make {folder}: {error.strerror}", action="Give another [run] dir") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the run's folder; the system lets go of it when this process ends, however it ends."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MachineError(
                f"another lorabridge runs in {folder}", action="Stop that one, or give another [run] id and dir"
            ) from error
        yield
