"""The CPU stand-in for FlashAttention against attention written out."""

from __future__ import annotations

import pytest
import torch

from lorabridge.trainer.cpu import TorchAttention


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_causal_attention_of_the_last_queries_over_all_keys(groups: int) -> None:
    torch.manual_seed(0)
    heads, size = 4, 8
    lengths = [(3, 3), (2, 5), (1, 4)]
    cu_q = torch.tensor([0, 3, 5, 6])
    cu_k = torch.tensor([0, 3, 8, 12])
    q, k, v = (
        torch.randn(6, heads, size),
        torch.randn(12, heads // groups, size),
        torch.randn(12, heads // groups, size),
    )

    out = TorchAttention.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 5, softmax_scale=0.3)

    for segment, (queries, keys) in enumerate(lengths):
        for j in range(queries):
            for head in range(heads):
                seen = slice(int(cu_k[segment]), int(cu_k[segment]) + keys - queries + j + 1)
                scores = (k[seen, head // groups] @ q[int(cu_q[segment]) + j, head]) * 0.3
                expected = scores.softmax(0) @ v[seen, head // groups]
                assert torch.allclose(out[int(cu_q[segment]) + j, head], expected, atol=1e-6)


def test_what_it_does_not_know_it_refuses() -> None:
    x, ends = torch.randn(1, 1, 8), torch.tensor([0, 1])
    with pytest.raises(NotImplementedError):
        TorchAttention.flash_attn_varlen_func(x, x, x, ends, ends, 1, 1, window_size=(4, 0))
