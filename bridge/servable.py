"""May this adapter be published? Whatever vLLM would refuse, or would accept and serve wrong, is refused before."""

from __future__ import annotations

from typing import Any

import numpy as np

from lorabridge.bridge.adapter import Adapter, Tensor, check_config, header_length, rank_of, read_header
from lorabridge.bridge.base_shapes import Shapes
from lorabridge.bridge.digest import parse_config
from lorabridge.bridge.errors import AdapterUnservable

_PREFIX = "base_model.model."
_ACTION = "Change the adapter's configuration and publish again"
_NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_BF16_EXPONENT = np.uint16(0x7F80)  # all ones: not a number, or infinite


def check_adapter(adapter: Adapter, max_rank: int, shapes: Shapes | None) -> dict[str, Tensor]:
    """Refuse an adapter that vLLM cannot serve, or accepts and serves wrong. Returns the tensors' header.

    Args:
        adapter: what is to be published.
        max_rank: largest LoRA rank that the servers take.
        shapes: the base's matrices; None if they are not known, and then modules and shapes are not compared.

    Raises:
        AdapterUnservable: named field or tensor.
        AdapterCorrupt: unreadable bytes.
    """
    config = parse_config(adapter.config)
    check_config(config, max_rank)
    header = read_header(adapter.tensors)
    if not header:
        raise AdapterUnservable("the tensors file is empty; vLLM would serve the base", action=_ACTION)
    for name, tensor in header.items():
        if "lm_head" in name or "embed_tokens" in name:
            raise AdapterUnservable(f"tensor {name}: vLLM serves it wrong", action=_ACTION)
        half, other = ("lora_A", "lora_B") if ".lora_A." in name else ("lora_B", "lora_A")
        if f".{half}." not in name:
            raise AdapterUnservable(f"tensor {name} is neither lora_A nor lora_B", action=_ACTION)
        if name.replace(f".{half}.", f".{other}.") not in header:
            raise AdapterUnservable(f"tensor {name} has no {other}", action=_ACTION)
        rank = rank_of(name.removeprefix(_PREFIX).partition(f".{half}.")[0], config)
        if len(tensor.shape) != 2 or tensor.shape[0 if half == "lora_A" else 1] != rank:
            raise AdapterUnservable(
                f"tensor {name} has shape {list(tensor.shape)} where the configuration says rank {rank}",
                action=_ACTION,
            )
        if shapes is not None:
            _check_fits(name, half, tensor, shapes)
    _check_targets(config, header)
    _check_finite(adapter.tensors, header)
    return header


def _check_fits(name: str, half: str, tensor: Tensor, shapes: Shapes) -> None:
    """vLLM lets a name that no module has pass by, and copies a matrix that is too small into a corner."""
    module = name.removeprefix(_PREFIX).partition(f".{half}.")[0]
    if not name.startswith(_PREFIX) or module not in shapes:
        raise AdapterUnservable(
            f"tensor {name}: the base model has no matrix {module}; the base would answer for it",
            action="Train on the base model that is served, and save with PEFT",
        )
    out, into = shapes[module]
    given, wanted = (tensor.shape[1], into) if half == "lora_A" else (tensor.shape[0], out)
    if given != wanted:
        side = "inputs" if half == "lora_A" else "outputs"
        raise AdapterUnservable(
            f"tensor {name} has {given} {side} where {module} of the base model has {wanted}",
            action="Train on the base model that is served",
        )


def _check_targets(config: dict[str, Any], header: dict[str, Tensor]) -> None:
    """A target without a tensor is a module that the base would answer for."""
    targets = config.get("target_modules")
    if not isinstance(targets, list | tuple):
        return  # a pattern: which modules it means, only PEFT can say
    modules = {name.partition(".lora_")[0] for name in header}
    for target in targets:
        if not any(module == target or module.endswith(f".{target}") for module in modules):
            raise AdapterUnservable(f"target_modules names {target!r}, and no tensor is for it", action=_ACTION)


def _check_finite(tensors: bytes, header: dict[str, Tensor]) -> None:
    """One that is not a number, or infinite, poisons every token that is sampled with it."""
    start = 8 + header_length(tensors[:8], len(tensors))
    for name, tensor in header.items():
        begin, end = tensor.data_offsets
        kind = _NUMBERS[tensor.dtype]
        values = np.frombuffer(tensors, kind, count=(end - begin) // np.dtype(kind).itemsize, offset=start + begin)
        finite = (values & _BF16_EXPONENT) != _BF16_EXPONENT if tensor.dtype == "BF16" else np.isfinite(values)
        if not finite.all():
            place = int(np.argmin(finite))
            raise AdapterUnservable(
                f"tensor {name} holds a value that is no finite number, at {place}",
                action="Training has diverged: go back to an earlier version, and lower the learning rate",
            )
