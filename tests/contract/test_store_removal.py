"""Law 7 on every kind of store: retention removes what is old and unused, whole, and says so ever after."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lorabridge.bridge.digest import TENSORS_FILE
from lorabridge.bridge.errors import ConfigError, DigestMissing
from lorabridge.bridge.store import Store, adapter_files, open_store
from lorabridge.bridge.store.remote import adapter_name
from lorabridge.bridge.store.retention import Retention
from tests.factories import make_adapter, make_manifest
from tests.stores import Place, names, publish


def line(store: Store, versions: int, policy: str = "policy", first_seed: int = 1) -> list[str]:
    """A line of so many versions; their digests."""
    store.allocate_epoch(policy)
    return [
        publish(store, version, seed=first_seed + version - 1, policy=policy).digest
        for version in range(1, versions + 1)
    ]


def test_what_was_removed_is_gone_and_the_record_stays(readable: Place, tmp_path: Path) -> None:
    store, reader = readable.open(), readable.reader()
    digests = line(store, 5)
    assert Retention(store, "policy", 2, set).apply() == sorted(digests[:3])
    assert store.adapters().keys() == set(digests[3:])
    assert [reader.manifest("policy", n).digest for n in range(1, 6)] == digests
    for look in (reader.read, lambda digest: reader.fetch(digest, tmp_path)):
        with pytest.raises(DigestMissing, match=r"removed from .* by retention"):
            look(digests[0])
        look(digests[3])
    assert not [name for name in readable.files() if "leaving" in name]


def test_nothing_goes_unless_it_is_asked_for(store: Store) -> None:
    digests = line(store, 3)
    retention = Retention(store, "policy", 0, set)
    assert (retention.due(), retention.apply()) == ({}, [])
    assert store.adapters().keys() == set(digests)


def test_what_is_in_use_stays_until_it_is_not(store: Store) -> None:
    digests, in_use = line(store, 4), set[str]()
    retention = Retention(store, "policy", 1, lambda: in_use)
    in_use |= set(digests[:2])
    assert retention.apply() == [digests[2]]
    in_use.clear()
    assert list(retention.due()) == sorted(digests[:2])
    assert retention.apply() == sorted(digests[:2])
    assert retention.apply() == []


def test_what_nobody_has_committed_yet_stays(store: Store) -> None:
    digests = line(store, 3)
    coming = store.put(make_adapter(9))
    assert Retention(store, "policy", 1, set).apply() == sorted(digests[:2])
    store.commit(make_manifest(4, coming))
    assert store.read(coming) == make_adapter(9)


def test_a_digest_that_a_newer_version_or_another_line_names_stays(store: Store) -> None:
    mine = line(store, 3)
    store.commit(make_manifest(4, mine[0]))
    other = line(store, 2, "other", first_seed=2)
    assert other[1] == mine[2]
    retention = Retention(store, "policy", 1, set)
    assert retention.apply() == [mine[1]]
    assert store.read(mine[0]) == make_adapter(1)
    assert store.read(mine[2]) == make_adapter(3)


def test_each_publish_removes_what_leaves_the_window(store: Store) -> None:
    store.allocate_epoch("policy")
    retention, digests = Retention(store, "policy", 2, set), []
    for version in range(1, 6):
        digests.append(publish(store, version).digest)
        assert retention.apply() == digests[-3:-2]
        assert store.adapters().keys() == set(digests[-2:])


def test_a_removed_adapter_that_is_put_again_is_back_and_can_go_again(store: Store) -> None:
    digests = line(store, 3)
    retention = Retention(store, "policy", 1, set)
    retention.apply()
    with pytest.raises(DigestMissing):
        store.commit(make_manifest(4, digests[0]))
    assert store.newest("policy") == store.manifest("policy", 3)
    store.commit(make_manifest(4, store.put(make_adapter(1))))
    assert store.read(digests[0]) == make_adapter(1)
    assert retention.apply() == [digests[2]]
    publish(store, 5)
    assert retention.apply() == [digests[0]]


def test_removing_what_is_not_there_does_nothing(store: Store) -> None:
    digest = store.put(make_adapter())
    assert store.remove([make_adapter(1).digest], set) == []
    assert store.remove([digest], lambda: [digest]) == []
    assert store.read(digest) == make_adapter()


def test_who_reads_an_adapter_while_it_goes_gets_all_of_it_or_is_told(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed after the reader has the configuration and before it has the tensors."""
    store = place.open()
    digest = store.put(make_adapter())
    receive = adapter_files._receive

    def removed_halfway(digest: str, source: adapter_files.Source, limit: int, tensors: object) -> bytes:
        def blocks(name: str, most: int) -> object:
            if name == TENSORS_FILE:
                assert store.remove([digest], set) == [digest]
            return source(name, most)

        return receive(digest, blocks, limit, tensors)  # type: ignore[arg-type]

    monkeypatch.setattr(adapter_files, "_receive", removed_halfway)
    with pytest.raises(DigestMissing, match="removed from"):
        store.fetch(digest, tmp_path / "cache")
    assert names(tmp_path / "cache") == []


def test_a_store_over_http_takes_nothing_and_says_why(web: tuple[Path, str]) -> None:
    store = open_store(f"{web[1]}/store")
    for call in (
        lambda: store.put(make_adapter()), lambda: store.allocate_epoch("policy"),
        lambda: store.commit(make_manifest()), store.policies, store.adapters, lambda: store.remove([], set),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"\[store\] url http://.* can only be read: a web server cannot"):
            call()


# A folder's own


def test_a_folder_is_renamed_away_before_it_is_deleted_and_a_killed_removal_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    digests = [store.put(make_adapter(seed)) for seed in (1, 2)]
    home = tmp_path / "adapters" / "sha256"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *args, **options: None)  # killed here
        assert store.remove([digests[0]], set) == [digests[0]]
    assert [name for name in names(home) if name.startswith(".leaving")]
    assert list(store.adapters()) == [digests[1]]
    with pytest.raises(DigestMissing, match="by retention"):
        store.read(digests[0])
    store.remove([], set)
    assert names(home) == [digests[1].removeprefix("sha256:")]


def test_a_folders_commit_and_removal_wait_for_each_other(tmp_path: Path) -> None:
    """What retention decides with cannot change under it."""
    store = open_store(str(tmp_path))
    store.allocate_epoch("policy")
    digest = store.put(make_adapter())
    started, outcome = threading.Event(), list[object]()

    def commit() -> None:
        started.set()
        try:
            open_store(str(tmp_path)).commit(make_manifest(1, digest))
            outcome.append("committed")
        except DigestMissing:
            outcome.append("told")

    thread = threading.Thread(target=commit)

    def spare() -> list[str]:
        thread.start()
        started.wait()
        thread.join(0.2)
        assert outcome == []
        return []

    assert store.remove([digest], spare) == [digest]
    thread.join()
    assert outcome == ["told"]
    assert store.newest("policy") is None
    assert not (tmp_path / adapter_name(digest)).exists()
