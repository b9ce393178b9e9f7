"""A store's URL: what may be written to logs and config.toml, and what opens which kind of store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fsspec.registry import _registry as fsspec_registry

from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.settings import load
from lorabridge.bridge.store import open_store
from lorabridge.bridge.store.address import check_store_url
from lorabridge.bridge.store.local import LocalStore
from lorabridge.bridge.store.objects import ObjectStore
from lorabridge.bridge.store.remote import ReadOnlyStore
from tests.factories import make_adapter

SECRETS = [
    "s3://AKIAKEY:hunter2@bucket/prefix", "https://me:hunter2@host/store", "http://hunter2@host/store",
    "https://host/store?X-Amz-Signature=hunter2", "https://host/store#hunter2", "file://me:hunter2@localhost/store",
    "s3://bucket/prefix?secret=hunter2", "http://me:hunter2@[bad/store", "http://me:hunter2@host:port/store",
]  # fmt: skip


@pytest.mark.parametrize("url", SECRETS)
def test_a_secret_in_the_url_is_refused_and_never_quoted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORABRIDGE_STORE__URL", url)
    for look in (lambda: check_store_url(url), lambda: open_store(url), lambda: load(None)):
        with pytest.raises(ConfigError, match=r"\[store\] url") as caught:
            look()
        assert "hunter2" not in caught.value.diagnostics()


@pytest.mark.parametrize("url", ["file://relative/store", "s3:bucket", "redis://host/x", "simplecache::s3://bucket/x"])
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\[store\] url"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://bucket/prefix", ObjectStore), ("memory://somewhere", ObjectStore), ("http://host/store", ReadOnlyStore),
        ("https://host:8443/a/b", ReadOnlyStore), ("file:///tmp/store", LocalStore), ("runs/store", LocalStore),
        ("local:///tmp/store", ReadOnlyStore),
    ],
)  # fmt: skip
def test_the_scheme_says_which_kind_it_is(
    url: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert isinstance(open_store(url), kind)
    assert open_store(open_store(url).url).url == open_store(url).url


def test_a_folder_and_its_url_are_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a folder%20with #odd? names"
    digest = open_store(str(odd)).put(make_adapter())
    url = open_store(str(odd)).url
    assert open_store(url).read(digest) == make_adapter()
    monkeypatch.chdir(tmp_path)
    assert open_store(odd.name).read(digest) == make_adapter()
    assert open_store(odd.name).url == url


def test_what_fsspec_cannot_create_exclusively_is_read_and_not_written(tmp_path: Path) -> None:
    """fsspec's own default looks whether a file is there and then writes it: two trainers could both succeed."""
    digest = open_store(str(tmp_path)).put(make_adapter())
    store = open_store(f"local://{tmp_path}")
    assert store.read(digest) == make_adapter()
    with pytest.raises(ConfigError, match="can only be read: fsspec's 'file' may overwrite"):
        store.allocate_epoch("policy")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(fsspec_registry, "s3", raising=False)
    with pytest.raises(ConfigError, match="s3fs") as caught:
        open_store("s3://bucket/prefix")
    assert caught.value.action == "pip install 'lorabridge[s3]'"


@pytest.mark.parametrize("url", ["http:///store", "https://", "s3:///prefix"])
def test_a_url_without_a_host_or_bucket_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"\[store\] url is not a URL that a store can have"):
        open_store(url)


def test_a_host_may_be_an_ipv6_address() -> None:
    assert open_store("http://[::1]:8000/store").url == "http://[::1]:8000/store"
