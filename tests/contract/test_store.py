"""Laws 1 and 2, on every kind of store: bytes before names, one line that only goes forward."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE, folder_digest, hex_of
from lorabridge.bridge.errors import (
    ConfigError,
    DigestMismatch,
    DigestMissing,
    StaleTrainer,
    TooLarge,
    VersionTaken,
)
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.store import local as local_store
from tests.factories import digest_of, make_adapter, make_manifest
from tests.stores import LIMIT, names, publish

# Adapters


def test_an_adapter_comes_back_by_its_digest(store: Store) -> None:
    adapter = make_adapter()
    assert store.put(adapter) == adapter.digest
    assert store.read(adapter.digest) == adapter


def test_a_fetched_folder_is_what_peft_would_load_and_has_the_digest(store: Store, tmp_path: Path) -> None:
    adapter = make_adapter()
    folder = store.fetch(store.put(adapter), tmp_path / "cache")
    assert folder == tmp_path / "cache" / hex_of(adapter.digest)
    assert folder_digest(folder) == adapter.digest
    assert (folder / CONFIG_FILE).read_bytes() == adapter.config
    assert (folder / TENSORS_FILE).read_bytes() == adapter.tensors
    assert names(tmp_path / "cache") == [hex_of(adapter.digest)]


def test_putting_again_changes_nothing(store: Store, root: Path) -> None:
    adapter = make_adapter()
    store.put(adapter)
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    assert store.put(adapter) == adapter.digest
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*")} == before


def test_a_store_opened_again_has_what_was_put(open_at: Callable[[Path, int], Store], store: Store, root: Path) -> None:
    store.allocate_epoch("policy")
    manifest = publish(store)
    again = open_at(root, LIMIT)
    assert again.url == store.url
    assert again.newest("policy") == manifest
    assert again.read(manifest.digest) == make_adapter(1)


def test_a_digest_that_is_not_there_is_missing(store: Store, tmp_path: Path) -> None:
    with pytest.raises(DigestMissing, match=digest_of("nothing")):
        store.read(digest_of("nothing"))
    with pytest.raises(DigestMissing):
        store.fetch(digest_of("nothing"), tmp_path / "cache")
    assert names(tmp_path / "cache") == []


@pytest.mark.parametrize("digest", ["", "sha256:x", "sha256:" + "../" * 21 + "x", "/etc/passwd"])
def test_nothing_is_found_by_path(store: Store, tmp_path: Path, digest: str) -> None:
    for look in (store.read, lambda digest: store.fetch(digest, tmp_path / "cache")):
        with pytest.raises(ConfigError, match="not a digest"):
            look(digest)


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "empty"])
def test_changed_bytes_are_found_at_every_read(store: Store, root: Path, tmp_path: Path, name: str, harm: str) -> None:
    digest = store.put(make_adapter())
    file = root / "adapters" / "sha256" / hex_of(digest) / name
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes({"flip": bytes(body), "cut": bytes(body[:-1]), "grow": bytes(body) + b"\0", "empty": b""}[harm])
    for _ in range(2):
        with pytest.raises(DigestMismatch, match=digest):
            store.read(digest)
        with pytest.raises(DigestMismatch):
            store.fetch(digest, tmp_path / "cache")
    assert names(tmp_path / "cache") == []


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
def test_publishing_again_repairs_what_went_bad(store: Store, root: Path, name: str) -> None:
    """The action that a mismatch and a missing file ask for works."""
    adapter = make_adapter()
    digest = store.put(adapter)
    folder = root / "adapters" / "sha256" / hex_of(digest)
    (folder / name).write_bytes(b"bad")
    assert store.put(adapter) == digest
    assert store.read(digest) == adapter
    (folder / name).unlink()
    assert store.put(adapter) == digest
    assert store.read(digest) == adapter
    assert names(folder.parent) == [folder.name]


def test_two_digests_exchanged_are_both_found(store: Store, root: Path) -> None:
    one, two = (store.put(make_adapter(seed)) for seed in (1, 2))
    home = root / "adapters" / "sha256"
    (home / hex_of(one)).rename(home / "aside")
    (home / hex_of(two)).rename(home / hex_of(one))
    (home / "aside").rename(home / hex_of(two))
    for digest in (one, two):
        with pytest.raises(DigestMismatch):
            store.read(digest)


def test_an_adapter_over_the_limit_is_neither_written_nor_read(
    open_at: Callable[[Path, int], Store], store: Store, root: Path, tmp_path: Path
) -> None:
    adapter = make_adapter()
    size = len(adapter.tensors)
    small = open_at(root, size - 1)
    with pytest.raises(TooLarge):
        small.put(adapter)
    assert not root.exists()
    store.put(adapter)
    with pytest.raises(TooLarge):
        small.read(adapter.digest)
    with pytest.raises(TooLarge):
        small.fetch(adapter.digest, tmp_path / "cache")
    assert open_at(root, size).read(adapter.digest) == adapter


def test_a_configuration_over_its_limit_is_not_read(store: Store, root: Path) -> None:
    digest = store.put(make_adapter())
    (root / "adapters" / "sha256" / hex_of(digest) / CONFIG_FILE).write_bytes(b" " * (2 << 20))
    with pytest.raises(TooLarge):
        store.read(digest)


@pytest.mark.parametrize("harm", [b"bad", b"", b"\0" * (LIMIT + 1), None])
@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
def test_a_copy_on_this_machine_that_went_bad_is_fetched_again(
    store: Store, tmp_path: Path, harm: bytes | None, name: str
) -> None:
    digest, cache = store.put(make_adapter()), tmp_path / "cache"
    file = store.fetch(digest, cache) / name
    file.unlink()
    if harm is not None:
        file.write_bytes(harm)
    assert folder_digest(store.fetch(digest, cache)) == digest
    assert names(cache) == [hex_of(digest)]


def test_a_good_copy_on_this_machine_is_enough(store: Store, root: Path, tmp_path: Path) -> None:
    digest = store.put(make_adapter())
    folder = store.fetch(digest, tmp_path / "cache")
    shutil.rmtree(root)
    assert store.fetch(digest, tmp_path / "cache") == folder


def test_bytes_that_the_disk_did_not_keep_never_get_a_name(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1, verified: what was written is read back before it can be found."""
    monkeypatch.setattr(local_store, "write_synced", lambda file, body: file.write_bytes(body[:-1] + b"?"))
    with pytest.raises(DigestMismatch):
        store.put(make_adapter())
    assert names(root / "adapters" / "sha256") == []


