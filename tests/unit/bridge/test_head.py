"""How Redis's head stands to the store's, in every case there is."""

from __future__ import annotations

import itertools

import pytest

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.stream.head import Head, Standing, compare
from tests.factories import digest_of, make_manifest

STORED = [None, *(make_manifest(v, digest_of(d)) for v, d in itertools.product((1, 2), "ab"))]
MIRRORED = [None, *(Head(v, digest_of(d)) for v, d in itertools.product((1, 2), "ab"))]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("mirrored", MIRRORED)
def test_redis_is_behind_agrees_or_conflicts(stored: Manifest | None, mirrored: Head | None) -> None:
    """Behind exactly if the store is later; agreeing exactly if both say the same; anything else is a conflict."""
    there = (stored.version, stored.digest) if stored else (0, "")
    seen = (mirrored.version, mirrored.digest) if mirrored else (0, "")
    if there == seen:
        assert compare(stored, mirrored) is Standing.AGREES
    elif there[0] > seen[0]:
        assert compare(stored, mirrored) is Standing.BEHIND
    else:
        assert compare(stored, mirrored) is Standing.CONFLICTS
