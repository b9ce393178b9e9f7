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
        # All segments at once, padded to the longest: one by one, a step spends most of its time between kernels.
        lengths_q, lengths_k = cu_q.diff().long(), cu_k.diff().long()
        at_q, at_k = torch.arange(max_q), torch.arange(max_k)
        is_query, is_key = at_q < lengths_q[:, None], at_k < lengths_k[:, None]
        queries = q[(cu_q[:-1, None] + at_q).clamp(max=len(q) - 1)].transpose(1, 2)
        keys, values = (x[(cu_k[:-1, None] + at_k).clamp(max=len(k) - 1)].transpose(1, 2) for x in (k, v))
        # Query j of n sees the first (keys - n + j + 1) keys.
        last_seen = at_q + (lengths_k - lengths_q)[:, None]
        mask = (at_k <= last_seen[:, :, None]) & is_key[:, None]
        out = F.scaled_dot_product_attention(
            queries, keys, values, mask[:, None], scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)[is_query]


def stand_in() -> None:
    """Put both stand-ins in place, if there is no GPU. Call it before the trainer is made."""
    if torch.cuda.is_available():
        return
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    packing._flash_attn = lambda: TorchAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
