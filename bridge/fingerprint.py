"""Which base model is this? Checkpoint, tokenizer and chat template, each a digest of its own.

Trainer and generator must agree on all three: an adapter trained on one checkpoint means nothing on another, and a
template that differs gives the same text other tokens. A tokenizer is known by its files and by what it does: the ids
of a fixed text, which another release of the tokenizers library could change with the same files.
"""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from pathlib import Path

import msgspec

from lorabridge.bridge.codec import canonical_json
from lorabridge.bridge.errors import ModelError
from lorabridge.bridge.model import read_json, weight_files

PROBE = (
    " Hello  world\n\n\tdon't \u201cna\u00efve\u201d fac\u0327ade e\u0301 \ufb01 \u00bd \u00b2 1234567.89e-3 "
    "\u4e2d\u6587 \ud55c\uad6d \u0627\u0644\u0639 \U0001f642 \U0001f469\u200d\U0001f467 \u00a0\u200b\ufeff\r\n"
    "<s></s><unk><|endoftext|><|im_start|>user<|im_end|>[INST] "
)
"""What tokenizers disagree on: white space, composed characters, digits, scripts, joiners, special tokens."""

_PARTS = ("checkpoint", "tokenizer", "template")
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
_BLOCK = 1 << 20


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What tells people how two base models differ; no part of their identity.

    Attributes:
        config: digest of ``config.json``.
        weights: bytes of the weight files.
        tokens: ids of ``PROBE``; None where there is no ``tokenizer.json``, or it cannot encode such a text.
        template: characters of the chat template.
    """

    config: str
    weights: int
    tokens: tuple[int, ...] | None
    template: int


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of a base model's checkpoint (weights and architecture), tokenizer (files and ids) and chat template."""

    checkpoint: str
    tokenizer: str
    template: str
    traits: Traits | None = None

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the parts in which the two differ."""
        return [part for part in _PARTS if getattr(self, part) != getattr(other, part)]

    def how(self, other: Fingerprint, part: str) -> str | None:
        """How a part that differs does, this one's first: ``12 characters against 14``. None if nothing tells."""
        mine, theirs = self.traits, other.traits
        if mine is None or theirs is None:
            return None
        if part == "template":
            return f"{mine.template} characters against {theirs.template}"
        if part == "tokenizer":
            return _how_tokens(mine.tokens, theirs.tokens)
        if mine.config != theirs.config:
            return "another config.json"
        return f"the same config.json and other weights: {mine.weights} bytes against {theirs.weights}"

    @property
    def digest(self) -> str:
        """One digest over the three: what a span of the base model itself would carry."""
        parts = {part: getattr(self, part) for part in _PARTS}
        return "sha256:" + hashlib.sha256(canonical_json(parts)).hexdigest()


def fingerprint(folder: Path) -> Fingerprint:
    """Fingerprint of the model in ``folder``. Reads every weight file once (about 1 s per 2 GB).

    Raises:
        ModelError: no such folder, no safetensors weights in it, or a tokenizer that cannot be read.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is not a model folder (no config.json)", action="Check [model] path")
    weights = weight_files(folder)
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    # The library version that saved a file does not change what the model computes.
    config = canonical_json({
        k: v for k, v in read_json(folder / "config.json").items() if k not in ("transformers_version", "_name_or_path")
    })  # fmt: skip
    behaviour = {k: v for k, v in tokenizer_config.items() if k not in ("chat_template", "name_or_path")}
    tokens, template = _tokens(folder / "tokenizer.json"), _template(folder, tokenizer_config)
    return Fingerprint(
        checkpoint=_of([("config", config), *((w.name, _file(w)) for w in weights)]),
        tokenizer=_of(
            [("config", canonical_json(behaviour)), ("tokens", canonical_json(tokens))]
            + [(name, _file(folder / name)) for name in _TOKENIZER if (folder / name).is_file()]
        ),
        template=_of([("template", template)]),
        traits=Traits(
            config=_of([("config", config)]),
            weights=sum(w.stat().st_size for w in weights),
            tokens=tokens,
            template=len(template.decode(errors="replace")),
        ),
    )


def _how_tokens(mine: tuple[int, ...] | None, theirs: tuple[int, ...] | None) -> str:
    if mine == theirs:
        return "other files, though a fixed text makes the same tokens"
    if mine is None or theirs is None:
        return f"a fixed text makes {_count(mine)} against {_count(theirs)}"
    at, (one, other) = next(
        (at, pair) for at, pair in enumerate(zip_longest(mine, theirs, fillvalue="the end")) if pair[0] != pair[1]
    )
    return f"a fixed text makes {len(mine)} tokens against {len(theirs)}, and token {at} is {one} against {other}"


def _count(tokens: tuple[int, ...] | None) -> str:
    return "none" if tokens is None else f"{len(tokens)} tokens"


def _tokens(file: Path) -> tuple[int, ...] | None:
    """Ids of ``PROBE``, special tokens added, by the library that transformers and vLLM use."""
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{file} is no tokenizer: {error}", action="Save the tokenizer again") from error
    try:
        return tuple(tokenizer.encode(PROBE).ids)
    except Exception:  # a vocabulary without a token for what is unknown
        return None


def _template(folder: Path, tokenizer_config: dict[str, object]) -> bytes:
    """A template stands in its own file or in the tokenizer's configuration; the file wins, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_bytes()
    template = tokenizer_config.get("chat_template")
    return template.encode() if isinstance(template, str) else canonical_json(template)


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
