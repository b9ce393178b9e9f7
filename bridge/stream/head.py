"""The head of a policy: Redis mirrors what the store decided.

Moving it and announcing it is one atomic call. A Redis that lost its memory comes back with an older head, or none;
that is noticed by comparing with the store, and repaired from it. A Redis that is ahead of the store names something
nobody can load: it is refused, never followed.
"""

from __future__ import annotations

from enum import Enum
from typing import cast

import msgspec
import redis

from lorabridge.bridge import codec
from lorabridge.bridge.errors import HeadConflict
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import Store
from lorabridge.bridge.stream.kept import Kept
from lorabridge.bridge.stream.keys import BODY, Keys

# KEYS: head hash, announce stream. ARGV: version, digest, body.
# Moves the head forward and announces it; the same version and digest again is no news; anything else is refused.
# Returns the entry's id if it moved, 0 if it stood there already, -1 if refused.
_MOVE = """
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
local wanted = tonumber(ARGV[1])
if wanted == version and redis.call('HGET', KEYS[1], 'digest') == ARGV[2] then return 0 end
if wanted <= version then return -1 end
redis.call('HSET', KEYS[1], 'version', ARGV[1], 'digest', ARGV[2])
return redis.call('XADD', KEYS[2], '*', 'body', ARGV[3])
"""


class Head(msgspec.Struct, frozen=True):
    """What Redis says is the newest version."""

    version: int
    digest: str


class Standing(Enum):
    """How Redis's head stands to the store's."""

    AGREES = "agrees"
    BEHIND = "behind"  # Redis is older than the store: repair it
    CONFLICTS = "conflicts"  # Redis names what the store does not have: refuse


def compare(stored: Manifest | None, mirrored: Head | None) -> Standing:
    """How Redis's head (``mirrored``) stands to the store's newest manifest."""
    version, seen = (stored.version if stored else 0), (mirrored.version if mirrored else 0)
    if seen < version:
        return Standing.BEHIND
    if seen > version or (stored and mirrored and stored.digest != mirrored.digest):
        return Standing.CONFLICTS
    return Standing.AGREES


def read_head(client: redis.Redis, keys: Keys, policy: str) -> Head | None:
    """The head that Redis holds."""
    return parse_head(cast(dict[bytes, bytes], client.hgetall(keys.head(policy))))


def parse_head(fields: dict[bytes, bytes]) -> Head | None:
    """A head from the fields of its hash."""
    return Head(int(fields[b"version"]), fields[b"digest"].decode()) if fields else None


def move_head(client: redis.Redis, keys: Keys, manifest: Manifest, kept: Kept | None = None) -> bool:
    """Move the head to ``manifest`` and announce it, in one atomic call; whether it was news.

    ``kept`` is given the announcement.

    Raises:
        HeadConflict: Redis already stands at a later version, or at this one with another digest.
    """
    body = codec.encode(manifest)
    moved = client.eval(
        _MOVE, 2, keys.head(manifest.policy), keys.announce, str(manifest.version), manifest.digest, body
    )
    if moved == -1:
        raise _conflict(read_head(client, keys, manifest.policy), manifest)
    if isinstance(moved, bytes) and kept is not None:
        kept.add(keys.announce, moved.decode(), body)
    return bool(moved)


def repair_head(client: redis.Redis, keys: Keys, store: Store, policy: str) -> Manifest | None:
    """Make Redis's head what the store's is; the store's newest manifest, or None if the policy has none.

    Raises:
        HeadConflict: Redis names a version that the store does not have, or other bytes.
    """
    while True:
        # Redis first: what it names is in the store by then, however fast a trainer publishes meanwhile (law 1).
        mirrored = read_head(client, keys, policy)
        stored = store.newest(policy)
        standing = compare(stored, mirrored)
        if standing is Standing.CONFLICTS:
            raise _conflict(mirrored, stored)
        if standing is Standing.AGREES:
            return stored
        assert stored is not None
        try:
            move_head(client, keys, stored)
        except HeadConflict:
            continue  # Redis moved on after we looked: look again
        return stored


def decode_announcement(fields: dict[bytes, bytes]) -> Manifest:
    """The manifest in an entry of the stream ``announce``."""
    return codec.decode(Manifest, fields[BODY])


def _conflict(mirrored: Head | None, stored: Manifest | None) -> HeadConflict:
    redis_says = f"version {mirrored.version} ({mirrored.digest})" if mirrored else "no version"
    store_says = f"version {stored.version} ({stored.digest})" if stored else "no version"
    return HeadConflict(
        f"Redis stands at {redis_says} and the store at {store_says}",
        action="Is [store] url the one this run publishes to? If the store was lost, start a new run",
    )
