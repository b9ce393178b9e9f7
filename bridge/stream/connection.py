"""Connecting by URL, with patience: a server that goes away for a while is waited for, one that refuses is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
from lorabridge.bridge.errors import ConfigError, StreamError, StreamRefused, StreamUnreachable
from lorabridge.bridge.settings import RedisSection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

_CAP_S, _BASE_S = 1.0, 0.05
_PASSING = (ConnectionError, TimeoutError, BusyLoadingError)


def connect(section: RedisSection) -> redis.Redis:
    """A client that answers now, and that keeps trying for ``outage_s`` when the server is lost later.

    Raises:
        StreamUnreachable: nothing answered within ``connect_s``.
        StreamRefused: wrong password, or no permission.
    """
    url, password = _url_and_password(section)
    first = redis.Redis.from_url(url, password=password, socket_connect_timeout=5)
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
    backoff = ExponentialWithJitterBackoff(cap=_CAP_S, base=_BASE_S)
    return redis.Redis.from_url(
        url, password=password, socket_connect_timeout=5, retry=Retry(backoff, _attempts(section)),
        retry_on_error=list(_PASSING),
    )  # fmt: skip


def connect_async(section: RedisSection) -> redis.asyncio.Redis:
    """As ``connect``, for asyncio. Connect with ``connect`` first to learn whether the server answers."""
    url, password = _url_and_password(section)
    backoff = ExponentialWithJitterBackoff(cap=_CAP_S, base=_BASE_S)
    return redis.asyncio.Redis.from_url(
        url, password=password, socket_connect_timeout=5, retry=AsyncRetry(backoff, _attempts(section)),
        retry_on_error=list(_PASSING),
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
    except ValueError as error:
        raise ConfigError(f"[redis] url {where!r}: {error}", action="Give redis://, rediss:// or unix://") from error


def redacted(url: str) -> str:
    """A Redis URL without its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user = f"{parts.username}:***@" if parts.username else ":***@"
    return urlunsplit(parts._replace(netloc=user + parts.netloc.rpartition("@")[2]))


def now_ms(client: redis.Redis) -> int:
    """Milliseconds since 1970 on the server's clock: the one clock of a run."""
    seconds, microseconds = client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def clock_offset_ms(server_ms: int, local_s: float) -> int:
    """What to add to this machine's clock (``time.time()``, seconds) to get the server's, in milliseconds."""
    return server_ms - round(local_s * 1000)


def _attempts(section: RedisSection) -> int:
    """Tries that add up to about ``outage_s``: with jitter a try waits half the cap on average."""
    return max(1, round(section.outage_s / (_CAP_S / 2)))


def _url_and_password(section: RedisSection) -> tuple[str, str | None]:
    if urlsplit(section.url).password is not None:
        return section.url, None
    if password := os.environ.get("LORABRIDGE_REDIS_PASSWORD"):
        return section.url, password
    if section.password_file is None:
        return section.url, None
    try:
        return section.url, section.password_file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"[redis] password_file: {error}", action="Check the path and its permissions") from error
