"""Which matrices a base model has, and their shapes: what an adapter for it must fit. Read from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from lorabridge.bridge.adapter import Tensor, header_length, parse_header
from lorabridge.bridge.codec import UNREADABLE
from lorabridge.bridge.errors import AdapterCorrupt, ModelError

Shapes: TypeAlias = Mapping[str, tuple[int, int]]
"""Module name to (out, in), as in ``model.layers.0.self_attn.q_proj``."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_INDEX = 64 * 1024 * 1024


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def base_shapes(folder: Path) -> Shapes | None:
    """Every matrix of the base model in ``folder``; None if it has no safetensors, so that nothing can be compared.

    Raises:
        ModelError: its files are cut short or unreadable.
    """
    files = _files(folder)
    if not files:
        return None
    shapes: dict[str, tuple[int, int]] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name.endswith(".weight") and len(tensor.shape) == 2:
                out, into = tensor.shape
                shapes[name.removesuffix(".weight")] = (out, into)
    return shapes


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = msgspec.json.decode(index.read_bytes()[:_MAX_INDEX], type=_Index).weight_map.values()
        except UNREADABLE as error:
            raise ModelError(f"{index} is unreadable: {error}", action="Download or save the model again") from error
        return sorted({folder / Path(name).name for name in names})
    return [folder / _SINGLE] if (folder / _SINGLE).is_file() else []


def _header(file: Path) -> dict[str, Tensor]:
    try:
        with file.open("rb") as stream:
            length = header_length(stream.read(8), file.stat().st_size)
            return parse_header(stream.read(length))
    except (OSError, AdapterCorrupt) as error:
        raise ModelError(f"{file} cannot be read: {error}", action="Download or save the model again") from error