# Order


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


def test_versions_are_numbers_not_words(store: Store) -> None:
    store.allocate_epoch("policy")
    manifests = [publish(store, version, seed=0) for version in range(1, 12)]
    assert store.newest("policy") == manifests[-1]


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


def test_a_version_that_is_not_there_is_missing(store: Store) -> None:
    with pytest.raises(DigestMissing, match="policy has no version 1"):
        store.manifest("policy", 1)


def test_an_older_trainer_cannot_commit(store: Store) -> None:
    assert store.allocate_epoch("policy") == 1
    first = publish(store, 1, epoch=1)
    assert store.allocate_epoch("policy") == 2
    with pytest.raises(StaleTrainer, match="epoch 2 has taken over"):
        publish(store, 2, epoch=1)
    assert store.newest("policy") == first
    assert publish(store, 2, epoch=2) == store.newest("policy")


def test_an_epoch_that_was_never_allocated_cannot_commit(store: Store) -> None:
    with pytest.raises(StaleTrainer):
        publish(store, 1, epoch=1)
    assert store.newest("policy") is None


def test_lines_do_not_touch_each_other(store: Store) -> None:
    assert store.allocate_epoch("one") == 1
    assert store.allocate_epoch("one") == 2
    assert store.allocate_epoch("two") == 1
    digest = store.put(make_adapter())
    store.commit(make_manifest(1, digest, policy="two"))
    assert store.newest("one") is None


@pytest.mark.parametrize("name", ["../outside", "", ".hidden", "a/b"])
def test_a_policy_cannot_leave_its_folder(store: Store, root: Path, name: str) -> None:
    digest = store.put(make_adapter())
    for call in (store.newest, store.allocate_epoch, lambda policy: store.manifest(policy, 1)):
        with pytest.raises(ConfigError, match="cannot name a policy"):
            call(name)
    with pytest.raises(ConfigError, match="cannot name a policy"):
        store.commit(make_manifest(1, digest, policy=name))
    assert names(root.parent) == ["store"]


# Addresses


def test_a_folder_and_its_url_are_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a folder%20with #odd? names"
    digest = open_store(str(odd)).put(make_adapter())
    url = open_store(str(odd)).url
    assert open_store(url).read(digest) == make_adapter()
    monkeypatch.chdir(tmp_path)
    assert open_store(odd.name).read(digest) == make_adapter()
    assert open_store(odd.name).url == url


@pytest.mark.parametrize("url", ["s3://bucket/store", "http://host/x", "file://relative/store", "redis://host"])
def test_a_url_that_is_not_on_this_machine_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\[store\] url"):
        open_store(url)
