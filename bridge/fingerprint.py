"""Which base model is this? Checkpoint, tokenizer and chat template, each a digest of its own.

Trainer and generator must agree on all three: an adapter trained on one checkpoint means nothing on another, and a
template that differs gives the same text other tokens.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from lorabridge.bridge.codec import UNREADABLE, canonical_json
from lorabridge.bridge.errors import ModelError

_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
_BLOCK = 1 << 20


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of a base model's checkpoint (weights and architecture), tokenizer files and chat template."""

    checkpoint: str
    tokenizer: str
    template: str

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the parts in which the two differ."""
        return [part for part in ("checkpoint", "tokenizer", "template") if getattr(self, part) != getattr(other, part)]

    @property
    def digest(self) -> str:
        """One digest over the three: what a span of the base model itself would carry."""
        parts = {"checkpoint": self.checkpoint, "tokenizer": self.tokenizer, "template": self.template}
        return "sha256:" + hashlib.sha256(canonical_json(parts)).hexdigest()


def fingerprint(folder: Path) -> Fingerprint:
    """Fingerprint of the model in ``folder``. Reads every weight file once (about 1 s per 2 GB).

    Raises:
        ModelError: no such folder, or no safetensors weights in it.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder (no config.json)", action="Check [model] path")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{folder} has no *.safetensors weights", action="Save the model with safe_serialization")
    tokenizer_config = _json(folder / "tokenizer_config.json")
    # The library version that saved a file does not change what the model computes.
    config = {
        k: v for k, v in _json(folder / "config.json").items() if k not in ("transformers_version", "_name_or_path")
    }
    behaviour = {k: v for k, v in tokenizer_config.items() if k not in ("chat_template", "name_or_path")}
    return Fingerprint(
        checkpoint=_of([("config", canonical_json(config)), *((w.name, _file(w)) for w in weights)]),
        tokenizer=_of(
            [("config", canonical_json(behaviour))]
            + [(name, _file(folder / name)) for name in _TOKENIZER if (folder / name).is_file()]
        ),
        template=_of([("template", _template(folder, tokenizer_config))]),
    )


def _template(folder: Path, tokenizer_config: dict[str, object]) -> bytes:
    """A template stands in its own file or in the tokenizer's configuration; the file wins, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_bytes()
    template = tokenizer_config.get("chat_template")
    return template.encode() if isinstance(template, str) else canonical_json(template)


def _json(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except UNREADABLE as error:
        raise ModelError(f"{file} is not JSON: {error}", action="Save the model again") from error


def _file(file: Path) -> bytes:
    whole = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            whole.update(block)
    return whole.digest()


def _of(parts: list[tuple[str, bytes]]) -> str:
    whole = hashlib.sha256()
    for name, content in parts:
        whole.update(f"{name}\0{len(content)}\0".encode())
        whole.update(content)
    return "sha256:" + whole.hexdigest()
