"""An object store against endpoints that overwrite, refuse, lose answers, or are not there."""

from __future__ import annotations

import uuid
from typing import Any

import fsspec
import pytest

from lorabridge.bridge.errors import ConfigError, StoreError
from lorabridge.bridge.store import open_store
from lorabridge.bridge.store.bucket import Bucket
from lorabridge.bridge.store.objects import ObjectStore
from lorabridge.bridge.stream.embedded import free_port
from tests.factories import make_adapter, make_manifest
from tests.stores import LIMIT, publish


class Endpoint:
    """An fsspec filesystem in memory, of which some requests go wrong as ``pipe_file`` says."""

    protocol = "memory"

    def __init__(self) -> None:
        self._fs = fsspec.filesystem("memory")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)


def store_of(endpoint: Any) -> ObjectStore:
    return ObjectStore(Bucket(endpoint, f"/{uuid.uuid4().hex}", "s3://bucket/store"), LIMIT)


class Overwrites(Endpoint):
    def pipe_file(self, path: str, body: bytes, mode: str) -> None:
        self._fs.pipe_file(path, body)


def test_an_endpoint_that_ignores_the_condition_is_refused_to_a_trainer() -> None:
    with pytest.raises(ConfigError, match="overwrites an object") as caught:
        store_of(Overwrites()).allocate_epoch("policy")
    assert "If-None-Match" in caught.value.action


class LosesAnswers(Endpoint):
    """Every create is carried out, and its answer is lost."""

    def pipe_file(self, path: str, body: bytes, mode: str) -> None:
        self._fs.pipe_file(path, body, mode=mode)
        if mode == "create":
            raise TimeoutError("no answer")


def test_an_answer_that_was_lost_does_not_matter() -> None:
    store = store_of(LosesAnswers())
    assert store.allocate_epoch("policy") == 1
    assert publish(store) == store.newest("policy")
    assert store.allocate_epoch("policy") == 2


class SaysItOtherwise(Endpoint):
    """412 without the condition that failed, as some servers answer."""

    def pipe_file(self, path: str, body: bytes, mode: str) -> None:
        try:
            self._fs.pipe_file(path, body, mode=mode)
        except FileExistsError as error:
            raise OSError(22, "At least one of the pre-conditions you specified did not hold") from error


def test_exists_in_other_words_is_understood() -> None:
    store = store_of(SaysItOtherwise())
    assert [store.allocate_epoch("policy"), store.allocate_epoch("policy")] == [1, 2]


class Refuses(Endpoint):
    def cat_file(self, *args: Any, **options: Any) -> bytes:
        raise PermissionError("Access Denied")


def test_what_is_hidden_is_not_missing() -> None:
    """S3 answers 403 for what is not there, unless the bucket may be listed."""
    store = store_of(Refuses())
    for look in (store.newest, store.allocate_epoch):
        with pytest.raises(StoreError, match="refuses: Access Denied") as caught:
            look("policy")
        assert "list the bucket" in caught.value.action


class NoBucket(Endpoint):
    def pipe_file(self, path: str, body: bytes, mode: str) -> None:
        raise FileNotFoundError("The specified bucket does not exist")


def test_a_bucket_that_does_not_exist_is_said_so() -> None:
    store = store_of(NoBucket())
    for write in (lambda: store.put(make_adapter()), lambda: store.allocate_epoch("policy")):
        with pytest.raises(StoreError, match="bucket does not exist") as caught:
            write()
        assert "Create the bucket" in caught.value.action


def test_an_endpoint_that_is_not_there_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_MAX_ATTEMPTS": "1", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}")
    try:
        for call in (store.newest, store.allocate_epoch, lambda _: store.commit(make_manifest())):
            with pytest.raises(StoreError, match="Could not connect") as caught:
                call("policy")
            assert "hunter2" not in caught.value.diagnostics()
            assert caught.value.exit_code == 4
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()
