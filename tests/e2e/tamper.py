"""A worker of the engine in which things go wrong for as long as a file says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch

from lorabridge.rollout.plugin.attest import Attest

FILE = "TEST_TAMPER_FILE"
Fault = Literal["changed", "emptied", "another's", "kept", "twice", "kept, unnoticed", "ignored, unnoticed"]
Contents = list[torch.Tensor]


class AttestOfWhatWasTamperedWith(Attest):
    """The plugin's own, but for what happens before it looks.

    When a slot is looked at again it may be ``changed`` a little, ``emptied`` or hold ``another's`` adapter. When one
    has just been loaded, the load may have changed nothing (``kept``) or have been applied ``twice``. Two faults the
    plugin's attestation is made not to notice: a load that changed nothing, and an adapter that is ignored.
    """

    def lorabridge_unchanged(self, lora_int_id: int) -> dict[str, Any]:
        fault = _order("changed", "emptied", "another's")
        held = self._slot(lora_int_id) if fault else []
        if fault == "changed":
            held[0].view(-1)[3] += 1e-6
        elif fault == "emptied":
            for matrix in held:
                matrix.zero_()
        elif fault == "another's":
            for number, matrix in enumerate(held):
                generator = torch.Generator().manual_seed(number)
                matrix.copy_(torch.randn(matrix.shape, generator=generator).to(matrix.dtype) * 0.05)
        return super().lorabridge_unchanged(lora_int_id)

    def lorabridge_attest(self, lora_int_id: int, path: str) -> dict[str, Any]:
        fault = _order("kept", "twice", "kept, unnoticed", "ignored, unnoticed")
        before = self.__dict__.setdefault("before", {})
        held = self._slot(lora_int_id)
        if fault == "kept":
            _fill(held, before[lora_int_id])
        elif fault == "twice":
            for matrix in held[len(held) // 2 :]:
                matrix.mul_(2)
        seen = super().lorabridge_attest(lora_int_id, path)
        if fault in ("kept, unnoticed", "ignored, unnoticed"):
            _fill(held, before[lora_int_id] if fault.startswith("kept") else [torch.zeros_like(one) for one in held])
            slot = self.model_runner.lora_manager._adapter_manager.lora_index_to_id.index(lora_int_id)
            self._proven()[lora_int_id] = self._sums(slot)
        if not seen["different"]:
            before[lora_int_id] = [matrix.clone() for matrix in held]
        return seen

    def _slot(self, lora_int_id: int) -> Contents:
        """What the slot holds: every A, then every B."""
        adapters = self.model_runner.lora_manager._adapter_manager
        slot = adapters.lora_index_to_id.index(lora_int_id)
        modules = list(adapters.modules.values())
        stacked = [t for m in modules for t in m.lora_a_stacked] + [t for m in modules for t in m.lora_b_stacked]
        return [t[slot] for t in stacked if t is not None]


def _fill(held: Contents, content: Contents) -> None:
    for matrix, value in zip(held, content, strict=True):
        matrix.copy_(value)


def _order(*faults: Fault) -> Fault | None:
    """The fault that is ordered, if it is one of these."""
    file = Path(os.environ[FILE])
    ordered = file.read_text() if file.exists() else None
    return next((fault for fault in faults if fault == ordered), None)
