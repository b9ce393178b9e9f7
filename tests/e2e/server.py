"""One real vLLM server with our plugin, as a process of its own group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.toml import to_toml

_START_S = 400


class Server:
    """How to reach it: public URL, control URL, control token, and the store it fetches from."""

    def __init__(self, settings: Settings, log: Path) -> None:
        own = settings.generators
        self.settings, self.log = settings, log
        self.url, self.control = f"http://{own.host}:{own.port}", f"http://{own.control_host}:{own.control_port}"

    @property
    def token(self) -> str:
        return self.settings.token_file.read_text()

    @property
    def store(self) -> Store:
        return open_store(self.settings.store_url)


@contextmanager
def running(settings: Settings, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """``lorabridge serve`` until the block ends."""
    folder = settings.run.dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(to_toml(settings))
    server = Server(settings, folder / "serve.log")
    arguments = [sys.executable, "-m", "lorabridge.bridge.cli", "serve", "--config", str(folder / "config.toml")]
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            arguments, stdout=log, stderr=log, process_group=0, env={**os.environ, **(environment or {})}
        )
    try:
        _wait(server, process)
        yield server
    finally:
        died = process.poll()
        _end(process)
        if died is not None:
            print(f"the server died with {died}:\n{server.log.read_text()[-8000:]}", file=sys.stderr)


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the server died with {process.returncode}:\n{server.log.read_text()[-4000:]}")
        try:
            if httpx.get(server.url + "/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"the server did not come up:\n{server.log.read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to the process group that we started."""
    for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
