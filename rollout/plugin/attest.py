"""Attestation, in every worker: is the adapter in the engine's slot the one in this folder?

Each rank loads the folder afresh, lets each module place it again (packing, scaling and tensor-parallel slices are the
module's own), and compares what the slot held with what it holds now. It overwrites the slot with what it compared
with, so after a mismatch the slot must be loaded again.
"""

from __future__ import annotations

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
            stacked = [t for t in (*module.lora_a_stacked, *module.lora_b_stacked) if t is not None]
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
        return {"resident": True, "applied": applied, "different": different, "unplaced": sorted(unplaced)}

    def lorabridge_resident(self) -> list[int]:
        """Integer ids of the adapters that sit in a slot."""
        slots: list[int | None] = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        return [lora_int_id for lora_int_id in slots if lora_int_id is not None]
