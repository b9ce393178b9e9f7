"""What crosses a generator's doors, between a worker and the plugin."""

from __future__ import annotations

import msgspec

from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.residency import KvMode, Residency

GENERATE = "/inference/v1/generate"
UNIX = "unix:"


class SwapRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve version ``version`` of ``policy``, the adapter ``digest``, if you are ``instance`` at ``epoch``.

    ``kv`` is what becomes of the KV of running requests; None leaves it to the server's configuration. ``fence`` is the
    number of the sender's lease, 0 without one; ``operation`` names this swap: repeated, it is the same swap.
    """

    policy: str
    version: int
    digest: str
    instance: str
    epoch: int
    kv: KvMode | None = None
    fence: int = 0
    operation: str = ""


class SwapReply(msgspec.Struct, frozen=True, kw_only=True):
    """The epoch that now runs, and the milliseconds each phase took (empty if it was served already)."""

    residency: Residency
    phases_ms: dict[str, float]


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided when the server started."""

    base: Fingerprint
    dtype: str
    logprobs_mode: str
    max_lora_rank: int
    max_loras: int
    max_model_len: int


class GeneratorState(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to know before it uses a generator; ``running`` requests are in flight.

    ``fence`` is the highest lease number that it has seen.
    """

    residency: Residency
    quarantine: str | None
    running: int
    facts: EngineFacts
    fence: int = 0
