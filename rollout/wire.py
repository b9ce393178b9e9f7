"""What crosses a generator's doors, between a worker and the plugin."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from lorabridge.bridge.canary import Judgement, Logprobs
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.residency import KvMode, Residency, SwapMode

GENERATE = "/inference/v1/generate"
BEGAN_ON = "lorabridge-digest"
"""Header of an answer from a policy that is pinned: the digest of the adapter that all of it was sampled with."""
UNIX = "unix:"


def name_of(url: str, machine: str) -> str:
    """What a generator is called in Redis and on record: its public URL, as it is meant on every host of a run.

    A host that says no more than "here" (loopback, or every address) stands for the name of the ``machine``, since
    servers of two hosts must not have one name.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = ip_address(host)
        here = address.is_loopback or address.is_unspecified
    except ValueError:
        here = host in ("", "localhost")
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{machine}{port}" if here else url


class SwapRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve version ``version`` of ``policy``, the adapter ``digest``, if you are ``instance`` at ``epoch``.

    ``mode`` is how, which does not change while the policy is served, and ``kv`` what becomes of the KV of running
    requests in flight; None leaves either to the server's configuration. ``fence`` is the number of the sender's lease,
    0 without one; ``operation`` names this swap: repeated, it is the same swap.
    """

    policy: str
    version: int
    digest: str
    instance: str
    epoch: int
    kv: KvMode | None = None
    mode: SwapMode | None = None
    fence: int = 0
    operation: str = ""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give the logprobs of these token ids, from the second on, under a policy's adapter and without any."""

    policy: str
    sequences: Annotated[
        tuple[Annotated[tuple[int, ...], msgspec.Meta(min_length=2, max_length=1024)], ...], msgspec.Meta(max_length=64)
    ]


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Natural logarithms, and the epoch that all of them are of."""

    adapter: Logprobs
    base: Logprobs
    label: str


class SwapReply(msgspec.Struct, frozen=True, kw_only=True):
    """The epoch that now runs, and the milliseconds each phase took (empty if it was served already)."""

    residency: Residency
    phases_ms: dict[str, float]


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided when the server started. ``kv_tokens``: for how many tokens there is KV, 0 if it is not said."""

    base: Fingerprint
    dtype: str
    logprobs_mode: str
    max_lora_rank: int
    max_loras: int
    max_model_len: int
    kv_tokens: int = 0


class GeneratorState(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to know before it uses a generator; ``running`` requests are in flight.

    ``quarantine`` says why it samples nothing, and ``quarantined_ms`` since when (milliseconds since 1970, its clock).
    ``fence`` is the highest lease number that it has seen, ``canary`` the last judgement that it was told of, and
    ``failed`` says why the last swap was not carried out, None if it was.
    """

    residency: Residency
    quarantine: str | None
    running: int
    facts: EngineFacts
    fence: int = 0
    canary: Judgement | None = None
    quarantined_ms: int | None = None
    failed: str | None = None
