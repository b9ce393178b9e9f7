"""What a base model takes adapters on: its linear layers and their shapes, read from the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lorabridge.bridge.adapter import Tensor, header_length, parse_header
from lorabridge.bridge.errors import AdapterCorrupt, ModelError
from lorabridge.bridge.model import read_json, weight_files

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_AGAIN = "Download or save the model again"
_HEADLESS = re.compile(r"(layers|h|blocks)\.\d+\.")
_NUMBERED = re.compile(r"(^|\.)\d+\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HEADS = ("lm_head", "embed_out", "wte", "wpe", "word_embeddings")
_ROUTERS = ("gate", "router", "shared_expert_gate")
_PACKED = ("qweight", "weight_packed")
_PACKED_DTYPES = ("U8", "I32", "U32", "I64", "F4")


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """The modules of a base model, as an adapter sees them.

    Attributes:
        linear: linear layers that can take an adapter: name (``model.layers.0.self_attn.q_proj``) to (out, in).
        closed: the others that have weights, and why they take none: the end of a sentence that begins with the name.
    """

    linear: Mapping[str, tuple[int, int]]
    closed: Mapping[str, str]


def base_shapes(folder: Path) -> Shapes:
    """The modules of the base model in ``folder``.

    Raises:
        ModelError: no safetensors under the names that transformers looks for, files cut short or unreadable, or
            modules under names that an adapter cannot have.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(folder):
        tensors |= _header(file)
    shapes = shapes_of(tensors, read_json(folder / "config.json"))
    if headless := next((m for m in shapes.linear if _HEADLESS.match(m)), None):
        raise ModelError(
            f"{folder} was saved without its head: {headless} has another name once it is loaded, so that no adapter "
            "can be compared with it",
            action="Load it with AutoModelForCausalLM and save it again",
        )
    return shapes


def shapes_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Shapes:
    """The modules that stored tensors are the weights of, by the model's ``config.json``."""
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    several = any(isinstance(config.get(f"{sense}_config"), dict) for sense in ("vision", "audio", "thinker"))
    experts = any(".experts." in name for name in tensors)
    vocabulary = config.get("vocab_size")
    linear: dict[str, tuple[int, int]] = {}
    closed: dict[str, str] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", *_PACKED):
            continue
        if several and "language_model" not in module.split("."):
            closed[module] = "is outside the language model, where vLLM takes no adapter"
        elif _is_extra(module, layers):
            continue
        elif kind in _PACKED or tensor.dtype in _PACKED_DTYPES:
            closed[module] = "is stored packed (quantised), so that its shape cannot be read"
        elif why := _closed(module, tensor.shape, experts, vocabulary):
            closed[module] = why
        else:
            linear[module] = (tensor.shape[0], tensor.shape[1])
    return Shapes(linear=linear, closed=closed)


def _is_extra(module: str, layers: Any) -> bool:
    """Layers for predicting several tokens are stored behind the last one, or under ``mtp``; nobody loads them here."""
    layer = _LAYER.search(module)
    return module.startswith("mtp.") or (isinstance(layers, int) and layer is not None and int(layer[1]) >= layers)


def _closed(module: str, shape: tuple[int, ...], experts: bool, vocabulary: Any) -> str | None:
    last = module.rpartition(".")[2]
    outside = not _NUMBERED.search(module)
    if last in _HEADS or "embed" in last or (outside and len(shape) == 2 and shape[0] == vocabulary):
        return "is an embedding or the output head: with those PEFT saves the base's own weights, which vLLM passes by"
    if len(shape) != 2:
        return "is no linear layer"
    if ".experts." in module or (experts and last in _ROUTERS):
        return "is an expert or a router; that vLLM serves those as PEFT trains them is not proven"
    if last == "kv_b_proj":
        # vllm/model_executor/layers/attention/mla_attention.py splits its weight once, and decodes with the halves.
        return "is folded into attention when vLLM loads the base, so that decoding passes an adapter by"
    return None


def _files(folder: Path) -> list[Path]:
    there = weight_files(folder)
    index = folder / _INDEX
    if index.is_file():
        names = read_json(index).get("weight_map")
        try:
            return sorted({folder / Path(name).name for name in msgspec.convert(names, dict[str, str]).values()})
        except msgspec.ValidationError as error:
            raise ModelError(f"{index} has no weight_map: {error}", action=_AGAIN) from error
    if folder / _SINGLE not in there:
        raise ModelError(
            f"{folder} has {there[0].name}, and neither {_SINGLE} nor {_INDEX}, which transformers looks for",
            action=_AGAIN,
        )
    return [folder / _SINGLE]


def _header(file: Path) -> dict[str, Tensor]:
    try:
        with file.open("rb") as stream:
            length = header_length(stream.read(8), file.stat().st_size)
            return parse_header(stream.read(length))
    except (OSError, AdapterCorrupt) as error:
        raise ModelError(f"{file} cannot be read: {error}", action=_AGAIN) from error
