"""What attestation finds in the slots of vLLM's own embedding, as JSON, apart from the tests' process:
``python -m tests.e2e.layers``.

For each slot that an adapter was put into: by matrix, whether each slot holds anything.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

from lorabridge.rollout.plugin.attest import matrices

SLOTS, RANK = 3, 8
VOCABULARY, WIDTH = 20, 12


def held(slot: int) -> list[list[bool]]:
    """After an adapter went into ``slot``."""
    base: Any = SimpleNamespace(
        org_vocab_size=VOCABULARY, embedding_dim=WIDTH, weight=torch.zeros(VOCABULARY, WIDTH)
    )  # fmt: skip
    layer = VocabParallelEmbeddingWithLoRA(base)
    layer.create_lora_weights(SLOTS, LoRAConfig(max_lora_rank=RANK, max_loras=SLOTS, lora_dtype=torch.float32))
    layer.set_lora(slot, torch.ones(RANK, VOCABULARY), torch.ones(WIDTH, RANK))
    return [[bool(matrix[each].any()) for each in range(SLOTS)] for matrix in matrices(layer)]


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()):
        print(json.dumps([held(slot) for slot in range(SLOTS)]))
