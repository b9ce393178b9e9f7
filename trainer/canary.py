"""A version's canary, computed beside the training thread on a copy of the model that shares the base's weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from peft import set_peft_model_state_dict
from torch.distributed.tensor import DTensor

from lorabridge.bridge.canary import Canary, Logprobs, sequences

log = logging.getLogger("lorabridge.trainer")


class CanaryModel:
    """Scores a canary's sequences under published tensors.

    The base's parameters and buffers are those of the model in training, which does not change them; only the adapter's
    are its own. So it costs the memory of one adapter.

    Args:
        model: the unwrapped ``PeftModel`` in training.
        adapter_name: which of its adapters.
    """

    def __init__(self, model: Any, adapter_name: str) -> None:
        shared = {
            id(tensor): tensor
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if "lora_" not in name
        }
        self._model = copy.deepcopy(model, shared).eval()
        # What the trainer put in the way of the model's own forward works on the trainer's model, and its attention
        # expects rows that it has packed.
        for module in self._model.modules():
            vars(module).pop("forward", None)
        self._model.get_base_model().set_attn_implementation("sdpa")
        self._adapter_name = adapter_name
        self._vocabulary = int(self._model.get_base_model().config.vocab_size)
        self._dtype = str(next(iter(self._model.get_base_model().parameters())).dtype).removeprefix("torch.")

    def canary(self, tensors: Mapping[str, torch.Tensor], seed: str) -> Canary:
        """The canary of an adapter's tensors, as ``gather`` gives them."""
        set_peft_model_state_dict(self._model, dict(tensors), adapter_name=self._adapter_name)
        drawn = sequences(self._vocabulary, seed)
        with torch.inference_mode():
            adapter = self._score(drawn)
            with self._model.disable_adapter():
                base = self._score(drawn)
        return Canary(sequences=drawn, adapter=adapter, base=base, dtype=self._dtype)

    def _score(self, drawn: tuple[tuple[int, ...], ...]) -> Logprobs:
        ids = torch.tensor(drawn, device=self._model.device)
        logprobs = self._model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
        return tuple(tuple(row) for row in chosen.tolist())


def canary_model(model: Any, adapter_name: str) -> CanaryModel | None:
    """A canary model, or None where there can be none: a sharded base is whole on no rank."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        log.warning("the model is sharded: versions are published without canaries")
        return None
    return CanaryModel(model, adapter_name)
