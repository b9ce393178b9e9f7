"""``/livez`` and ``/readyz`` of a process, for whoever supervises it.

The names and the meaning are Kubernetes': a process that is not live should be started again, one that is not ready
should be left alone until it is. 200 or 503, and a line that says why.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from lorabridge.bridge.errors import PortTaken

_CLIENT_S = 5.0  # how long a client may take to ask


class Status:
    """What a process says of itself. Any thread may tell it and ask it.

    Args:
        beats_s: it is live while the last ``beat`` is not older than that, seconds. None: while it answers.
        clock: seconds, monotonic.
    """

    def __init__(self, beats_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._beats_s, self._clock = beats_s, clock
        self._beaten = clock()
        self._waits_for = "its start"

    def beat(self) -> None:
        """It still turns."""
        self._beaten = self._clock()

    def ready(self, waits_for: str = "") -> None:
        """It does its work, or cannot yet because of what it ``waits_for``."""
        self._waits_for = waits_for

    def answer(self, path: str) -> tuple[int, str]:
        """The HTTP status and the line for a path."""
        if path == "/readyz":
            return (503, f"waits for {self._waits_for}") if self._waits_for else (200, "ready")
        if path != "/livez":
            return 404, "there are /livez and /readyz"
        silent_s = self._clock() - self._beaten
        if self._beats_s is not None and silent_s > self._beats_s:
            return 503, f"no sign of life for {silent_s:.0f} s"
        return 200, "live"


@contextmanager
def answering(address: str, status: Status) -> Iterator[None]:
    """Answer on ``host:port`` until the block ends; nothing does if ``address`` is empty. Raises ``PortTaken``."""
    if not address:
        yield
        return
    host, _, port = address.rpartition(":")
    try:
        server = (_V6Server if "[" in host else _Server)((host.strip("[]"), int(port)), _handler(status))
    except OSError as error:
        raise PortTaken(f"cannot listen on {address}: {error}", action="Choose another status address") from error
    thread = threading.Thread(target=server.serve_forever, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        """Without asking a name server what this host is called, as http.server's own does."""
        TCPServer.server_bind(self)


class _V6Server(_Server):
    address_family = socket.AF_INET6


def _handler(status: Status) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_S

        def do_GET(self) -> None:
            code, line = status.answer(self.path)
            body = f"{line}\n".encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A supervisor asks every few seconds."""

    return Handler
