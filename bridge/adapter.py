"""An adapter in memory, and whether vLLM can serve it."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import msgspec

from lorabridge.bridge.codec import UNREADABLE
from lorabridge.bridge.digest import adapter_digest, parse_config, semantic_config
from lorabridge.bridge.errors import AdapterCorrupt, AdapterUnservable

# vLLM builds slots for these ranks only (vllm/config/lora.py).
SERVABLE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MAX_HEADER = 100 * 1024 * 1024
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ACTION = "Change the adapter's configuration and publish again"
_SAVE_AGAIN = "Save the adapter again"
# Inits that leave the base's weights alone (vllm/lora/peft_helper.py).
_PLAIN_INITS = ("true", "false", "gaussian", "eva", "orthogonal", "mica", "lora_ga")
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Tensor(msgspec.Struct, frozen=True):
    """A tensor as a safetensors header describes it; offsets are bytes from the end of the header."""

    dtype: str
    shape: Annotated[tuple[_Natural, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Natural, _Natural]


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """Canonical semantic configuration and safetensors bytes: exactly what the digest covers."""

    config: bytes
    tensors: bytes

    @classmethod
    def of(cls, config: dict[str, Any], tensors: bytes) -> Adapter:
        """From a PEFT configuration and safetensors bytes."""
        return cls(config=semantic_config(config), tensors=tensors)

    @property
    def digest(self) -> str:
        return adapter_digest(self.config, [self.tensors])


def read_header(tensors: bytes) -> dict[str, Tensor]:
    """Names, dtypes and shapes in a safetensors file; the data must be exactly as long as the header says.

    The format: https://github.com/huggingface/safetensors#format.

    Raises:
        AdapterCorrupt: truncated, overlong, or not a safetensors file.
    """
    length = int.from_bytes(tensors[:8], "little")
    if len(tensors) < 8 or length > min(_MAX_HEADER, len(tensors) - 8):
        raise AdapterCorrupt("the tensors file is cut short or not safetensors", action=_SAVE_AGAIN)
    try:
        raw = msgspec.json.decode(tensors[8 : 8 + length], type=dict[str, msgspec.Raw])
        header = {name: msgspec.json.decode(body, type=Tensor) for name, body in raw.items() if name != "__metadata__"}
    except UNREADABLE as error:
        raise AdapterCorrupt(f"the tensors file has no readable header: {error}", action=_SAVE_AGAIN) from error
    at = 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        size = math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 0)
        if tensor.dtype not in _ITEM_BYTES or begin != at or end - begin != size:
            raise AdapterCorrupt(
                f"tensor {name} ({tensor.dtype} {list(tensor.shape)}) does not fit its {end - begin} bytes",
                action="Save the adapter again, with floating-point tensors",
            )
        at = end
    if at != len(tensors) - 8 - length:
        raise AdapterCorrupt(
            f"the tensors file holds {len(tensors) - 8 - length} bytes of data where its header says {at}",
            action=_SAVE_AGAIN,
        )
    return header


def check_config(config: dict[str, Any], max_rank: int) -> None:
    """Refuse a PEFT configuration that vLLM cannot serve, before anything is trained or sent.

    Raises:
        AdapterUnservable: with a sentence naming the field.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterUnservable(f"peft_type is {kind!r}; vLLM serves LORA only", action=_ACTION)
    for field in ("use_dora", "modules_to_save", "target_parameters", "fan_in_fan_out", "trainable_token_indices",
                  "layer_replication", "alora_invocation_tokens", "lora_bias", "use_bdlora", "use_qalora",
                  "arrow_config", "kasa_config", "monteclora_config"):  # fmt: skip
        if config.get(field):
            raise AdapterUnservable(f"{field} is {config[field]!r}; vLLM cannot serve it as an adapter", action=_ACTION)
    if config.get("bias", "none") != "none":
        raise AdapterUnservable(f"bias is {config['bias']!r}; vLLM would drop the biases", action=_ACTION)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise AdapterUnservable(f"init_lora_weights {init!r} changes the base's own weights", action=_ACTION)
    targets = config.get("target_modules") or []
    for target in targets if isinstance(targets, list | tuple | set | frozenset) else [targets]:
        if not isinstance(target, str):
            raise AdapterCorrupt(f"target_modules holds {target!r}, not a name", action=_SAVE_AGAIN)
        if "lm_head" in target or "embed_tokens" in target:
            raise AdapterUnservable(f"target_modules names {target!r}; vLLM serves it wrong", action=_ACTION)
    rank = largest_rank(config)
    if rank > max_rank:
        raise AdapterUnservable(
            f"rank {rank} is above the {max_rank} that the servers take",
            action=f"Lower r, or serve with a max_lora_rank of {slot_rank(rank)}",
        )


