"""Connecting by URL, with patience: a server that goes away for a while is waited for, one that refuses is not."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import DecorrelatedJitterBackoff, NoBackoff
from redis.connection import parse_url
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from lorabridge.bridge.errors import ConfigError, StreamError, StreamRefused, StreamUnreachable
from lorabridge.bridge.sections import RedisSection

_CAP_S, _BASE_S = 1.0, 0.05
_CONNECT_S = 5.0
# A server that says nothing for so long is lost. A blocking read must therefore block for less.
ANSWER_S = 30.0
_PASSING = (ConnectionError, TimeoutError, BusyLoadingError)


class Patience:
    """When to give up on one call: ``outage_s`` seconds after it first failed, at once if the server refuses us.

    redis-py counts tries instead, and a call that reconnects makes as many again within each of its own.

    Args:
        stop: whether the process is to end: then at once as well.
    """

    def __init__(self, outage_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        self._outage_s, self._stop = outage_s, stop
        self._until: float | None = None

    def __call__(self, error: Exception) -> bool:
        """Whether to try again after ``error``."""
        if self._until is None:
            self._until = time.monotonic() + self._outage_s
        refused = isinstance(error, AuthenticationError)
        return not refused and not self._stop() and time.monotonic() < self._until


class _Retry(Retry):
    """redis-py's own, with patience instead of a number of tries."""

    def __init__(self, outage_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        super().__init__(DecorrelatedJitterBackoff(cap=_CAP_S, base=_BASE_S), -1, _PASSING)
        self._outage_s, self._stop = outage_s, stop

    def __deepcopy__(self, memo: dict[int, Any]) -> _Retry:
        """redis-py copies it for every connection; what ``stop`` looks at is one and the same."""
        return _Retry(self._outage_s, self._stop)

    def call_with_retry(self, do: Any, fail: Any, is_retryable: Any = None, with_failure_count: bool = False) -> Any:
        return super().call_with_retry(do, fail, Patience(self._outage_s, self._stop), with_failure_count)


class _AsyncRetry(AsyncRetry):
    """As ``_Retry``, for asyncio."""

    def __init__(self, outage_s: float, stop: Callable[[], bool]) -> None:
        super().__init__(DecorrelatedJitterBackoff(cap=_CAP_S, base=_BASE_S), -1, _PASSING)
        self._outage_s, self._stop = outage_s, stop

    def __deepcopy__(self, memo: dict[int, Any]) -> _AsyncRetry:
        """redis-py copies it for every connection; what ``stop`` looks at is one and the same."""
        return _AsyncRetry(self._outage_s, self._stop)

    async def call_with_retry(
        self, do: Any, fail: Any, is_retryable: Any = None, with_failure_count: bool = False
    ) -> Any:
        return await super().call_with_retry(do, fail, Patience(self._outage_s, self._stop), with_failure_count)


def connect(
    section: RedisSection, stop: Callable[[], bool] = lambda: False, answer_s: float = ANSWER_S
) -> redis.Redis:  # fmt: skip
    """A client that answers now, and that keeps trying for ``outage_s`` when the server is lost later.

    Args:
        section: where.
        stop: whether the process is to end: a server that is lost later is then waited for no longer.
        answer_s: a server that says nothing for so long is lost.

    Raises:
        StreamUnreachable: nothing answered within ``connect_s``.
        StreamRefused: wrong password, or no permission.
        ConfigError: not a Redis URL, or no password file.
    """
    url, password = _url_and_password(section)
    patience = min(_CONNECT_S, section.connect_s)
    first = redis.Redis.from_url(
        url, password=password, socket_connect_timeout=patience, socket_timeout=patience, retry=Retry(NoBackoff(), 0)
    )
    deadline = time.monotonic() + section.connect_s
    with errors(section):
        while True:
            try:
                first.ping()
                break
            except AuthenticationError:
                raise
            except _PASSING:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            finally:
                first.close()
    return redis.Redis.from_url(
        url, password=password, socket_connect_timeout=min(_CONNECT_S, answer_s), socket_timeout=answer_s,
        retry=_Retry(section.outage_s, stop),
    )  # fmt: skip


def connect_async(section: RedisSection, stop: Callable[[], bool] = lambda: False) -> redis.asyncio.Redis:
    """As ``connect``, for asyncio. Connect with ``connect`` first to learn whether the server answers.

    Args:
        section: where.
        stop: whether the process is to end: a server that is away is then waited for no longer.
    """
    url, password = _url_and_password(section)
    return redis.asyncio.Redis.from_url(
        url, password=password, socket_connect_timeout=_CONNECT_S, socket_timeout=ANSWER_S,
        retry=_AsyncRetry(section.outage_s, stop),
    )  # fmt: skip


@contextmanager
def errors(section: RedisSection) -> Iterator[None]:
    """Turn redis-py's errors into ours, naming the server but never its password."""
    where = redacted(section.url)
    try:
        yield
    except AuthenticationError as error:
        raise StreamRefused(
            f"{where} refused the password: {error}",
            action="Set LORABRIDGE_REDIS_PASSWORD, or [redis] password_file",
        ) from error
    except _PASSING as error:
        raise StreamUnreachable(
            f"{where} does not answer: {error}", action="Start Redis or Valkey there, or correct [redis] url"
        ) from error
    except ResponseError as error:
        raise StreamRefused(f"{where} refused a command: {error}", action="Check its version and ACL") from error
    except RedisError as error:
        raise StreamError(f"{where}: {error}", action="See the server's log") from error


def redacted(url: str) -> str:
    """A Redis URL without its password, even if it is not quite a URL."""
    url = re.sub(r"(?i)(password=)[^&]*", r"\1***", url)
    start = url.index("://") + 3 if "://" in url else 0
    before, at, place = url[start:].rpartition("@")
    user, colon, _ = before.partition(":")
    return f"{url[:start]}{user}{':***' if colon else ''}{at}{place}"


def now_ms(client: redis.Redis) -> int:
    """Milliseconds since 1970 on the server's clock: the one clock of a run."""
    seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def clock_offset_ms(server_ms: int, local_s: float) -> int:
    """What to add to this machine's clock (``time.time()``, seconds) to get the server's, in milliseconds."""
    return server_ms - round(local_s * 1000)


def _url_and_password(section: RedisSection) -> tuple[str, str | None]:
    try:
        parts: dict[str, Any] = parse_url(section.url)  # type: ignore[no-untyped-call]
    except ValueError as error:  # its text may quote a part of the password
        raise ConfigError(
            f"[redis] url {redacted(section.url)!r} is not a Redis URL",
            action="Give redis://, rediss:// or unix://; in a password, %2F stands for /, %3F for ? and %23 for #",
        ) from error
    if parts.get("password") is not None:
        return section.url, None
    if password := os.environ.get("LORABRIDGE_REDIS_PASSWORD"):
        return section.url, password
    if section.password_file is None:
        return section.url, None
    try:
        return section.url, section.password_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[redis] password_file: {error}", action="Check the path and its permissions") from error
