"""Retention by hand spares what sampled a trajectory that is not yet trained on or archived (law 7)."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import redis

from lorabridge.bridge import cli, codec
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.store import open_store
from lorabridge.bridge.store.in_use import Waiting
from lorabridge.bridge.stream.keys import BODY, Keys
from tests.factories import make_group, make_span, make_trajectory, make_turn
from tests.stores import publish


def wait(client: redis.Redis, keys: Keys, version: int, digest: str) -> None:
    """A trajectory that the version sampled enters the stream."""
    turn = make_turn((make_span(version, 0, 2, digest=digest),))
    group = msgspec.structs.replace(make_group(), trajectories=(make_trajectory(turns=(turn,)),))
    client.xadd(keys.trajectories, {BODY: codec.encode(group)})


def test_gc_spares_what_a_waiting_trajectory_names_until_it_is_trimmed(
    redis_section: RedisSection, client: redis.Redis, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path / "store"))
    store.allocate_epoch("policy")
    digests = [publish(store, version).digest for version in (1, 2, 3)]
    file = tmp_path / "run.toml"
    file.write_text(
        f"[run]\nid = '{keys.run_id}'\ndir = '{tmp_path}'\n[redis]\nurl = '{redis_section.url}'\n"
        f"password_file = '{redis_section.password_file}'\n"
    )

    def removed() -> list[str]:
        assert cli.run(["store", "gc", "--config", str(file), "--keep", "1", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out.splitlines()[-1])
        return [str(digest) for digest in answer["removed"]]

    wait(client, keys, 1, digests[0])
    assert removed() == [digests[1]]
    client.xtrim(keys.trajectories, maxlen=0, approximate=False)
    assert removed() == [digests[0]]


def test_what_waits_follows_the_stream(client: redis.Redis, keys: Keys) -> None:
    waiting, digests = Waiting(client, keys), [make_span(version, 0, 1).digest for version in (1, 2)]
    assert waiting.digests() == set()
    client.xadd(keys.trajectories, {BODY: b"\xff"})
    wait(client, keys, 1, digests[0])
    assert waiting.digests() == {digests[0]}
    wait(client, keys, 2, digests[1])
    assert waiting.digests() == set(digests)
