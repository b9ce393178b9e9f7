"""Law 2 on every kind of store: one line that only goes forward, decided by the store."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from lorabridge.bridge.errors import CodecError, ConfigError, DigestMissing, StaleTrainer, VersionTaken
from lorabridge.bridge.store import Store
from lorabridge.bridge.store.line import commit_next
from lorabridge.bridge.store.remote import manifest_name
from tests.factories import make_adapter, make_manifest
from tests.stores import Place, publish


def test_a_version_needs_its_bytes_first(store: Store) -> None:
    store.allocate_epoch("policy")
    with pytest.raises(DigestMissing, match="not in"):
        store.commit(make_manifest(1, make_adapter(1).digest))
    assert store.newest("policy") is None
    publish(store)


def test_a_line_starts_at_1_and_is_dense(store: Store) -> None:
    assert store.newest("policy") is None
    store.allocate_epoch("policy")
    with pytest.raises(VersionTaken, match="does not follow version 0"):
        publish(store, 2)
    for version in (1, 2, 3):
        manifest = publish(store, version)
        assert store.newest("policy") == manifest
    for version in (0, 5, -1):
        with pytest.raises(VersionTaken):
            publish(store, version, seed=9)
    assert [store.manifest("policy", version).version for version in (1, 2, 3)] == [1, 2, 3]


def test_the_newest_is_found_by_those_who_look_often_and_by_those_who_come_late(readable: Place) -> None:
    store, often = readable.open(), readable.reader()
    store.allocate_epoch("policy")
    assert often.newest("policy") is None
    for version in range(1, 12):
        manifest = publish(store, version, seed=0)
        if version in (1, 2, 7, 11):
            assert often.newest("policy") == manifest
        assert readable.reader().newest("policy") == manifest
    assert [often.manifest("policy", version).version for version in range(1, 12)] == list(range(1, 12))


def test_the_same_manifest_again_does_nothing(store: Store) -> None:
    store.allocate_epoch("policy")
    first, second = publish(store, 1), publish(store, 2)
    store.commit(first)
    store.commit(second)
    assert store.newest("policy") == second


def test_a_version_never_gets_other_content(store: Store) -> None:
    store.allocate_epoch("policy")
    first = publish(store, 1)
    publish(store, 2)
    for changed in (
        msgspec.structs.replace(first, digest=store.put(make_adapter(9))),
        msgspec.structs.replace(first, step=99),
    ):
        with pytest.raises(VersionTaken, match="version 1 exists"):
            store.commit(changed)
    assert store.manifest("policy", 1) == first


def test_a_version_that_is_not_there_is_missing(readable: Place) -> None:
    with pytest.raises(DigestMissing, match="policy has no version 1"):
        readable.reader().manifest("policy", 1)


@pytest.mark.parametrize("body", [b"", b"{}", b"not JSON", b'{"schema": 99}'])
def test_a_manifest_that_cannot_be_read_is_said_so(readable: Place, body: bytes) -> None:
    readable.write(manifest_name("policy", 1), body)
    for look in (readable.reader().newest, lambda policy: readable.reader().manifest(policy, 1)):
        with pytest.raises(CodecError):
            look("policy")


def test_a_manifest_under_another_version_is_refused(readable: Place) -> None:
    store = readable.open()
    store.allocate_epoch("policy")
    publish(store)
    readable.write(manifest_name("policy", 2), readable.files()[manifest_name("policy", 1)])
    with pytest.raises(VersionTaken, match=r"policy/2\.json holds policy version 1"):
        readable.reader().newest("policy")


def test_an_older_trainer_cannot_commit(store: Store) -> None:
    assert store.allocate_epoch("policy") == 1
    first = publish(store, 1, epoch=1)
    assert store.allocate_epoch("policy") == 2
    with pytest.raises(StaleTrainer, match="epoch 2 has taken over"):
        publish(store, 2, epoch=1)
    assert store.newest("policy") == first
    assert publish(store, 2, epoch=2) == store.newest("policy")


def test_a_trainer_hears_of_an_epoch_that_another_process_took(place: Place) -> None:
    mine, other = place.open(), place.open()
    assert (mine.allocate_epoch("policy"), other.allocate_epoch("policy")) == (1, 2)
    with pytest.raises(StaleTrainer):
        publish(mine, 1, epoch=1)
    publish(other, 1, epoch=2)
    assert mine.allocate_epoch("policy") == 3
    assert publish(mine, 2, epoch=3) == other.newest("policy")


def test_an_epoch_that_was_never_allocated_cannot_commit(store: Store) -> None:
    with pytest.raises(StaleTrainer):
        publish(store, 1, epoch=1)
    assert store.newest("policy") is None


def test_lines_do_not_touch_each_other(store: Store) -> None:
    assert store.policies() == []
    assert store.allocate_epoch("one") == 1
    assert store.allocate_epoch("one") == 2
    assert store.allocate_epoch("two") == 1
    digest = store.put(make_adapter())
    store.commit(make_manifest(1, digest, policy="two"))
    assert store.newest("one") is None
    assert store.policies() == ["one", "two"]


@pytest.mark.parametrize("name", ["../outside", "", ".hidden", "a/b"])
def test_a_policy_cannot_leave_its_folder(place: Place, name: str) -> None:
    store = place.open()
    digest = store.put(make_adapter())
    before = place.files()
    looks: list[Callable[[str], object]] = [
        store.newest, store.allocate_epoch, lambda policy: store.manifest(policy, 1),
        lambda policy: store.commit(make_manifest(1, digest, policy=policy)),
    ]  # fmt: skip
    for look in looks:
        with pytest.raises(ConfigError, match="cannot name a policy"):
            look(name)
    assert place.files() == before
    assert place.strays() == []


def test_a_store_that_was_emptied_under_a_trainer_is_not_gone_on_with(place: Place) -> None:
    store = place.open()
    store.allocate_epoch("policy")
    for version in (1, 2):
        publish(store, version)
    for name in place.files():
        place.delete(name)
    assert store.newest("policy") is None
    with pytest.raises(StaleTrainer):
        publish(store, 3)


def test_the_next_version_goes_on_top_of_what_another_committed_meanwhile(store: Store) -> None:
    store.allocate_epoch("policy")
    digest = publish(store, 1).digest
    seen = []

    def make(newest: object) -> object:
        seen.append(newest)
        if len(seen) == 1:
            publish(store, 2)  # in between
        return make_manifest(len(seen) + 1, digest)

    committed = commit_next(store, "policy", make)  # type: ignore[arg-type]
    assert [manifest.version for manifest in seen] == [1, 2]  # type: ignore[attr-defined]
    assert committed == store.newest("policy")
    assert committed.version == 3


def test_a_version_that_can_never_be_next_is_not_tried_for_ever(store: Store) -> None:
    store.allocate_epoch("policy")
    digest = publish(store, 1).digest
    with pytest.raises(VersionTaken, match="does not follow"):
        commit_next(store, "policy", lambda newest: make_manifest(7, digest))
