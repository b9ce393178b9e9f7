"""A worker in which something writes into an adapter's slot behind the plugin's back: when a file says so, once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lorabridge.rollout.plugin.attest import Attest

FILE = "TEST_TAMPER_FILE"


class AttestOfWhatWasTamperedWith(Attest):
    """The plugin's own, but for what happens before it looks."""

    def lorabridge_unchanged(self, lora_int_id: int) -> dict[str, Any]:
        order = Path(os.environ[FILE])
        if order.exists():
            order.unlink()
            adapters = self.model_runner.lora_manager._adapter_manager
            slot = adapters.lora_index_to_id.index(lora_int_id)
            next(iter(adapters.modules.values())).lora_b_stacked[0][slot].view(-1)[3] += 1e-6
        return super().lorabridge_unchanged(lora_int_id)
