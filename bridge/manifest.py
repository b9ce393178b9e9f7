"""A manifest: what one version of a policy is. Immutable once committed."""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from lorabridge.bridge.canary import Canary
from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.fingerprint import Fingerprint

_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Version ``version`` of ``policy`` is the adapter ``digest``.

    Attributes:
        policy: the line's name.
        version: 1 for the adapter that training starts with, then dense.
        digest: identity of the adapter (``lorabridge.bridge.digest``).
        parent: digest of the version before, None for version 1.
        base: fingerprint of the base model that it was trained on.
        rank: largest rank of any module.
        targets: module names that the adapter changes, sorted.
        dtype: of the adapter's tensors, as safetensors names it (``F32``, ``BF16``).
        step: optimizer steps taken when the weights were read.
        epoch: trainer epoch; a trainer with an older one cannot commit.
        run: id of the run that made it.
        created_ms: milliseconds since 1970, on the stream server's clock.
        size: bytes of the tensors file.
        canary: what whoever serves it must be able to repeat; not every version has one.
        consumed: null until the root of consumed trajectories exists.
    """

    READS_SCHEMAS: ClassVar[tuple[int, ...]] = (1,)

    policy: str
    version: int
    digest: str
    parent: str | None
    base: Fingerprint
    rank: int
    targets: tuple[str, ...]
    dtype: str
    step: int
    epoch: int
    run: str
    created_ms: int
    size: int
    canary: Canary | None = None
    consumed: None = None
    schema: int = 1


def check_policy_name(name: str) -> str:
    """``name`` if it can be a policy's name: it becomes a folder, a Redis key and vLLM's model name.

    Raises:
        ConfigError: it has other characters than letters, digits, ``.``, ``_`` and ``-``, or is too long.
    """
    if not _POLICY.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a policy",
            action="Use letters, digits, '.', '_' and '-', starting with a letter or digit, 100 at most",
        )
    return name