def check_adapter(adapter: Adapter, max_rank: int) -> dict[str, Tensor]:
    """Refuse an adapter that vLLM cannot serve, or accepts and serves wrong. Returns the tensors' header.

    Raises:
        AdapterUnservable: named field or tensor.
        AdapterCorrupt: unreadable bytes.
    """
    config = parse_config(adapter.config)
    check_config(config, max_rank)
    header = read_header(adapter.tensors)
    if not header:
        raise AdapterUnservable("the tensors file is empty; vLLM would serve the base", action=_ACTION)
    for name, tensor in header.items():
        if "lm_head" in name or "embed_tokens" in name:
            raise AdapterUnservable(f"tensor {name}: vLLM serves it wrong", action=_ACTION)
        half, other = ("lora_A", "lora_B") if ".lora_A." in name else ("lora_B", "lora_A")
        if f".{half}." not in name:
            raise AdapterUnservable(f"tensor {name} is neither lora_A nor lora_B", action=_ACTION)
        if name.replace(f".{half}.", f".{other}.") not in header:
            raise AdapterUnservable(f"tensor {name} has no {other}", action=_ACTION)
        rank = _rank_of(name.removeprefix("base_model.model.").partition(f".{half}.")[0], config)
        if len(tensor.shape) != 2 or tensor.shape[0 if half == "lora_A" else 1] != rank:
            raise AdapterUnservable(
                f"tensor {name} has shape {list(tensor.shape)} where the configuration says rank {rank}",
                action=_ACTION,
            )
    return header


def largest_rank(config: dict[str, Any]) -> int:
    """The largest rank of any module: ``r`` or one of ``rank_pattern``. Raises ``AdapterCorrupt`` without an ``r``."""
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise AdapterCorrupt(f"rank_pattern is {pattern!r}, not a table", action=_SAVE_AGAIN)
    ranks = [("r", config.get("r")), *pattern.items()]
    for name, rank in ranks:
        if type(rank) is not int or rank < 1:
            raise AdapterCorrupt(f"{name} is {rank!r}, not a rank", action=_SAVE_AGAIN)
    return int(max(rank for _, rank in ranks))


def _rank_of(module: str, config: dict[str, Any]) -> int:
    """The rank of one module: the first pattern that matches the end of its name wins, as in PEFT and vLLM."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return int(rank)
        except re.error as error:
            raise AdapterCorrupt(f"rank_pattern {pattern!r}: {error}", action=_SAVE_AGAIN) from error
    return int(config["r"])


def slot_rank(rank: int) -> int:
    """The smallest ``--max-lora-rank`` of vLLM that takes ``rank``.

    Raises:
        AdapterUnservable: vLLM has none so large.
    """
    for servable in SERVABLE_RANKS:
        if servable >= rank:
            return servable
    raise AdapterUnservable(f"rank {rank} is above vLLM's largest, {SERVABLE_RANKS[-1]}", action="Lower r")


def module_names(header: dict[str, Tensor]) -> tuple[str, ...]:
    """Last names of the modules an adapter changes (``q_proj``, ``down_proj``), sorted."""
    return tuple(sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in header}))
