"""Every key of a run, in one place. They share the hash tag ``{lorabridge:<run>}``, so a cluster keeps them together.

======================= ========= =========================================================================
key                     type      what
======================= ========= =========================================================================
``...:run``             string    the RunRecord (msgpack) that workers must agree with
``...:head:<policy>``   hash      ``version``, ``digest``: mirror of the store's newest (moved by Lua only)
``...:announce``        stream    ``body``: Manifest; one entry per version that moved the head
``...:trajectories``    stream    ``body``: Group; groups ``trainer`` and ``ledger`` read it
``...:events``          stream    ``body``: Event
``...:groups``          hash      ``started``: the number of the next group; ``server``: the start of the server that
                                  ``attempts`` of groups are counted in, from that number on
``...:leases``          zset      group number -> when its lease ends, ms on the server's clock
``...:holders``         hash      group number -> ``<attempt>:<worker>``, the holder of its lease
``...:attempts``        hash      group number -> its last attempt
``...:failures``        hash      group number -> how many of those attempts failed of the group's own doing
``...:archiver``        string    the archiver's lease: a fencing number
``...:archiver:fence``  string    counter of those numbers
``...:control:<name>``  string    the lease of a generator's one controller: a fencing number
``...:control:<name>:fence``   string  counter of those numbers
``...:control:<name>:holder``  string  the worker that has it, or had it last
======================= ========= =========================================================================

An entry of a stream that is there again, after the server had forgotten it, has a field ``was``; see ``kept.py``.
"""

from __future__ import annotations

import msgspec

TRAINER_GROUP = "trainer"
LEDGER_GROUP = "ledger"
BODY = b"body"
WAS = b"was"  # ids, with spaces between, that an entry had before the server forgot it

# What XREAD and XREADGROUP answer: per stream, (id, fields) of each entry.
Reply = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]


class Keys(msgspec.Struct, frozen=True):
    """The keys of one run."""

    run_id: str

    def _key(self, name: str) -> str:
        return f"{{lorabridge:{self.run_id}}}:{name}"

    @property
    def run(self) -> str:
        return self._key("run")

    def head(self, policy: str) -> str:
        return self._key(f"head:{policy}")

    @property
    def announce(self) -> str:
        return self._key("announce")

    @property
    def trajectories(self) -> str:
        return self._key("trajectories")

    @property
    def events(self) -> str:
        return self._key("events")

    @property
    def groups(self) -> str:
        return self._key("groups")

    @property
    def leases(self) -> str:
        return self._key("leases")

    @property
    def holders(self) -> str:
        return self._key("holders")

    @property
    def attempts(self) -> str:
        return self._key("attempts")

    @property
    def failures(self) -> str:
        return self._key("failures")

    def control(self, generator: str) -> str:
        return self._key(f"control:{generator}")

    def control_fence(self, generator: str) -> str:
        return self._key(f"control:{generator}:fence")

    @property
    def archiver(self) -> str:
        return self._key("archiver")

    @property
    def archiver_fence(self) -> str:
        return self._key("archiver:fence")

    @property
    def streams(self) -> dict[str, str]:
        """The three streams by their short names."""
        return {"announce": self.announce, "trajectories": self.trajectories, "events": self.events}
