"""Going back to an older version, on every stream backend: a new one, told to everyone, that no old trainer undoes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import msgspec
import pytest
import redis

from lorabridge.bridge import cli
from lorabridge.bridge.errors import HeadConflict, StaleTrainer
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.stream.head import Head, decode_announcement, move_head, read_head, repair_head
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.stream.rollback import roll_back
from tests.factories import make_adapter, make_manifest
from tests.stores import publish


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Four versions of trainer epoch 1."""
    store = open_store(str(tmp_path / "store"))
    store.allocate_epoch("policy")
    for version in range(1, 5):
        publish(store, version)
    return store


def announced(client: redis.Redis, keys: Keys) -> list[Manifest]:
    entries = cast(list[tuple[bytes, dict[bytes, bytes]]], client.xrange(keys.announce))
    return [decode_announcement(fields) for _, fields in entries]


def test_the_old_adapter_is_the_head_again_as_a_new_version(client: redis.Redis, keys: Keys, store: Store) -> None:
    repair_head(client, keys, store, "policy")
    old = store.manifest("policy", 2)
    head, moved = roll_back(client, keys, store, "policy", 2)
    assert moved
    assert head == store.newest("policy") == announced(client, keys)[-1]
    assert (head.version, head.digest, head.epoch) == (5, old.digest, 2)
    assert head.parent == store.manifest("policy", 4).digest
    assert read_head(client, keys, "policy") == Head(5, old.digest)
    same = ("rank", "targets", "dtype", "step", "base", "size", "policy", "canary")
    assert [getattr(head, field) for field in same] == [getattr(old, field) for field in same]
    assert head.run == keys.run_id
    assert head.created_ms > old.created_ms


def test_the_trainer_that_runs_cannot_undo_it(client: redis.Redis, keys: Keys, store: Store) -> None:
    roll_back(client, keys, store, "policy", 1)
    for version in (5, 6):
        with pytest.raises(StaleTrainer, match="epoch 2 has taken over"):
            publish(store, version, epoch=1)
    assert publish(store, 6, epoch=store.allocate_epoch("policy")) == store.newest("policy")


def test_again_does_nothing_and_disturbs_no_trainer(client: redis.Redis, keys: Keys, store: Store) -> None:
    first = roll_back(client, keys, store, "policy", 2)
    assert roll_back(client, keys, store, "policy", 2) == (first[0], False)
    assert len(announced(client, keys)) == 2  # the head that Redis did not know, and the new one
    assert store.allocate_epoch("policy") == 3


def test_one_that_was_killed_before_it_told_anybody_is_finished_by_the_next(
    client: redis.Redis, keys: Keys, store: Store
) -> None:
    repair_head(client, keys, store, "policy")
    epoch = store.allocate_epoch("policy")
    unheard = msgspec.structs.replace(store.manifest("policy", 1), version=5, epoch=epoch)
    store.commit(unheard)
    assert roll_back(client, keys, store, "policy", 1) == (unheard, False)
    assert read_head(client, keys, "policy") == Head(5, unheard.digest)


def test_a_late_version_of_the_old_trainer_is_gone_back_from_as_well(
    client: redis.Redis, keys: Keys, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing locks the line, it may come between the new epoch and its first commit."""
    commit, late = store.commit, make_manifest(5, store.put(make_adapter(5)), epoch=2)

    def overtaken(manifest: Manifest) -> None:
        monkeypatch.setattr(store, "commit", commit)
        commit(late)
        commit(manifest)

    monkeypatch.setattr(store, "commit", overtaken)
    head, _ = roll_back(client, keys, store, "policy", 3)
    assert (head.version, head.parent) == (6, late.digest)
    assert read_head(client, keys, "policy") == Head(6, head.digest)


def test_a_store_that_is_not_this_runs_is_left_alone(client: redis.Redis, keys: Keys, store: Store) -> None:
    move_head(client, keys, make_manifest(9))
    with pytest.raises(HeadConflict):
        roll_back(client, keys, store, "policy", 2)
    assert store.allocate_epoch("policy") == 2
    assert store.manifest("policy", 4) == store.newest("policy")


# The command


@pytest.fixture
def config(redis_section: RedisSection, keys: Keys, store: Store, tmp_path: Path) -> str:
    file = tmp_path / "run.toml"
    file.write_text(
        f"[run]\nid = '{keys.run_id}'\n[policy]\nname = 'policy'\n[store]\nurl = '{store.url}'\n"
        f"[redis]\nurl = '{redis_section.url}'\npassword_file = '{redis_section.password_file}'\n"
    )
    return str(file)


def test_the_command_says_what_it_did(config: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["rollback", "policy", "--to", "2", "--config", config]) == 0
    digest = store.manifest("policy", 2).digest
    assert capsys.readouterr().out == f"policy version 5 has the adapter of version 2 again  {digest}\n"
    assert cli.run(["rollback", "policy", "--to", "2", "--config", config]) == 0
    assert "version 5 is the head and has the adapter of version 2" in capsys.readouterr().out
    assert cli.run(["rollback", "policy", "--to", "1", "--config", config, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {
        "policy": "policy", "restored": 1, "moved": True, "version": 6, "digest": store.manifest("policy", 1).digest,
        "parent": digest, "epoch": 3, "step": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("policy", "version"), [("policy", "9"), ("other", "1")])
def test_a_version_that_is_not_there_is_said_so(
    config: str, store: Store, policy: str, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["rollback", policy, "--to", version, "--config", config]) == 4
    assert f"{policy} has no version {version}" in capsys.readouterr().err
    assert store.allocate_epoch("policy") == 2


def test_an_adapter_that_retention_removed_is_said_so_and_nobody_is_disturbed(
    config: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.remove([store.manifest("policy", 1).digest], set)
    assert cli.run(["rollback", "policy", "--to", "1", "--config", config]) == 4
    assert "by retention" in capsys.readouterr().err
    assert store.allocate_epoch("policy") == 2


def test_a_version_is_a_number_from_1(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--to", "0"], ["--to", "newest"], []):
        assert cli.run(["rollback", "policy", *arguments, "--config", config]) == 2
