"""What TRL 1.16's AsyncGRPOTrainer needs to run without a GPU.

Two touch points: its tree attention asks a kernel hub for FlashAttention 3, and it looks up the GPU's peak FLOPs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class TorchAttention:
    """The one function that TRL's tree attention calls, in plain torch."""

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int,
        max_k: int, softmax_scale: float | None = None, causal: bool = True,
        window_size: tuple[int, int] = (-1, -1), **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention over segments laid end to end; a segment's queries are the last of its keys.

        Args:
            q: queries, (sum of query lengths, heads, head size).
            k, v: keys and values, (sum of key lengths, KV heads, head size).
            cu_q, cu_k: segment boundaries, (segments + 1).

        Raises:
            NotImplementedError: sliding windows.
        """
        if window_size != (-1, -1) or not causal:
            raise NotImplementedError("the CPU stand-in for FlashAttention knows neither windows nor non-causal masks")
        starts_q, starts_k, groups = cu_q.tolist(), cu_k.tolist(), q.shape[1] // k.shape[1]
        out = []
        for i in range(len(starts_q) - 1):
            queries = q[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
            keys, values = (
                x[starts_k[i] : starts_k[i + 1]].transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v)
            )
            # Query j of n sees the first (keys - n + j + 1) keys.
            mask = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - queries.shape[1])
            seen = F.scaled_dot_product_attention(queries[None], keys[None], values[None], mask, scale=softmax_scale)
            out.append(seen[0].transpose(0, 1))
        return torch.cat(out)


def stand_in() -> None:
    """Put both stand-ins in place, if there is no GPU. Call it before the trainer is made."""
    if torch.cuda.is_available():
        return
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: TorchAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
