"""From a PEFT model to an adapter's bytes. Gathering is a collective: every rank calls it, the main one gets bytes."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftConfig, get_peft_model_state_dict
from safetensors.torch import save
from torch.distributed.tensor import DTensor

from lorabridge.bridge.adapter import Adapter


def gather(model: Any, adapter_name: str, main: bool) -> dict[str, torch.Tensor] | None:
    """Copies of the adapter's tensors on the CPU, under the names PEFT saves them by; None on other ranks.

    Args:
        model: the unwrapped ``PeftModel``.
        adapter_name: which of its adapters.
        main: whether this rank gets the tensors. Sharded ones are gathered on all.
    """
    own = {name: p for name, p in model.named_parameters() if "lora_" in name and f".{adapter_name}." in name}
    gathered: dict[str, torch.Tensor] = {}
    for name, parameter in own.items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if main:
            # A copy, since the next step writes into the parameter while the bytes are still being made.
            gathered[name] = whole.detach().to("cpu", copy=True)
    if not main:
        return None
    return dict(get_peft_model_state_dict(model, gathered, adapter_name=adapter_name))


def serialise(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Adapter:
    """The adapter of gathered tensors and a PEFT configuration (``LoraConfig.to_dict()``)."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return Adapter.of(config, save(contiguous, metadata={"format": "pt"}))


def plain_config(config: PeftConfig) -> dict[str, Any]:
    """A PEFT configuration as plain JSON values, as in ``adapter_config.json``."""
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in config.to_dict().items()
    }
