"""Reading a store that is not a folder here: adapters by digest, manifests by version, without listing anything.

::

    adapters/sha256/<hex>/adapter_config.json, adapter_model.safetensors
    removed/sha256/<hex>            retention took the adapter away
    policies/<name>/<version>.json
    policies/<name>/epochs/<n>

It is the layout of a local store, so that any web server over its folder will do. A line has no gaps and its manifests
always stay, so the newest version is found by asking for the one after the last that is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, Protocol

from lorabridge.bridge import codec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.digest import CONFIG_FILE, hex_of
from lorabridge.bridge.errors import ConfigError, DigestMissing, VersionTaken
from lorabridge.bridge.manifest import Manifest, check_policy_name
from lorabridge.bridge.store import adapter_files
from lorabridge.bridge.store.order import last

HEX = re.compile(r"[0-9a-f]{64}")
"""Names in ``adapters/sha256`` that are adapters; others are on their way in or out."""


class Shelf(Protocol):
    """Bytes by name under one URL."""

    @property
    def url(self) -> str: ...

    def blocks(self, name: str, limit: int) -> Iterator[bytes]:
        """The bytes of ``name`` in blocks.

        Raises:
            FileNotFoundError: the server says that there is nothing of that name.
            TooLarge: more than ``limit`` bytes; before they are read if the server says how many there are.
            StoreError: the server does not answer, or refuses.
        """
        ...

    def get(self, name: str, limit: int) -> bytes | None:
        """All of something small, None if it is not there. Raises as ``blocks``."""
        ...


def adapter_name(digest: str) -> str:
    return f"adapters/sha256/{hex_of(digest)}"


def removed_name(digest: str) -> str:
    return f"removed/sha256/{hex_of(digest)}"


def manifest_name(policy: str, version: int) -> str:
    return f"policies/{check_policy_name(policy)}/{version}.json"


def epoch_name(policy: str, epoch: int) -> str:
    return f"policies/{check_policy_name(policy)}/epochs/{epoch}"


def decode_manifest(body: bytes, policy: str, version: int, where: str) -> Manifest:
    """A manifest as it stands in a store. Raises ``VersionTaken`` if it is another's, and ``CodecError``."""
    found = codec.decode_json(Manifest, body)
    if (found.policy, found.version) != (policy, version):
        raise VersionTaken(
            f"{where}/{manifest_name(policy, version)} holds {found.policy} version {found.version}",
            action="Restore the store",
        )
    return found


def no_version(policy: str, version: int, where: str) -> DigestMissing:
    return DigestMissing(f"{policy} has no version {version} in {where}", action="Check the policy's name")


class RemoteReader:
    """The half of a store that reads."""

    def __init__(self, shelf: Shelf, max_bytes: int) -> None:
        self._shelf, self.max_bytes = shelf, max_bytes
        self._known: dict[str, int] = {}

    @property
    def url(self) -> str:
        return self._shelf.url

    def read(self, digest: str) -> Adapter:
        try:
            return adapter_files.read(digest, self._source(digest), self.max_bytes)
        except FileNotFoundError as error:
            raise self._missing(digest) from error

    def fetch(self, digest: str, into: Path) -> Path:
        try:
            return adapter_files.fetch(digest, self._source(digest), self.max_bytes, into)
        except FileNotFoundError as error:
            raise self._missing(digest) from error

    def newest(self, policy: str) -> Manifest | None:
        version = self._newest(policy)
        return self.manifest(policy, version) if version else None

    def manifest(self, policy: str, version: int) -> Manifest:
        found = self._find(policy, version)
        if found is None:
            raise no_version(policy, version, self.url)
        return found

    def _newest(self, policy: str) -> int:
        version = last(lambda n: self._find(policy, n) is not None, self._known.get(policy, 0))
        self._known[policy] = version
        return version

    def _find(self, policy: str, version: int) -> Manifest | None:
        body = self._get(manifest_name(policy, version))
        return None if body is None else decode_manifest(body, policy, version, self.url)

    def _get(self, name: str) -> bytes | None:
        return self._shelf.get(name, codec.MAX_RECORD_BYTES)

    def _source(self, digest: str) -> adapter_files.Source:
        folder = adapter_name(digest)

        def source(name: str, limit: int) -> Iterator[bytes]:
            if name != CONFIG_FILE:
                return self._shelf.blocks(f"{folder}/{name}", limit)
            if (config := self._shelf.get(f"{folder}/{name}", limit)) is None:
                raise FileNotFoundError(name)
            return iter([config])

        return source

    def _missing(self, digest: str) -> DigestMissing:
        return adapter_files.missing(digest, self.url, removed=self._get(removed_name(digest)) is not None)


class ReadOnlyStore(RemoteReader):
    """A store that serves adapters and versions, and takes none.

    Args:
        why: a clause that says why it is read only.
    """

    def __init__(self, shelf: Shelf, max_bytes: int, why: str) -> None:
        super().__init__(shelf, max_bytes)
        self._why = why

    def put(self, adapter: Adapter) -> str:
        self._refuse()

    def allocate_epoch(self, policy: str) -> int:
        self._refuse()

    def commit(self, manifest: Manifest) -> None:
        self._refuse()

    def policies(self) -> list[str]:
        self._refuse()

    def adapters(self) -> dict[str, int]:
        self._refuse()

    def remove(self, digests: object, spare: object) -> list[str]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"[store] url {self.url} can only be read: {self._why}",
            action="A trainer, a rollback and `lorabridge store` need a folder or s3://bucket/prefix",
        )
