"""One TOML for every process of a run. A flag wins over the environment, the environment over the file.

Environment: ``LORABRIDGE_`` and the key, with two underscores between section and name
(``LORABRIDGE_REDIS__URL``). Flags: ``--set redis.url=...``. Passwords and tokens come from the environment or from a
file, never from a command line.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from lorabridge.bridge.adapter import slot_rank
from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.manifest import check_policy_name
from lorabridge.bridge.store.address import StoreUrl
from lorabridge.bridge.trajectory import Sampling

_NOT_TOML = (ValueError, RecursionError)  # tomllib's, and what nesting without end or a number like that raises
BASE_NAME = "base"
"""What servers call the base model, so that no policy can have that name."""


class Section(BaseModel):
    """A table of the configuration: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    kv: Literal["keep", "recompute"] = "keep"
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    control_host: str = "127.0.0.1"
    control_port: int = Field(8001, ge=1, le=65535)
    start_s: float = Field(600, gt=0, description="how long a server may take to come up")
    max_loras: int = Field(2, ge=1)
    max_model_len: int | None = None
    max_num_seqs: int = Field(64, ge=1)
    kv_cache_gib: float = Field(1, gt=0, description="KV cache on a CPU")
    threads: int = Field(0, ge=0, description="OMP threads on a CPU; 0 leaves vLLM's choice")
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


class Settings(BaseSettings):
    """Everything a run needs to know."""

    model_config = SettingsConfigDict(env_prefix="LORABRIDGE_", env_nested_delimiter="__", extra="forbid", frozen=True)

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    policy: PolicySection = PolicySection()
    redis: RedisSection = RedisSection()
    store: StoreSection = StoreSection()
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    generators: GeneratorsSection = GeneratorsSection()
    publish: PublishSection = PublishSection()
    canary: CanarySection = CanarySection()
    lag: LagSection = LagSection()
    ledger: LedgerSection = LedgerSection()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    @model_validator(mode="after")
    def _groups_fit(self) -> Settings:
        least, ahead = self.least_groups_ahead, self.rollout.groups_ahead
        if 0 < ahead < least:
            raise ValueError(
                f"rollout.groups_ahead is {ahead}, and training would wait for ever: the trainer reads a batch ahead, "
                f"so {least} groups must be under way at once. Give {least} or more, or 0 to leave it to the run"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Trajectories that one optimizer step trains on, over all ranks."""
        own = self.trainer
        return own.per_device_train_batch_size * own.nproc_per_node * own.gradient_accumulation_steps

    @property
    def least_groups_ahead(self) -> int:
        """Groups that must be unfinished at once for a step to end.

        Accelerate's dispatcher reads one micro-batch ahead, and a group is finished by the step that uses up its last
        trajectory: a micro-batch that cuts a group leaves one more open.
        """
        own, size = self.trainer, self.rollout.num_generations
        micro_batch = own.per_device_train_batch_size * own.nproc_per_node
        groups = math.ceil(micro_batch * (own.gradient_accumulation_steps + 1) / size)
        return groups + (1 if micro_batch % size else 0)

    @property
    def groups_ahead(self) -> int:
        """Groups that may be started and not yet finished: one step's worth of them can be sampled meanwhile."""
        return self.rollout.groups_ahead or self.least_groups_ahead + math.ceil(
            self.samples_per_step / self.rollout.num_generations
        )

    @property
    def generators_wanted(self) -> int:
        """Generators that must serve a version before training goes on."""
        everyone = len(self.generators.urls) or self.generators.count
        return everyone if self.publish.wait == "all" else min(self.publish.wait, everyone)

    @property
    def store_url(self) -> str:
        return self.store.url or str((self.run.dir / "store").absolute())

    @property
    def token_file(self) -> Path:
        return self.generators.token_file or self.run.dir / "control.token"

    @property
    def slot_rank(self) -> int:
        """The ``--max-lora-rank`` of the run's servers."""
        return self.publish.max_lora_rank or slot_rank(self.policy.rank)

    @property
    def ledger_dir(self) -> Path:
        return self.ledger.dir or self.run.dir / "ledger"


def load(file: Path | None, overrides: Sequence[str] = ()) -> Settings:
    """Settings from ``file``, the environment and ``section.key=value`` overrides, the later winning.

    Raises:
        ConfigError: no such file, not TOML, an unknown key (the nearest right one is named) or a bad value.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"no configuration file {file}", action="Check --config")

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=file)

    try:
        return FromFile(**_parse(overrides))
    except (ValidationError, SettingsError) as error:
        where = f"{file}: " if file else ""
        raise ConfigError(where + _sentence(error), action=_correction(error)) from error
    except _NOT_TOML as error:
        raise ConfigError(f"{file} is not TOML: {error}", action="Correct that line") from error


def _parse(overrides: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot):
            raise ConfigError(f"--set {override!r} is not section.key=value", action="Write --set trainer.max_steps=10")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except _NOT_TOML:
            value = text  # a bare word is a string
        tree.setdefault(section, {})[key] = value
    return tree


def as_environment(overrides: Sequence[str]) -> dict[str, str]:
    """Overrides as environment variables, for a process that reads the same file. Raises ``ConfigError``."""
    return {
        f"LORABRIDGE_{section}__{key}".upper(): value if isinstance(value, str) else json.dumps(value)
        for section, values in _parse(overrides).items()
        for key, value in values.items()
    }


def _sentence(error: ValidationError | SettingsError) -> str:
    if isinstance(error, SettingsError):
        return f"the environment holds a bad value: {error}"
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key} = {first['input']!r}: {message}" if key else message


def _correction(error: ValidationError | SettingsError) -> str:
    if isinstance(error, ValidationError) and error.errors()[0]["type"] == "extra_forbidden":
        *sections, wrong = (str(part) for part in error.errors()[0]["loc"])
        model: type[BaseModel] = Settings
        for section in sections:
            inner = model.model_fields[section].annotation
            assert isinstance(inner, type) and issubclass(inner, BaseModel)
            model = inner
        near = difflib.get_close_matches(wrong, model.model_fields, n=1, cutoff=0.4)
        known = ", ".join(model.model_fields)
        return f"Did you mean {'.'.join([*sections, near[0]])}?" if near else f"Known here: {known}"
    return "Correct that value"


def _as_value_error(check: Callable[[str], str], value: str) -> str:
    """pydantic reports ValueError with the key's name."""
    try:
        return check(value)
    except ConfigError as error:
        raise ValueError(f"{error.problem}. {error.action}") from error
