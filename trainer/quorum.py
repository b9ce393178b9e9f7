"""Wait until enough generators serve a version, for a trainer that wants to: ``[publish] wait``.

A generator counts when a worker has reported, on the stream of events, an epoch that serves the version or a later one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import cast

import redis

from lorabridge.bridge import codec
from lorabridge.bridge.errors import CodecError
from lorabridge.bridge.events import Event, Resident
from lorabridge.bridge.stream.keys import BODY, Keys, Reply

log = logging.getLogger("lorabridge.trainer")

_BLOCK_MS = 500


class Quorum:
    """Follows which version every generator serves.

    Args:
        client: of Redis.
        keys: of the run.
        policy: whose versions.
        wanted: generators that must serve it.
        timeout_s: how long to wait; then training goes on, and the log says who was late.
    """

    def __init__(self, client: redis.Redis, keys: Keys, policy: str, wanted: int, timeout_s: float) -> None:
        self._client, self._keys, self._policy = client, keys, policy
        self._wanted, self._timeout_s = wanted, timeout_s
        self._after = "0"
        self._serves: dict[str, int] = {}

    def wait(self, version: int, check: Callable[[], None] = lambda: None) -> bool:
        """Whether so many generators serve ``version``, or a later one, in time.

        Args:
            version: that was published.
            check: raises if it cannot come any more.
        """
        deadline = time.monotonic() + self._timeout_s
        while (there := self._there(version)) < self._wanted:
            left_ms = round((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                log.warning("policy=%s version=%d is served by %d generators after %g s, and %d were asked for",
                            self._policy, version, there, self._timeout_s, self._wanted)  # fmt: skip
                return False
            check()
            self._read(min(left_ms, _BLOCK_MS))
        return True

    def _there(self, version: int) -> int:
        return sum(1 for served in self._serves.values() if served >= version)

    def _read(self, block_ms: int) -> None:
        reply = cast(Reply, self._client.xread({self._keys.events: self._after}, block=block_ms, count=1000))
        for _, entries in reply or []:
            for entry, fields in entries:
                self._after = entry.decode()
                try:
                    happening = codec.decode(Event, fields[BODY]).happening
                except (CodecError, KeyError):
                    continue  # the archiver keeps what nobody can read
                if isinstance(happening, Resident):
                    served = happening.residency.serves.get(self._policy)
                    self._serves[happening.residency.generator] = served.version if served else 0
