"""The tables of the one TOML: what each key means, its default and its limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.manifest import check_policy_name
from lorabridge.bridge.residency import KvMode, SwapMode
from lorabridge.bridge.store.address import StoreUrl
from lorabridge.bridge.trajectory import Sampling

BASE_NAME = "base"
"""What servers call the base model, so that no policy can have that name."""


class Section(BaseModel):
    """A table of the configuration: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _is_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if value and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{value!r} is not host:port")
    return value


StatusAddress = Annotated[str, AfterValidator(_is_address)]


class RunSection(Section):
    """[run]"""

    id: str = Field("run", description="name of the run: part of every Redis key and trajectory id")
    dir: Path = Field(Path("runs/run"), description="folder that the run leaves behind")
    seed: int = Field(0, description="of the prompts' order")

    @field_validator("id")
    @classmethod
    def _id_is_a_name(cls, value: str) -> str:
        return _as_value_error(check_policy_name, value)


class ModelSection(Section):
    """[model]"""

    path: str = Field("", description="folder of the base model, or a hub id")
    revision: str | None = Field(None, description="of a hub id")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class PolicySection(Section):
    """[policy]"""

    name: str = "policy"
    rank: int = Field(8, ge=1)
    alpha: float = Field(16, gt=0)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    @field_validator("name")
    @classmethod
    def _name_is_a_policy(cls, value: str) -> str:
        if value == BASE_NAME:
            raise ValueError("that is what servers call the base model; give the policy another name")
        return _as_value_error(check_policy_name, value)


class RedisSection(Section):
    """[redis]"""

    url: str = Field("redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix://")
    password_file: Path | None = Field(None, description="file holding the password, read if the URL has none")
    connect_s: float = Field(10, gt=0, description="how long to try to reach it at start")
    outage_s: float = Field(300, gt=0, description="how long to keep trying when it is lost in the middle")


class StoreSection(Section):
    """[store]"""

    url: StoreUrl = Field("", description="folder, s3://bucket/prefix, http(s):// to read only; '' is <run.dir>/store")
    max_adapter_bytes: int = Field(8 * 1024**3, gt=0)
    keep: int = Field(0, ge=0, description="versions whose adapters stay; 0: all, since the audit needs them")


# Arguments of AsyncGRPOConfig that a run sets itself, and the key that says what they are.
_DECIDED_ELSEWHERE = {
    **{name: f"[trainer] {name}" for name in (
        "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "report_to",
    )},
    **{name: f"[rollout] {name}" for name in ("num_generations", "temperature", "max_completion_length")},
    "weight_sync_steps": "[publish] every",
    "max_staleness": "[lag] max",
    "seed": "[run] seed",
    "output_dir": "[run] dir",
    "bf16": "[model] dtype",
    "fp16": "[model] dtype",
    "model_init_kwargs": "[model]",
    "token_budget": "the run: a step is a fixed number of samples",
    "save_strategy": "the run: checkpoints are not supported yet",
}  # fmt: skip


class TrainerSection(Section):
    """[trainer]: what is not here is TRL's default."""

    nproc_per_node: int = Field(1, ge=1)
    max_steps: int = Field(60, ge=1)
    per_device_train_batch_size: int = Field(64, ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1)
    learning_rate: float = Field(1e-5, gt=0)
    threads: int = Field(0, ge=0, description="torch threads per process; 0 leaves torch's choice")
    report_to: tuple[str, ...] = ()
    status: StatusAddress = Field("", description="host:port that answers /livez and /readyz; empty: nothing does")
    extra: dict[str, Any] = Field(default_factory=dict, description="further AsyncGRPOConfig arguments")

    @field_validator("extra")
    @classmethod
    def _extra_is_not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _DECIDED_ELSEWHERE:
                raise ValueError(f"{name} is decided by {_DECIDED_ELSEWHERE[name]}")
        return value


