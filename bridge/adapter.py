"""An adapter in memory: its bytes, its header, and whether its configuration is one that vLLM serves."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from lorabridge.bridge.codec import UNREADABLE
from lorabridge.bridge.digest import adapter_digest, semantic_config
from lorabridge.bridge.errors import AdapterCorrupt, AdapterUnservable

# vLLM builds slots for these ranks only (vllm/config/lora.py).
SERVABLE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MAX_HEADER = 100 * 1024 * 1024
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ACTION = "Change the adapter's configuration and publish again"
_SAVE_AGAIN = "Save the adapter again"
# Inits that leave the base's weights alone. vLLM takes lora_ga as well (vllm/lora/peft_helper.py), but PEFT subtracts
# from the base as training begins, so that trainer and server would sample from different models.
_PLAIN_INITS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
# Fields of PEFT 0.18 to 0.21 that vLLM reads as PEFT does, that say nothing once tensors exist, or that only training
# reads. vLLM passes any other field by: one that is set may be a kind of LoRA that it does not know.
_HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "task_type", "use_rslora",
})  # fmt: skip
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
    length = header_length(tensors[:8], len(tensors))
    header = parse_header(tensors[8 : 8 + length])
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


def header_length(start: bytes, size: int) -> int:
    """Bytes of the header of a safetensors file of ``size`` bytes, whose first eight are ``start``.

    Raises:
        AdapterCorrupt: truncated, or not safetensors.
    """
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(_MAX_HEADER, size - 8):
        raise AdapterCorrupt("the tensors file is cut short or not safetensors", action=_SAVE_AGAIN)
    return length


def parse_header(body: bytes) -> dict[str, Tensor]:
    """The tensors that a safetensors header describes. Raises ``AdapterCorrupt``."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(one, type=Tensor) for name, one in raw.items() if name != "__metadata__"}
    except UNREADABLE as error:
        raise AdapterCorrupt(f"the tensors file has no readable header: {error}", action=_SAVE_AGAIN) from error


def check_config(config: dict[str, Any], max_rank: int) -> None:
    """Refuse a PEFT configuration that vLLM cannot serve, before anything is trained or sent.

    Raises:
        AdapterUnservable: with a sentence naming the field.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterUnservable(f"peft_type is {kind!r}; vLLM serves LORA only", action=_ACTION)
    for field in sorted(config.keys() - _HARMLESS):
        if config[field]:
            raise AdapterUnservable(f"{field} is {config[field]!r}; vLLM cannot serve it as an adapter", action=_ACTION)
    if config.get("bias", "none") != "none":
        raise AdapterUnservable(f"bias is {config['bias']!r}; vLLM would drop the biases", action=_ACTION)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise AdapterUnservable(f"init_lora_weights {init!r} changes the base's own weights", action=_ACTION)
    _check_targets(config.get("target_modules"))
    _check_alphas(config)
    rank = largest_rank(config)
    if rank > max_rank:
        raise AdapterUnservable(
            f"rank {rank} is above the {max_rank} that the servers take",
            action=f"Lower r, or serve with a max_lora_rank of {slot_rank(rank)}",
        )


def _check_targets(targets: Any) -> None:
    if not targets:
        raise AdapterUnservable("target_modules is missing, and vLLM asks for it", action=_ACTION)
    for target in targets if isinstance(targets, list | tuple | set | frozenset) else [targets]:
        if not isinstance(target, str):
            raise AdapterCorrupt(f"target_modules holds {target!r}, not a name", action=_SAVE_AGAIN)
        if "lm_head" in target or "embed_tokens" in target:
            raise AdapterUnservable(
                f"target_modules names {target!r}; with it PEFT saves the base's own weights, which vLLM passes by",
                action=_ACTION,
            )


def _check_alphas(config: dict[str, Any]) -> None:
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict):
        raise AdapterCorrupt(f"alpha_pattern is {pattern!r}, not a table", action=_SAVE_AGAIN)
    for name, alpha in [("lora_alpha", config.get("lora_alpha")), *pattern.items()]:
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise AdapterCorrupt(f"{name} is {alpha!r}, not a number", action=_SAVE_AGAIN)
        if alpha == 0:
            raise AdapterUnservable(f"{name} is 0: the base would answer for the adapter", action=_ACTION)


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
