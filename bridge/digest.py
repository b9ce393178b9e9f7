"""The identity of an adapter: ``sha256:<hex>`` over what decides its outputs, and nothing else.

What is hashed, in this order: a line ``lorabridge-adapter-1``, the length of the configuration in bytes as decimal
digits and a newline, the configuration, then the bytes of the safetensors file. The configuration is the canonical
JSON (sorted keys, no white space) of the semantic fields of ``adapter_config.json``: paths, dates, training-only
fields and fields that say nothing (null, false, empty) are left out, so that another PEFT release saving the same
adapter gives the same digest. A field this release does not know counts, so that an unknown meaning is never ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from lorabridge.bridge.codec import UNREADABLE, canonical_json
from lorabridge.bridge.errors import AdapterCorrupt, ConfigError, DigestMissing

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"

_DOMAIN = b"lorabridge-adapter-1\n"
_BLOCK = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NOT_SEMANTIC = frozenset({
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "inference_mode",
    "init_lora_weights", "loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
_SETS = frozenset({"target_modules", "exclude_modules", "modules_to_save", "target_parameters"})


def check_digest(text: str) -> str:
    """``text`` if it is a digest.

    Raises:
        ConfigError: it is not ``sha256:`` and 64 lower-case hexadecimal digits.
    """
    if not _DIGEST.fullmatch(text):
        raise ConfigError(f"{text[:80]!r} is not a digest", action="Give sha256: and 64 hexadecimal digits")
    return text


def hex_of(digest: str) -> str:
    """The hexadecimal part of a digest: its folder's name."""
    return check_digest(digest).removeprefix("sha256:")


def semantic_config(config: dict[str, Any]) -> bytes:
    """Canonical JSON of the fields of ``adapter_config.json`` that decide the outputs."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        # By identity: 0 equals False, and layer 0 or an alpha of 0 does say something.
        if name in _NOT_SEMANTIC or value is None or value is False or value in ([], {}, ""):
            continue
        unordered = name in _SETS and isinstance(value, list | tuple | set | frozenset)
        kept[name] = sorted(value, key=canonical_json) if unordered else _whole(value)
    # An init that rewrites the base's weights does change the outputs; the plain ones only choose where training began.
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in ("gaussian", "eva", "orthogonal", "true", "false"):
        kept["init_lora_weights"] = init
    return canonical_json(kept)


def _whole(value: Any) -> Any:
    """An alpha of 16.0 is an alpha of 16: which type a training script used decides nothing."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list | tuple) else value


def adapter_digest(config: bytes, tensors: Iterable[bytes]) -> str:
    """Digest of a semantic configuration and the blocks of a safetensors file, hashed as they pass by."""
    whole = hashlib.sha256(_DOMAIN)
    whole.update(f"{len(config)}\n".encode())
    whole.update(config)
    for block in tensors:
        whole.update(block)
    return "sha256:" + whole.hexdigest()


def folder_digest(folder: Path) -> str:
    """Digest of an adapter folder as PEFT saves it.

    Raises:
        DigestMissing: a file is not there.
        AdapterCorrupt: the configuration is not a JSON object.
    """
    try:
        with (folder / TENSORS_FILE).open("rb") as tensors:
            return adapter_digest(semantic_config(read_config(folder)), iter(lambda: tensors.read(_BLOCK), b""))
    except FileNotFoundError as error:
        raise DigestMissing(f"{error.filename} is not there", action="Publish the adapter again") from error


def read_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json`` of a folder. Raises ``AdapterCorrupt`` or ``FileNotFoundError``."""
    return parse_config((folder / CONFIG_FILE).read_bytes())


def parse_config(body: bytes) -> dict[str, Any]:
    """``adapter_config.json`` from its bytes. Raises ``AdapterCorrupt``."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE as error:
        raise AdapterCorrupt(f"{CONFIG_FILE} is not a JSON object: {error}", action="Save the adapter again") from error
