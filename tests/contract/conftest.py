"""Stores of every kind."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lorabridge.bridge.store import Store
from tests import s3_server
from tests.stores import FolderPlace, ObjectPlace, Place

WRITABLE = ("local", "memory", "s3")


@contextmanager
def _serving(command: list[str], log: Path) -> Iterator[str]:
    """A server as a process of its own; the line that it prints when it listens."""
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline()
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """S3 over HTTP, as the environment tells everyone where it is; its fsspec filesystem, with a bucket ``bucket``."""
    log = tmp_path_factory.mktemp("s3") / "log"
    with _serving([sys.executable, s3_server.__file__], log) as line, pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(line)}", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }.items():  # fmt: skip
            environment.setenv(name, value)
        fs = fsspec.filesystem("s3", use_listings_cache=False)
        fs.mkdir("bucket")
        yield fs


@pytest.fixture(scope="session")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder and the URL where Python's own web server serves it."""
    folder = tmp_path_factory.mktemp("web")
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with _serving(command, folder.parent / "web.log") as line:
        yield folder, f"http://127.0.0.1:{line.split(' port ')[1].split()[0]}"


def _place(kind: str, request: pytest.FixtureRequest) -> Place:
    name = uuid.uuid4().hex
    if kind == "local":
        return FolderPlace(request.getfixturevalue("tmp_path") / name / "store")
    if kind == "http":
        folder, url = request.getfixturevalue("web")
        return FolderPlace(folder / name / "store", f"{url}/{name}/store")
    if kind == "memory":
        return ObjectPlace(fsspec.filesystem("memory"), f"/{name}/store", f"memory://{name}/store")
    return ObjectPlace(request.getfixturevalue("s3"), f"bucket/{name}/store", f"s3://bucket/{name}/store")


@pytest.fixture(params=WRITABLE)
def place(request: pytest.FixtureRequest) -> Place:
    """Where a store of one kind lies that a trainer can publish to."""
    return _place(request.param, request)


@pytest.fixture(params=[kind for kind in WRITABLE if kind != "memory"])
def shared_place(request: pytest.FixtureRequest) -> Place:
    """As ``place``, of the kinds that several processes can open."""
    return _place(request.param, request)


@pytest.fixture(params=[*WRITABLE, "http"])
def readable(request: pytest.FixtureRequest) -> Place:
    """As ``place``, and those that can only be read."""
    return _place(request.param, request)


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()
