"""The Valkey of our own: closed to others, and with the same data when it is started again."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest
import redis

from lorabridge.bridge.errors import ConfigError, PortTaken
from lorabridge.bridge.stream import embedded
from lorabridge.bridge.stream.connection import connect
from lorabridge.bridge.stream.embedded import embedded_valkey, free_port


def test_a_server_started_again_on_the_same_folder_has_the_same_data_and_password(tmp_path: Path) -> None:
    with embedded_valkey(tmp_path / "valkey") as section, connect(section) as client:
        client.set("key", "value")
        password = (tmp_path / "valkey" / "password").read_text()
    with embedded_valkey(tmp_path / "valkey") as section, connect(section) as client:
        assert client.get("key") == b"value"
        assert (tmp_path / "valkey" / "password").read_text() == password


def test_the_password_is_for_the_owner_only_and_stands_nowhere_else(tmp_path: Path) -> None:
    with embedded_valkey(tmp_path / "valkey") as section:
        assert section.password_file is not None
        password = section.password_file.read_text()
        assert len(password) > 30
        assert stat.S_IMODE(section.password_file.stat().st_mode) == 0o600
        assert password not in repr(section)
        for file in (tmp_path / "valkey").rglob("*"):
            if file.is_file() and file != section.password_file:
                assert password.encode() not in file.read_bytes()
        with connect(section) as client:
            pid = int(client.info("server")["process_id"])
        assert password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_without_the_password_it_answers_ping_and_nothing_else(tmp_path: Path) -> None:
    with embedded_valkey(tmp_path / "valkey") as section:
        port = int(section.url.rpartition(":")[2].partition("/")[0])
        with redis.Redis(port=port) as stranger:
            assert stranger.ping()
            for command in ("GET key", "KEYS *", "CONFIG GET dir", "SHUTDOWN", "EVAL return(1) 0", "CLIENT LIST"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    stranger.execute_command(*command.split())


def test_it_listens_on_loopback_only(tmp_path: Path) -> None:
    with embedded_valkey(tmp_path / "valkey") as section, connect(section) as client:
        assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_a_password_file_that_was_left_empty_is_filled(tmp_path: Path) -> None:
    (tmp_path / "password").touch()
    with embedded_valkey(tmp_path) as section, connect(section) as client:
        assert client.ping()
        assert (tmp_path / "password").read_text()


def test_a_port_that_is_taken_meanwhile_is_tried_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
        with embedded_valkey(tmp_path) as section, connect(section) as client:
            assert client.ping()


def test_a_server_that_does_not_start_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(embedded, "free_port", lambda: taken.getsockname()[1])
        with pytest.raises(PortTaken, match="did not start"), embedded_valkey(tmp_path):
            pass


def test_a_path_that_the_server_cannot_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot live in"), embedded_valkey(tmp_path / "my runs"):
        pass
    assert not (tmp_path / "my runs").exists()


def test_it_ends_with_the_block_even_if_it_died_before(tmp_path: Path) -> None:
    with embedded_valkey(tmp_path) as section, connect(section) as client:
        os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
    port = int(section.url.rpartition(":")[2].partition("/")[0])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_no_port_is_one_that_an_outgoing_connection_could_have_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "range"
    monkeypatch.setattr(embedded, "_OUTGOING", said)
    said.write_text("20000\t60999\n")
    assert all(15_000 <= embedded.free_ports(4) <= 20_000 - 4 for _ in range(50))
    said.write_text("1024 65535")  # every port may be one: any will do
    assert 15_000 <= embedded.free_port() < 65_536
    said.unlink()
    assert embedded.free_port() < 32_768
