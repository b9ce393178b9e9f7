"""What a process says of itself to whoever supervises it."""

from __future__ import annotations

import socket
from http.client import HTTPConnection

import pytest

from lorabridge.bridge.errors import PortTaken
from lorabridge.bridge.status import Status, answering
from lorabridge.bridge.stream.embedded import free_port


def test_it_is_ready_once_it_waits_for_nothing() -> None:
    status = Status()
    assert status.answer("/readyz") == (503, "waits for its start")
    status.ready("the trainer")
    assert status.answer("/readyz") == (503, "waits for the trainer")
    status.ready()
    assert status.answer("/readyz") == (200, "ready")
    assert status.answer("/livez") == (200, "live")
    assert status.answer("/metrics")[0] == 404


def test_it_is_live_while_it_beats() -> None:
    now = 100.0
    status = Status(30, clock=lambda: now)
    now = 130.0
    assert status.answer("/livez") == (200, "live")
    now = 131.0
    assert status.answer("/livez") == (503, "no sign of life for 31 s")
    status.beat()
    assert status.answer("/livez") == (200, "live")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_it_answers_while_the_block_lasts(host: str) -> None:
    port, status = free_port(), Status()
    with answering(f"{host}:{port}", status):
        assert _ask(host, port, "/readyz") == (503, b"waits for its start\n")
        status.ready()
        assert _ask(host, port, "/readyz") == (200, b"ready\n")
        with pytest.raises(PortTaken, match=f"{port}"), answering(f"{host}:{port}", status):
            pass
    with pytest.raises(ConnectionRefusedError):
        _ask(host, port, "/livez")


def test_a_client_that_never_asks_holds_nobody_up() -> None:
    port = free_port()
    with answering(f"127.0.0.1:{port}", Status()), socket.create_connection(("127.0.0.1", port)):
        assert _ask("127.0.0.1", port, "/livez") == (200, b"live\n")


def test_no_address_no_door() -> None:
    with answering("", Status()):
        pass


def _ask(host: str, port: int, path: str) -> tuple[int, bytes]:
    connection = HTTPConnection(host.strip("[]"), port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
