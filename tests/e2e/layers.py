"""What attestation finds in vLLM's own layers, as JSON: ``python -m tests.e2e.layers``, a process without the tests'.

By layer, for each slot that an adapter was put into: whether each slot of each matrix holds anything.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.lora.layers import ReplicatedLinearWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.model_executor.layers.linear import ReplicatedLinear

from lorabridge.rollout.plugin.attest import matrices

SLOTS, RANK = 3, 8


def layers() -> dict[str, tuple[Any, torch.Tensor, torch.Tensor]]:
    """A layer of each kind, and an adapter's A and B for it."""
    base: Any = SimpleNamespace(org_vocab_size=20, embedding_dim=8, weight=torch.zeros(20, 8))
    linear = ReplicatedLinearWithLoRA(ReplicatedLinear(8, 16, bias=False, disable_tp=True))
    return {
        "embedding": (VocabParallelEmbeddingWithLoRA(base), torch.ones(RANK, 20), torch.ones(8, RANK)),
        "linear": (linear, torch.ones(RANK, 8), torch.ones(16, RANK)),
    }


def main() -> None:
    found: dict[str, list[list[list[bool]]]] = {}
    config = LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, lora_dtype=torch.float32)
    for slot in range(SLOTS):
        for name, (layer, lora_a, lora_b) in layers().items():
            layer.create_lora_weights(SLOTS, config)
            layer.set_lora(slot, lora_a, lora_b)
            held = [[bool(matrix[each].any()) for each in range(SLOTS)] for matrix in matrices(layer)]
            found.setdefault(name, []).append(held)
    print(json.dumps(found))


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        main()
