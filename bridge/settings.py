"""One TOML for every process of a run. A flag wins over the environment, the environment over the file.

Environment: ``LORABRIDGE_`` and the key, with two underscores between section and name
(``LORABRIDGE_REDIS__URL``). Flags: ``--set redis.url=...``. Passwords and tokens come from the environment or from a
file, never from a command line.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
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
from lorabridge.bridge.trajectory import Sampling


class Section(BaseModel):
    """A table of the configuration: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunSection(Section):
    """[run]"""

    id: str = Field("run", description="name of the run: part of every Redis key and trajectory id")
    dir: Path = Field(Path("runs/run"), description="folder that the run leaves behind")
    seed: int = 0

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
        return _as_value_error(check_policy_name, value)


class RedisSection(Section):
    """[redis]"""

    url: str = Field("redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix://")
    password_file: Path | None = Field(None, description="file holding the password, read if the URL has none")
    connect_s: float = Field(10, gt=0, description="how long to try to reach it at start")
    outage_s: float = Field(300, gt=0, description="how long to keep trying when it is lost in the middle")


class StoreSection(Section):
    """[store]"""

    url: str = Field("", description="folder or file:// URL; '' is <run.dir>/store")
    max_adapter_bytes: int = Field(8 * 1024**3, gt=0)


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
    concurrency: int = Field(8, ge=1, description="groups that one worker samples at once")
    groups_ahead: int = Field(16, ge=1, description="groups that may be started and not yet finished")
    group_timeout_s: float = Field(120, gt=0, description="a group not delivered by then goes to another worker")

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

    urls: tuple[str, ...] = Field((), description="servers that already run; empty: `up` starts one")
    control: tuple[str, ...] = Field((), description="control doors of urls, same order: http://host:port or unix:PATH")
    token_file: Path | None = Field(None, description="file holding the control token; None is <run.dir>/control.token")
    kv: Literal["keep", "recompute"] = "keep"
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    control_host: str = "127.0.0.1"
    control_port: int = Field(8001, ge=1, le=65535)
    max_loras: int = Field(2, ge=1)
    max_model_len: int | None = None
    max_num_seqs: int = Field(64, ge=1)
    kv_cache_gib: float = Field(1, gt=0, description="KV cache on a CPU")
    threads: int = Field(0, ge=0, description="OMP threads on a CPU; 0 leaves vLLM's choice")
    args: tuple[str, ...] = Field((), description="further arguments of vLLM's server")


class PublishSection(Section):
    """[publish]"""

    every: int = Field(1, ge=1, description="optimizer steps between versions")
    max_lora_rank: int = Field(0, ge=0, description="what the servers take; 0: the smallest that fits policy.rank")


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
    lag: LagSection = LagSection()
    ledger: LedgerSection = LedgerSection()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource, dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}", action="Correct that line") from error
    except (ValidationError, SettingsError) as error:
        where = f"{file}: " if file else ""
        raise ConfigError(where + _sentence(error), action=_correction(error)) from error


def _parse(overrides: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot):
            raise ConfigError(f"--set {override!r} is not section.key=value", action="Write --set trainer.max_steps=10")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
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
    return f"{key} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


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


def to_toml(settings: Settings) -> str:
    """The resolved configuration as TOML, every key written out (None is left out, as TOML has no null)."""
    lines: list[str] = []
    for section, values in settings.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    # JSON's strings, numbers and booleans are TOML's, but for surrogate pairs and the one control character it leaves.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
