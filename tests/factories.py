"""Small valid values of everything that crosses between processes, with one call each."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save

from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.base_shapes import Shapes
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.residency import KvMode, Residency, Served
from lorabridge.bridge.run_record import RunRecord
from lorabridge.bridge.trajectory import Group, Sampling, Span, Trajectory, Turn

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
WIDTH = 16
SHAPES = Shapes(
    linear={f"model.layers.0.self_attn.{name}": (WIDTH, WIDTH) for name in ("q_proj", "v_proj")},
    closed={"lm_head": "is the output head", "model.norm": "is no linear layer"},
)


def digest_of(text: str) -> str:
    """A digest that stands for ``text``."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


BASE = Fingerprint(checkpoint=digest_of("weights"), tokenizer=digest_of("tokenizer"), template=digest_of("template"))


def make_config(**changes: Any) -> dict[str, Any]:
    """``adapter_config.json`` of a plain LoRA, as PEFT writes it."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "/models/base", "r": 8,
        "lora_alpha": 16, "lora_dropout": 0.1, "bias": "none", "inference_mode": True, "fan_in_fan_out": False,
        "init_lora_weights": True, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
        "target_modules": ["q_proj"], "use_dora": False, "use_rslora": False, "revision": None,
        "peft_version": "0.18.0",
    } | changes  # fmt: skip


def make_arrays(rank: int = 8, modules: tuple[str, ...] = (MODULE,), seed: int = 0) -> dict[str, Any]:
    """The tensors of an adapter by name; ``lora_A`` is (rank, in) and ``lora_B`` (out, rank)."""
    random = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for module in modules:
        arrays[f"{module}.lora_A.weight"] = random.standard_normal((rank, WIDTH), dtype=np.float32)
        arrays[f"{module}.lora_B.weight"] = random.standard_normal((WIDTH, rank), dtype=np.float32)
    return arrays


def make_tensors(arrays: dict[str, Any] | None = None, *, seed: int = 0) -> bytes:
    """A safetensors file."""
    return bytes(save(make_arrays(seed=seed) if arrays is None else arrays))


def make_adapter(seed: int = 0, **config: Any) -> Adapter:
    """An adapter that vLLM can serve; another for each ``seed``."""
    return Adapter.of(make_config(**config), make_tensors(seed=seed))


def make_manifest(version: int = 1, digest: str | None = None, **changes: Any) -> Manifest:
    """Version ``version`` of the policy ``policy``, from trainer epoch 1."""
    manifest = Manifest(
        policy="policy",
        version=version,
        digest=digest or digest_of(f"adapter {version}"),
        parent=None if version == 1 else digest_of(f"adapter {version - 1}"),
        base=BASE,
        rank=8,
        targets=("q_proj",),
        dtype="F32",
        step=version - 1,
        epoch=1,
        run="run",
        created_ms=1_700_000_000_000 + version,
        size=1024,
    )
    return msgspec.structs.replace(manifest, **changes)


def make_span(version: int, start: int, end: int, **changes: Any) -> Span:
    """A span of the policy ``policy``, sampled in the epoch of the same number as its version."""
    span = Span(
        policy="policy", version=version, digest=digest_of(f"adapter {version}"), epoch=version, start=start, end=end,
        kv="fresh",
    )  # fmt: skip
    return msgspec.structs.replace(span, **changes)


def make_turn(spans: tuple[Span, ...] = (make_span(1, 0, 2), make_span(2, 2, 4))) -> Turn:
    """A turn whose sampled tokens are those that ``spans`` tile."""
    count = spans[-1].end if spans else 0
    return Turn(
        prompt_ids=(1, 2, 3),
        token_ids=tuple(range(10, 10 + count)),
        logprobs=tuple(-0.5 - n for n in range(count)),
        mask=(1,) * count,
        spans=spans,
        finish_reason="stop",
    )


def make_trajectory(group: int = 0, attempt: int = 1, index: int = 0, **changes: Any) -> Trajectory:
    """One completion of two versions."""
    trajectory = Trajectory(
        run="run", policy="policy", group=group, attempt=attempt, index=index, environment=digest_of("code"),
        prompt=digest_of("prompt"), base=BASE.digest, turns=(make_turn(),), sampling=Sampling(), seed=7,
        logprobs_mode="processed_logprobs", dtype="float32", generator="http://127.0.0.1:8000", instance="instance",
        reward=1.0, rewards={"right": 1.0, "short": None}, advantage=0.5,
        times_ms={"claimed": 1_700_000_000_000, "sampled": 1_700_000_000_500},
    )  # fmt: skip
    return msgspec.structs.replace(trajectory, **changes)


def make_group(number: int = 0, attempt: int = 1, worker: str = "worker", size: int = 2) -> Group:
    """A group of ``size`` trajectories."""
    trajectories = tuple(make_trajectory(number, attempt, index) for index in range(size))
    return Group(group=number, attempt=attempt, worker=worker, trajectories=trajectories)


def make_residency(
    epoch: int, version: int, kv: KvMode = "keep", *, instance: str = "instance", policy: str = "policy"
) -> Residency:
    """An epoch that serves one version of one policy."""
    serves = {policy: Served(version=version, digest=digest_of(f"adapter {version}"))}
    return Residency(generator="http://127.0.0.1:8000", instance=instance, epoch=epoch, kv=kv, serves=serves, at_ms=1)


def make_run_record(**changes: Any) -> RunRecord:
    """A run as the trainer publishes it."""
    record = RunRecord(
        run="run", policy="policy", base=BASE, sampling=Sampling(), num_generations=8, eos_ids=(0, 2),
        environment=digest_of("code"), seed=0, rank=8, epoch=1, groups_ahead=8,
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes)
