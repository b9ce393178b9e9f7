"""Attestation, in every worker: is the adapter in the engine's slot the one in this folder?

Each rank loads the folder afresh, lets each module place it again (packing, scaling and tensor-parallel slices are the
module's own), and compares what the slot held with what it holds now. It overwrites the slot with what it compared
with, so after a mismatch the slot must be loaded again. What was proven is kept as sums, so that a slot that changes
behind our back is noticed later without reading the adapter again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any


class Attest:
    """``--worker-extension-cls``: its methods become methods of vLLM's worker."""

    model_runner: Any

    def lorabridge_attest(self, lora_int_id: int, path: str) -> dict[str, Any]:
        """Compare the slot of an adapter with a folder.

        Returns:
            ``resident``; and if it is, ``applied`` (modules the adapter changes), ``different`` (modules whose slot
            held something else) and ``unplaced`` (weights in the folder that no module takes: the base would answer
            for them).
        """
        import torch
        from vllm.lora.request import LoRARequest

        lora_manager = self.model_runner.lora_manager
        adapters = lora_manager._adapter_manager
        if lora_int_id not in adapters.lora_index_to_id:
            return {"resident": False}
        slot = adapters.lora_index_to_id.index(lora_int_id)
        fresh = lora_manager._load_adapter(LoRARequest("attest", lora_int_id, path))
        adapters._create_merged_loras_inplace(fresh)
        unplaced, different, applied = set(fresh.loras), [], 0
        for name, module in adapters.modules.items():
            stacked = matrices(module)
            before = [t[slot].clone() for t in stacked]
            weights = adapters._get_lora_layer_weights(fresh, name)
            if weights:
                applied += 1
                unplaced.discard(name)
                module.set_lora(slot, weights.lora_a, weights.lora_b)
                same = all(torch.equal(b, t[slot]) for b, t in zip(before, stacked, strict=True))
            else:
                same = not any(b.any() for b in before)
            if not same:
                different.append(name)
        if not different and not unplaced:
            self._proven()[lora_int_id] = self._sums(slot)
        return {"resident": True, "applied": applied, "different": different, "unplaced": sorted(unplaced)}

    def lorabridge_unchanged(self, lora_int_id: int) -> dict[str, Any]:
        """Compare the slot of an adapter with what it was when it was proven, without reading the adapter again.

        Returns:
            ``resident``; and if it is, ``changed`` (modules whose slot is not what it was).
        """
        slots: list[int | None] = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        proven = self._proven().get(lora_int_id)
        if lora_int_id not in slots or proven is None:
            return {"resident": False}
        now = self._sums(slots.index(lora_int_id))
        return {"resident": True, "changed": [name for name, sums in proven.items() if now[name] != sums]}

    def _proven(self) -> dict[int, dict[str, list[int]]]:
        """Sums of each proven adapter's slot, by its integer id."""
        found: dict[int, dict[str, list[int]]] = self.__dict__.setdefault("lorabridge_proven", {})
        return found

    def _sums(self, slot: int) -> dict[str, list[int]]:
        """A sum over the bits of each module's matrices in a slot, every element weighted by its place."""
        adapters = self.model_runner.lora_manager._adapter_manager
        return {name: [_sum(t[slot]) for t in matrices(module)] for name, module in adapters.modules.items()}

    def lorabridge_resident(self) -> list[int]:
        """Integer ids of the adapters that sit in a slot, or that the engine holds in memory."""
        manager = self.model_runner.lora_manager
        slots: list[int | None] = manager._adapter_manager.lora_index_to_id
        return sorted({lora_int_id for lora_int_id in slots if lora_int_id is not None} | manager.list_adapters())

    def lorabridge_forget(self, lora_int_id: int) -> None:
        """An adapter has been taken out: what was proven of it is of no more use."""
        self._proven().pop(lora_int_id, None)


def matrices(module: Any) -> list[Any]:
    """Every matrix of a module, of all slots: tensors whose first dimension is the slot.

    Most modules have a tuple of them, those of embeddings and of the output have one tensor, and those of experts have
    theirs by another name (what they call ``lora_a_stacked`` is cut up by slot and expert).
    """
    import torch

    of_experts = hasattr(module, "w13_lora_a_stacked")
    kinds = ("w13_lora_a", "w2_lora_a", "w13_lora_b", "w2_lora_b") if of_experts else ("lora_a", "lora_b")
    found: list[Any] = []
    for kind in kinds:
        stacked = getattr(module, f"{kind}_stacked")
        found += [stacked] if isinstance(stacked, torch.Tensor) else [each for each in stacked if each is not None]
    return found


def _sum(matrix: Any) -> int:
    """Exact, and changed by any one element that changes: its weight is odd, so no bit of it is lost modulo 2**64.

    Of words of 8 bytes where they fit, so that it costs about as much as reading the matrix.
    """
    flat = matrix.contiguous().flatten()
    words = flat.view(_word(flat.numel() * flat.element_size(), flat.storage_offset() * flat.element_size()))
    return int((words * _weights(words.numel(), words.device)).sum())


def _word(length: int, offset: int) -> Any:
    """The widest integer that so many bytes at such an offset are made of."""
    import torch

    return next(kind for kind in (torch.int64, torch.int32, torch.int16) if not (length | offset) % kind.itemsize)


@lru_cache(maxsize=64)  # as many as there are shapes in a model, and few of them
def _weights(count: int, device: Any) -> Any:
    import torch

    return torch.arange(1, 2 * count + 1, 2, dtype=torch.int64, device=device)
