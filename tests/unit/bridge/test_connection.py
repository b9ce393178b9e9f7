"""Passwords stay out of every message; patience ends when it says."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from pathlib import Path

import pytest
import redis.asyncio.retry
import redis.retry
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    RedisError,
    TimeoutError,
)

from lorabridge.bridge.errors import ConfigError, StreamError, StreamRefused, StreamUnreachable
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.stream import connection
from lorabridge.bridge.stream.connection import Patience, connect, connect_async, errors, redacted

URLS = [
    "redis://:{}@host:6379/0", "rediss://user:{}@host/1", "redis://user:{}@[::1]:6379", "unix://user:{}@/tmp/x.sock",
    "unix:///tmp/x.sock?db=0&password={}", "unix:///tmp/x.sock?password={}&db=0", "redis://host/0?PASSWORD={}",
    "redis://:{}@host:notaport/0", "http://:{}@host", "redis://:{}@", ":{}@host", "redis://u:{}@h/0?password={}",
]  # fmt: skip
SECRET = "hunter2hunter2"


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "secret", [SECRET, f"{SECRET}/{SECRET}", f"{SECRET}@{SECRET}", f"{SECRET}?{SECRET}#{SECRET}:1"]
)
def test_a_url_is_shown_without_its_password_even_if_it_is_no_url(url: str, secret: str) -> None:
    assert SECRET not in redacted(url.format(secret, secret))


@given(st.text(min_size=1, max_size=20), st.sampled_from(URLS))
def test_no_quoted_password_is_ever_shown(secret: str, url: str) -> None:
    quoted = "s3cr3t" + urllib.parse.quote(secret.encode("utf-8", "surrogatepass"), safe="")
    assert quoted not in redacted(url.format(quoted, quoted))


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/0", "redis://user@host", "unix:///tmp/x.sock?db=1", "", "x"])
def test_a_url_without_a_password_is_shown_whole(url: str) -> None:
    assert redacted(url) == url


def test_user_host_and_database_are_still_shown() -> None:
    assert redacted("rediss://lorabridge:secret@redis.internal:6380/2") == (
        "rediss://lorabridge:***@redis.internal:6380/2"
    )


@pytest.mark.parametrize("url", [f"http://:{SECRET}@host", f"redis://:{SECRET}/x@host", f"redis://:{SECRET}@host:port"])
def test_what_is_no_redis_url_is_a_configuration_error_without_the_password(url: str) -> None:
    for start in (connect, connect_async):
        with pytest.raises(ConfigError, match="is not a Redis URL") as caught:
            start(RedisSection(url=url))
        assert SECRET not in caught.value.diagnostics()


def test_a_password_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for file in (tmp_path / "missing", tmp_path, binary):
        with pytest.raises(ConfigError, match="password_file"):
            connect(RedisSection(url="redis://127.0.0.1:1/0", password_file=file))


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (AuthenticationError("WRONGPASS"), StreamRefused),
        (NoPermissionError("NOPERM"), StreamRefused),
        (ConnectionError("refused"), StreamUnreachable),
        (TimeoutError("slow"), StreamUnreachable),
        (BusyLoadingError("loading"), StreamUnreachable),
        (RedisError("other"), StreamError),
    ],
)
def test_errors_of_the_client_become_ours_and_name_the_server_without_its_password(
    error: RedisError, ours: type[StreamError]
) -> None:
    with pytest.raises(ours) as caught, errors(RedisSection(url=f"redis://:{SECRET}@host:6379/0")):
        raise error
    assert type(caught.value) is ours
    assert "redis://:***@host:6379/0" in caught.value.problem
    assert SECRET not in caught.value.diagnostics()


def test_errors_that_are_not_the_clients_are_left_alone() -> None:
    with pytest.raises(ValueError, match="ours"), errors(RedisSection()):
        raise ValueError("ours")


class Clock:
    """Time that passes only while somebody sleeps or waits for an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(redis.retry, "sleep", self.sleep)
        monkeypatch.setattr(redis.asyncio.retry, "sleep", self.async_sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def async_sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_patience_counts_from_the_first_failure(clock: Clock) -> None:
    patience = Patience(10)
    clock.sleep(100)
    assert patience(ConnectionError())
    clock.sleep(9)
    assert patience(TimeoutError())
    clock.sleep(1)
    assert not patience(ConnectionError())


def test_a_server_that_refuses_us_is_not_waited_for(clock: Clock) -> None:
    assert not Patience(10)(AuthenticationError())


@pytest.mark.parametrize("outage_s", [1, 300, 7200])
def test_a_call_is_given_up_after_the_outage_however_often_it_fails_and_reconnects(clock: Clock, outage_s: int) -> None:
    """redis-py's own would try the connection anew, with all its tries, in each try of the command."""
    retry = connection._Retry(outage_s)

    def times_out() -> None:
        clock.sleep(1)
        raise TimeoutError("no answer")

    def command() -> None:
        retry.call_with_retry(times_out, lambda error: None)

    began = clock.now
    with pytest.raises(TimeoutError, match="no answer"):
        retry.call_with_retry(command, lambda error: None)
    assert outage_s <= clock.now - began <= 2 * outage_s + 10


@pytest.mark.parametrize("outage_s", [1, 7200])
def test_an_async_call_is_given_up_after_the_outage(clock: Clock, outage_s: int) -> None:
    retry = connection._AsyncRetry(outage_s, lambda: False)

    async def refused() -> None:
        raise ConnectionError("refused")

    async def nothing(error: Exception) -> None:
        return

    began = clock.now
    with pytest.raises(ConnectionError, match="refused"):
        asyncio.run(retry.call_with_retry(refused, nothing))
    assert outage_s <= clock.now - began <= outage_s + 4


def test_a_process_that_is_to_end_waits_no_longer(clock: Clock) -> None:
    stopping: list[bool] = []
    patience = connection.Patience(7200, lambda: bool(stopping))
    assert patience(ConnectionError())
    stopping.append(True)
    assert not patience(ConnectionError())


def test_an_outage_that_ends_is_not_noticed_by_the_caller(clock: Clock) -> None:
    answers = iter([ConnectionError(), TimeoutError(), BusyLoadingError()])

    def command() -> str:
        if error := next(answers, None):
            raise error
        return "answer"

    assert connection._Retry(300).call_with_retry(command, lambda error: None) == "answer"


def test_a_clock_offset_turns_this_machines_time_into_the_servers() -> None:
    assert connection.clock_offset_ms(1_700_000_000_500, 1_700_000_000.0) == 500
    assert connection.clock_offset_ms(1_700_000_000_000, 1_700_000_000.25) == -250