class RolloutSection(Section):
    """[rollout]"""

    environment: str = Field("", description="module:attribute of an Environment, or a module that has the parts")
    num_generations: int = Field(8, ge=2, description="completions per group")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    max_completion_length: int = Field(128, ge=1)
    concurrency: int = Field(8, ge=1, description="groups that one worker samples at once on each generator")
    groups_ahead: int = Field(
        0, ge=0, description="groups that may be started and not yet finished; 0: one step's worth more than the least"
    )
    group_timeout_s: float = Field(120, gt=0, description="an attempt at a group is ended after that, and counted")
    status: StatusAddress = Field("", description="host:port that answers /livez and /readyz; empty: nothing does")

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters of every completion."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_completion_length,
        )


class GeneratorsSection(Section):
    """[generators]"""

    urls: tuple[str, ...] = Field((), description="servers that already run; empty: `up` starts `count` of them")
    count: int = Field(1, ge=1, description="servers that `up` starts; each has ports two above the last's")
    control: tuple[str, ...] = Field((), description="control doors of urls, same order: http://host:port or unix:PATH")
    token_file: Path | None = Field(None, description="file holding the control token; None is <run.dir>/control.token")
    swap: SwapMode = Field(
        "in_flight", description="samples go on under the next version, or finish on the one that they began with"
    )
    kv: KvMode = Field("keep", description="of samples in flight, when they are swapped so")
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    control_host: str = "127.0.0.1"
    control_port: int = Field(8001, ge=1, le=65535)
    start_s: float = Field(600, gt=0, description="how long a server may take to come up")
    max_loras: int = Field(2, ge=1)
    max_model_len: int | None = None
    max_num_seqs: int = Field(64, ge=1)
    kv_cache_gib: float = Field(1, gt=0, description="KV cache on a CPU")
    threads: int = Field(0, ge=0, description="OMP threads on a CPU; 0: vLLM's choice, which starves its doors on two")
    args: tuple[str, ...] = Field((), description="further arguments of vLLM's server")

    @field_validator("urls", "control")
    @classmethod
    def _doors_are_urls(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for url in value:
            if info.field_name == "control" and url.startswith("unix:"):
                continue
            form = "http://host:port" + (" or unix:PATH" if info.field_name == "control" else "")
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError(f"{url!r} is not {form}")
        return value

    @model_validator(mode="after")
    def _pinned_has_room(self) -> GeneratorsSection:
        if self.swap == "pinned" and self.max_loras < 2:
            raise ValueError("swap = 'pinned' needs a slot beside the one in use: set max_loras to 2 or more")
        return self

    def doors(self, place: int) -> tuple[str, str]:
        """Public and control URL of server ``place`` (from 0) of those that ``up`` starts."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.control_host.startswith("unix:"):
            return f"http://{host}:{self.port + 2 * place}", self.control_host + (f".{place}" if place else "")
        control_host = f"[{self.control_host}]" if ":" in self.control_host else self.control_host
        return f"http://{host}:{self.port + 2 * place}", f"http://{control_host}:{self.control_port + 2 * place}"


class PublishSection(Section):
    """[publish]"""

    every: int = Field(1, ge=1, description="optimizer steps between versions")
    wait: Annotated[int, Field(ge=0)] | Literal["all"] = Field(0, description="servers that training waits for; 'all'")
    wait_s: float = Field(30, gt=0, description="how long it waits for them, at most")
    max_lora_rank: int = Field(0, ge=0, description="what the servers take; 0: the smallest that fits policy.rank")


class CanarySection(Section):
    """[canary]"""

    every: int = Field(10, ge=0, description="publishes between canaries, the first included; 0: none")


class LagSection(Section):
    """[lag]"""

    max: int = Field(16, ge=0, description="samples with an older token are dropped, and counted")


class LedgerSection(Section):
    """[ledger]"""

    dir: Path | None = Field(None, description="None is <run.dir>/ledger")
    flush_s: float = Field(2, gt=0)
    flush_entries: int = Field(512, ge=1)
    status: StatusAddress = Field("", description="host:port that answers /livez and /readyz; empty: nothing does")


def _as_value_error(check: Callable[[str], str], value: str) -> str:
    """pydantic reports ValueError with the key's name."""
    try:
        return check(value)
    except ConfigError as error:
        raise ValueError(f"{error.problem}. {error.action}") from error
