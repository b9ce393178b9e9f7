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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from lorabridge.bridge.adapter import slot_rank
from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.sections import (
    CanarySection,
    GeneratorsSection,
    LagSection,
    LedgerSection,
    ModelSection,
    PolicySection,
    PublishSection,
    RedisSection,
    RolloutSection,
    RunSection,
    StoreSection,
    TrainerSection,
)

_NOT_TOML = (ValueError, RecursionError)  # tomllib's, and what nesting without end or a number like that raises


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
