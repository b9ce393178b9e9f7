"""Reads what a run tells, beside the supervisor's loop: a Redis that hangs does not keep Ctrl-C waiting."""

from __future__ import annotations

import http.client
import threading
from typing import cast

import msgspec
import redis

from lorabridge.bridge import codec
from lorabridge.bridge.errors import BridgeError
from lorabridge.bridge.events import Event
from lorabridge.bridge.run.news import Counts, News
from lorabridge.bridge.sections import GeneratorsSection
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.stream.connection import connect, errors
from lorabridge.bridge.stream.groups import unfinished
from lorabridge.bridge.stream.head import read_head
from lorabridge.bridge.stream.keys import BODY, Keys, Reply

_EVERY_S = 0.3
_BATCH = 1000


class Feed:
    """Follows a run from a thread of its own while the block lasts.

    Attributes:
        news: the newest News.
        trouble: why there is none at the moment, or ''.
        healthy: whether one of the servers that the run starts has answered.
    """

    def __init__(self, settings: Settings) -> None:
        self._redis = settings.redis.model_copy(update={"outage_s": 0.5})
        self._generators, self._policy = settings.generators, settings.policy.name
        self._keys = Keys(settings.run.id)
        self._after = "0"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="feed", daemon=True)
        self.news = News(policy=self._policy)
        self.trouble = ""
        self.healthy = bool(settings.generators.urls)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        self._thread.join(timeout=0.5)

    def _follow(self) -> None:
        client: redis.Redis | None = None
        while not self._ended.wait(_EVERY_S):
            self.healthy = self.healthy or any(answers(self._generators, n) for n in range(self._generators.count))
            try:
                with errors(self._redis):
                    client = client or connect(self._redis)
                    self._read(client)
                self.trouble = ""
            except BridgeError as error:
                self.trouble = error.problem
        if client is not None:
            client.close()

    def _read(self, client: redis.Redis) -> None:
        keys, news = self._keys, self.news
        reply = cast(Reply, client.xread({keys.events: self._after}, count=_BATCH))
        for entry, fields in reply[0][1] if reply else []:
            self._after = entry.decode()
            news = news.after(codec.decode(Event, fields[BODY]))
        head = read_head(client, keys, self._policy)
        counts = Counts(leased=client.zcard(keys.leases), delivered=unfinished(client, keys))
        joined = bool(client.exists(keys.run))
        self.news = msgspec.structs.replace(news, head=head.version if head else 0, counts=counts, joined=joined)


def answers(generators: GeneratorsSection, place: int) -> bool:
    """Whether server ``place`` of those that the run starts says that it is healthy."""
    host = "127.0.0.1" if generators.host in ("0.0.0.0", "") else generators.host
    connection = http.client.HTTPConnection(host, generators.port + 2 * place, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
