"""Law 2 on every stream backend: Redis mirrors the store's order, once per version, and is never followed past it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
import redis
import redis.asyncio

from lorabridge.bridge import cli
from lorabridge.bridge.errors import HeadConflict, StreamRefused, StreamUnreachable
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.stream import head as head_module
from lorabridge.bridge.stream.connection import connect, connect_async, errors, now_ms
from lorabridge.bridge.stream.embedded import free_port
from lorabridge.bridge.stream.head import Head, decode_announcement, move_head, read_head, repair_head
from lorabridge.bridge.stream.keys import Keys
from tests.factories import digest_of, make_adapter, make_manifest


def announced(client: redis.Redis, keys: Keys) -> list[Manifest]:
    entries = cast(list[tuple[bytes, dict[bytes, bytes]]], client.xrange(keys.announce))
    return [decode_announcement(fields) for _, fields in entries]


def head_of(manifest: Manifest) -> Head:
    return Head(manifest.version, manifest.digest)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "store"))
    store.allocate_epoch("policy")
    return store


def commit(store: Store, version: int) -> Manifest:
    manifest = make_manifest(version, store.put(make_adapter(version)))
    store.commit(manifest)
    return manifest


# The head


def test_a_policy_nobody_published_has_no_head(client: redis.Redis, keys: Keys) -> None:
    assert read_head(client, keys, "policy") is None


def test_each_move_is_announced_once_and_in_order(client: redis.Redis, keys: Keys) -> None:
    manifests = [make_manifest(version) for version in (1, 2, 12)]
    for manifest in manifests:
        assert move_head(client, keys, manifest) is True
        assert read_head(client, keys, "policy") == head_of(manifest)
    assert announced(client, keys) == manifests


def test_the_same_head_again_is_no_news(client: redis.Redis, keys: Keys) -> None:
    assert move_head(client, keys, make_manifest(1)) is True
    assert move_head(client, keys, make_manifest(1)) is False
    assert announced(client, keys) == [make_manifest(1)]


@pytest.mark.parametrize(
    "wanted", [make_manifest(1), make_manifest(2), make_manifest(3, digest_of("other")), make_manifest(0)]
)
def test_the_head_never_moves_back_or_to_other_bytes(client: redis.Redis, keys: Keys, wanted: Manifest) -> None:
    move_head(client, keys, make_manifest(3))
    with pytest.raises(HeadConflict, match="Redis stands at version 3"):
        move_head(client, keys, wanted)
    assert read_head(client, keys, "policy") == head_of(make_manifest(3))
    assert announced(client, keys) == [make_manifest(3)]


def test_of_many_who_move_at_once_each_version_is_announced_at_most_once_and_the_last_wins(
    redis_section: RedisSection, client: redis.Redis, keys: Keys
) -> None:
    def publish(start: threading.Barrier) -> None:
        with connect(redis_section) as mine:
            start.wait()
            for version in range(1, 21):
                try:
                    move_head(mine, keys, make_manifest(version))
                except HeadConflict:
                    pass

    start = threading.Barrier(4)
    threads = [threading.Thread(target=publish, args=(start,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_head(client, keys, "policy") == head_of(make_manifest(20))
    assert [manifest.version for manifest in announced(client, keys)] == list(range(1, 21))


def test_policies_and_runs_have_heads_of_their_own(client: redis.Redis, keys: Keys) -> None:
    move_head(client, keys, make_manifest(5, policy="one"))
    assert read_head(client, keys, "two") is None
    assert read_head(client, Keys(f"{keys.run_id}-other"), "one") is None


# Repair


def test_a_redis_that_agrees_is_left_alone(client: redis.Redis, keys: Keys, store: Store) -> None:
    assert repair_head(client, keys, store, "policy") is None
    manifest = commit(store, 1)
    move_head(client, keys, manifest)
    assert repair_head(client, keys, store, "policy") == manifest
    assert announced(client, keys) == [manifest]


@pytest.mark.parametrize("remembers", [0, 1, 2])
def test_a_redis_that_lost_its_memory_is_repaired_from_the_store(
    client: redis.Redis, keys: Keys, store: Store, remembers: int
) -> None:
    manifests = [commit(store, version) for version in (1, 2, 3)]
    for manifest in manifests[:remembers]:
        move_head(client, keys, manifest)
    assert repair_head(client, keys, store, "policy") == manifests[-1]
    assert read_head(client, keys, "policy") == head_of(manifests[-1])
    assert announced(client, keys) == [*manifests[:remembers], manifests[-1]]


@pytest.mark.parametrize("stored", [0, 1])
def test_a_redis_ahead_of_the_store_is_refused_never_followed(
    client: redis.Redis, keys: Keys, store: Store, stored: int
) -> None:
    newest = commit(store, 1) if stored else None
    move_head(client, keys, make_manifest(2))
    with pytest.raises(
        HeadConflict, match=f"Redis stands at version 2 .* the store at {'version 1' if stored else 'no'}"
    ):
        repair_head(client, keys, store, "policy")
    assert store.newest("policy") == newest
    assert read_head(client, keys, "policy") == head_of(make_manifest(2))


def test_a_redis_with_other_bytes_is_refused(client: redis.Redis, keys: Keys, store: Store) -> None:
    commit(store, 1)
    move_head(client, keys, make_manifest(1, digest_of("other")))
    with pytest.raises(HeadConflict, match=digest_of("other")):
        repair_head(client, keys, store, "policy")


@pytest.mark.parametrize("moment", ["between the looks", "before the repair"])
def test_a_trainer_that_publishes_meanwhile_is_no_conflict(
    client: redis.Redis, keys: Keys, store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    move_head(client, keys, commit(store, 1))
    commit(store, 2)
    look, move, newest = head_module.read_head, head_module.move_head, store.newest
    published: list[Manifest] = []

    def publish(now: str) -> None:
        if moment == now and not published:
            published.append(commit(store, 3))
            move(client, keys, published[0])

    def looks(client: redis.Redis, keys: Keys, policy: str) -> Head | None:
        seen = look(client, keys, policy)
        publish("between the looks")
        return seen

    def looks_up(policy: str) -> Manifest | None:
        found = newest(policy)
        publish("between the looks")
        return found

    def moves(client: redis.Redis, keys: Keys, manifest: Manifest) -> bool:
        publish("before the repair")
        return move(client, keys, manifest)

    monkeypatch.setattr(head_module, "read_head", looks)
    monkeypatch.setattr(store, "newest", looks_up)
    monkeypatch.setattr(head_module, "move_head", moves)
    assert repair_head(client, keys, store, "policy") == published[0]
    assert look(client, keys, "policy") == head_of(published[0])


# The command


def configuration(folder: Path, section: RedisSection, run_id: str) -> list[str]:
    file = folder / "run.toml"
    file.write_text(
        f"[run]\nid = '{run_id}'\n[redis]\nurl = '{section.url}'\npassword_file = '{section.password_file}'\n"
        f"[store]\nurl = '{folder / 'store'}'\n"
    )
    return ["head", "--config", str(file)]


def test_the_command_says_whether_store_and_redis_agree(
    redis_section: RedisSection, client: redis.Redis, keys: Keys, store: Store, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    command = configuration(tmp_path, redis_section, keys.run_id)

    def ask() -> tuple[int, str]:
        return cli.run(command), capsys.readouterr().out

    def ask_json() -> tuple[int, dict[str, object]]:
        code = cli.run([*command, "--json"])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    assert ask() == (0, "policy has no version yet\nRedis agrees\n")
    assert ask_json() == (0, {"policy": "policy", "standing": "agrees", "manifest": None, "redis": None})
    manifest = commit(store, 1)
    assert ask()[1].splitlines() == [f"policy version 1  {manifest.digest}  step 0", "Redis behind"]
    move_head(client, keys, manifest)
    code, answer = ask_json()
    assert (code, answer["standing"]) == (0, "agrees")
    assert answer["manifest"] == msgspec.to_builtins(manifest) | {"targets": list(manifest.targets)}
    assert answer["redis"] == {"version": 1, "digest": manifest.digest}
    move_head(client, keys, make_manifest(2))
    assert ask()[0] == 1
    assert ask_json()[0] == 1


# Connections


def without_password(section: RedisSection) -> RedisSection:
    return section.model_copy(update={"password_file": None})


def place_of(section: RedisSection) -> str:
    """Host, port and database."""
    return section.url.removeprefix("redis://").rpartition("@")[2]


def use(section: RedisSection) -> object:
    """Connect and ask for something that needs permission: PING may be open to anybody."""
    with errors(section), connect(section) as client:
        return client.get("key")


def test_a_password_comes_from_the_url_a_file_or_the_environment(
    redis_section: RedisSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert redis_section.password_file is not None
    password = redis_section.password_file.read_text()
    assert use(redis_section) is None
    user = redis_section.url.removeprefix("redis://").rpartition("@")[0]
    assert use(RedisSection(url=f"redis://{user}:{password}@{place_of(redis_section)}")) is None
    monkeypatch.setenv("LORABRIDGE_REDIS_PASSWORD", password)
    assert use(without_password(redis_section)) is None


@pytest.mark.parametrize("kind", ["wrong", "none"])
def test_a_wrong_or_missing_password_is_refused_and_not_repeated(
    redis_section: RedisSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv("LORABRIDGE_REDIS_PASSWORD", raising=False)
    file = tmp_path / "password"
    file.write_text("not-the-password")
    wrong = redis_section.model_copy(update={"password_file": file, "connect_s": 600, "outage_s": 600})
    with pytest.raises(StreamRefused) as caught:
        use(wrong if kind == "wrong" else without_password(wrong))
    assert "not-the-password" not in caught.value.diagnostics()
    assert redis_section.url in caught.value.problem


def test_a_password_in_a_url_is_not_repeated_either(redis_section: RedisSection) -> None:
    with pytest.raises(StreamRefused) as caught:
        use(RedisSection(url=f"redis://somebody:not-the-password@{place_of(redis_section)}"))
    assert "not-the-password" not in caught.value.diagnostics()
    assert "redis://somebody:***@" in caught.value.problem


async def test_an_async_client_is_refused_as_well(redis_section: RedisSection) -> None:
    section = RedisSection(url=f"redis://somebody:not-the-password@{place_of(redis_section)}")
    client = connect_async(section)
    with pytest.raises(StreamRefused), errors(section):
        await client.get("key")
    await client.aclose()


def closed() -> tuple[int, Callable[[], None]]:
    return free_port(), lambda: None


def silent() -> tuple[int, Callable[[], None]]:
    """A port where somebody listens and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener.getsockname()[1], listener.close


@pytest.mark.parametrize("place", [closed, silent])
def test_a_server_that_does_not_answer_is_unreachable(place: Callable[[], tuple[int, Callable[[], None]]]) -> None:
    port, close = place()
    try:
        with pytest.raises(StreamUnreachable, match=f"127.0.0.1:{port}/0 does not answer") as caught:
            connect(RedisSection(url=f"redis://127.0.0.1:{port}/0", connect_s=0.3))
        assert caught.value.exit_code == 3
    finally:
        close()


def test_an_unknown_command_is_a_refusal_that_names_it(redis_section: RedisSection, client: redis.Redis) -> None:
    with pytest.raises(StreamRefused, match="NOSUCHCOMMAND"), errors(redis_section):
        client.execute_command("NOSUCHCOMMAND")  # type: ignore[no-untyped-call]


def test_the_servers_clock_is_in_milliseconds_and_goes_forward(client: redis.Redis) -> None:
    first, second = now_ms(client), now_ms(client)
    assert 1_500_000_000_000 < first <= second < 10_000_000_000_000
