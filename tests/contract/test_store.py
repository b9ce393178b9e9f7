"""Law 1 on every kind of store: bytes before names, and the bytes are those that the name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE, folder_digest, hex_of
from lorabridge.bridge.errors import ConfigError, DigestMismatch, DigestMissing, TooLarge
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.store.remote import adapter_name
from tests.factories import digest_of, make_adapter
from tests.stores import LIMIT, Place, adapters_in, names, publish


def file_of(digest: str, name: str) -> str:
    return f"{adapter_name(digest)}/{name}"


def test_an_adapter_comes_back_by_its_digest(readable: Place) -> None:
    adapter = make_adapter()
    assert readable.open().put(adapter) == adapter.digest
    assert readable.reader().read(adapter.digest) == adapter


def test_a_fetched_folder_is_what_peft_would_load_and_has_the_digest(readable: Place, tmp_path: Path) -> None:
    adapter = make_adapter()
    digest = readable.open().put(adapter)
    folder = readable.reader().fetch(digest, tmp_path / "cache")
    assert folder == tmp_path / "cache" / hex_of(digest)
    assert folder_digest(folder) == digest
    assert (folder / CONFIG_FILE).read_bytes() == adapter.config
    assert (folder / TENSORS_FILE).read_bytes() == adapter.tensors
    assert names(tmp_path / "cache") == [hex_of(digest)]


def test_an_adapter_of_several_blocks_comes_back_whole(readable: Place, tmp_path: Path) -> None:
    adapter = make_adapter(r=1).__class__(config=b"{}", tensors=bytes(range(256)) * (10 << 12))
    digest = readable.open(1 << 24).put(adapter)
    reader = readable.reader(1 << 24)
    assert reader.read(digest) == adapter
    assert (reader.fetch(digest, tmp_path) / TENSORS_FILE).read_bytes() == adapter.tensors


def test_putting_again_changes_nothing(place: Place) -> None:
    store, adapter = place.open(), make_adapter()
    store.put(adapter)
    before = place.stamps()
    assert store.put(adapter) == adapter.digest
    assert place.stamps() == before


def test_a_store_opened_again_has_what_was_put(readable: Place) -> None:
    store = readable.open()
    store.allocate_epoch("policy")
    manifest = publish(store)
    again = readable.reader()
    assert again.newest("policy") == manifest
    assert again.read(manifest.digest) == make_adapter(1)
    assert open_store(again.url).newest("policy") == manifest


def test_a_digest_that_is_not_there_is_missing(readable: Place, tmp_path: Path) -> None:
    reader = readable.reader()
    with pytest.raises(DigestMissing, match=digest_of("nothing")):
        reader.read(digest_of("nothing"))
    with pytest.raises(DigestMissing, match="is not in"):
        reader.fetch(digest_of("nothing"), tmp_path / "cache")
    assert names(tmp_path / "cache") == []


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
def test_an_adapter_that_was_uploaded_in_part_is_not_there(readable: Place, name: str, tmp_path: Path) -> None:
    digest = readable.open().put(make_adapter())
    readable.delete(file_of(digest, name))
    with pytest.raises(DigestMissing):
        readable.reader().read(digest)
    with pytest.raises(DigestMissing):
        readable.reader().fetch(digest, tmp_path / "cache")
    assert names(tmp_path / "cache") == []


@pytest.mark.parametrize("digest", ["", "sha256:x", "sha256:" + "../" * 21 + "x", "/etc/passwd"])
def test_nothing_is_found_by_path(readable: Place, tmp_path: Path, digest: str) -> None:
    reader = readable.reader()
    for look in (reader.read, lambda digest: reader.fetch(digest, tmp_path / "cache")):
        with pytest.raises(ConfigError, match="not a digest"):
            look(digest)


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "empty"])
def test_changed_bytes_are_found_at_every_read(readable: Place, tmp_path: Path, name: str, harm: str) -> None:
    digest = readable.open().put(make_adapter())
    whole = readable.files()[file_of(digest, name)]
    body = bytearray(whole)
    body[len(body) // 2] ^= 1
    harmed = {"flip": bytes(body), "cut": whole[:-1], "grow": whole + b"\0", "empty": b""}[harm]
    readable.write(file_of(digest, name), harmed)
    for _ in range(2):
        with pytest.raises(DigestMismatch, match=digest):
            readable.reader().read(digest)
        with pytest.raises(DigestMismatch):
            readable.reader().fetch(digest, tmp_path / "cache")
    assert names(tmp_path / "cache") == []


@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
def test_publishing_again_repairs_what_went_bad(place: Place, name: str) -> None:
    """The action that a mismatch and a missing file ask for works."""
    store, adapter = place.open(), make_adapter()
    digest = store.put(adapter)
    place.write(file_of(digest, name), b"bad")
    assert store.put(adapter) == digest
    assert store.read(digest) == adapter
    place.delete(file_of(digest, name))
    assert store.put(adapter) == digest
    assert store.read(digest) == adapter
    assert adapters_in(place) == {hex_of(digest)}


def test_two_digests_exchanged_are_both_found(readable: Place) -> None:
    one, two = (readable.open().put(make_adapter(seed)) for seed in (1, 2))
    files = readable.files()
    for name in (CONFIG_FILE, TENSORS_FILE):
        readable.write(file_of(one, name), files[file_of(two, name)])
        readable.write(file_of(two, name), files[file_of(one, name)])
    for digest in (one, two):
        with pytest.raises(DigestMismatch):
            readable.reader().read(digest)


def test_an_adapter_over_the_limit_is_neither_written_nor_read(readable: Place, tmp_path: Path) -> None:
    adapter = make_adapter()
    size = len(adapter.tensors)
    with pytest.raises(TooLarge):
        readable.open(size - 1).put(adapter)
    assert readable.files() == {}
    readable.open().put(adapter)
    with pytest.raises(TooLarge):
        readable.reader(size - 1).read(adapter.digest)
    with pytest.raises(TooLarge):
        readable.reader(size - 1).fetch(adapter.digest, tmp_path / "cache")
    assert names(tmp_path / "cache") == []
    assert readable.reader(size).read(adapter.digest) == adapter


def test_a_configuration_over_its_limit_is_not_read(readable: Place) -> None:
    digest = readable.open().put(make_adapter())
    readable.write(file_of(digest, CONFIG_FILE), b" " * (2 << 20))
    with pytest.raises(TooLarge):
        readable.reader().read(digest)


@pytest.mark.parametrize("harm", [b"bad", b"", b"\0" * (LIMIT + 1), None])
@pytest.mark.parametrize("name", [CONFIG_FILE, TENSORS_FILE])
def test_a_copy_on_this_machine_that_went_bad_is_fetched_again(
    readable: Place, tmp_path: Path, harm: bytes | None, name: str
) -> None:
    digest, cache, reader = readable.open().put(make_adapter()), tmp_path / "cache", readable.reader()
    file = reader.fetch(digest, cache) / name
    file.unlink()
    if harm is not None:
        file.write_bytes(harm)
    assert folder_digest(reader.fetch(digest, cache)) == digest
    assert names(cache) == [hex_of(digest)]


def test_a_good_copy_on_this_machine_is_enough(readable: Place, tmp_path: Path) -> None:
    digest = readable.open().put(make_adapter())
    folder = readable.reader().fetch(digest, tmp_path / "cache")
    for name in readable.files():
        readable.delete(name)
    assert readable.reader().fetch(digest, tmp_path / "cache") == folder


def test_bytes_that_the_store_did_not_keep_never_get_a_name(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1, verified: what was written is read back before it can be found."""
    adapter = make_adapter()
    with monkeypatch.context() as patch:
        place.garble(patch)
        with pytest.raises(DigestMismatch):
            store.put(adapter)
    assert adapter.digest not in store.adapters()
    with pytest.raises(DigestMissing):
        store.read(adapter.digest)
    store.put(adapter)
    assert store.read(adapter.digest) == adapter


def test_the_adapters_are_listed_with_their_sizes(place: Place, store: Store) -> None:
    assert store.adapters() == {}
    one, two = make_adapter(1), make_adapter(2, r=4)
    for adapter in (one, two):
        store.put(adapter)
    assert store.adapters() == {each.digest: len(each.config) + len(each.tensors) for each in (one, two)}
    place.write("adapters/sha256/.staged/" + CONFIG_FILE, b"{}")
    assert len(store.adapters()) == 2
