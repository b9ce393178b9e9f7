"""One configuration: flag over environment over file, and one clear sentence for whatever is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.options import settings_of
from lorabridge.bridge.sections import GeneratorsSection, RolloutSection
from lorabridge.bridge.settings import Settings, load
from lorabridge.bridge.toml import to_toml


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("LORABRIDGE_"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_without_a_file_everything_has_its_default() -> None:
    assert load(None).model_dump() == Settings().model_dump()


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "[trainer]\nmax_steps = 1\nnproc_per_node = 4\nthreads = 7\n")
    monkeypatch.setenv("LORABRIDGE_TRAINER__MAX_STEPS", "2")
    monkeypatch.setenv("LORABRIDGE_TRAINER__NPROC_PER_NODE", "5")
    trainer = load(file, ["trainer.max_steps=3"]).trainer
    assert (trainer.max_steps, trainer.nproc_per_node, trainer.threads) == (3, 5, 7)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("run.id=abc", ("run", "id", "abc")),
        ("redis.url=redis://host:1/0?a=b", ("redis", "url", "redis://host:1/0?a=b")),
        ('generators.urls=["http://a", "http://b"]', ("generators", "urls", ("http://a", "http://b"))),
        ("trainer.learning_rate=1e-3", ("trainer", "learning_rate", 1e-3)),
        ("rollout.top_k=-1", ("rollout", "top_k", -1)),
        (" run.seed = 5", ("run", "seed", 5)),
        ("model.revision=", ("model", "revision", "")),
    ],
)
def test_an_override_is_toml_or_a_bare_word(override: str, read: tuple[str, str, object]) -> None:
    section, key, value = read
    assert getattr(getattr(load(None, [override]), section), key) == value


@pytest.mark.parametrize("override", ["", "run", "run.id", "run=1", "=1"])
def test_an_override_of_another_form_is_refused_with_an_example(override: str) -> None:
    with pytest.raises(ConfigError, match=r"is not section\.key=value") as caught:
        load(None, [override])
    assert "--set trainer.max_steps=10" in caught.value.action


@pytest.mark.parametrize(
    ("text", "problem", "action"),
    [
        ("[trainer]\nmax_step = 1", "unknown key trainer.max_step", "Did you mean trainer.max_steps?"),
        ("[rolout]\ntop_k = 1", "unknown key rolout", "Did you mean rollout?"),
        ("[redis]\nzzzzzz = 1", "unknown key redis.zzzzzz", "Known here: url, password_file, connect_s, outage_s"),
        ("[trainer]\nmax_steps = 0", "trainer.max_steps = 0: Input should be greater than or equal to 1", "Correct"),
        ("[trainer]\nmax_steps = 'many'", "trainer.max_steps = 'many': Input should be a valid integer", "Correct"),
        ("[generators]\nkv = 'drop'", "generators.kv = 'drop': Input should be 'keep' or 'recompute'", "Correct"),
        ("[generators]\nport = 70000", "generators.port = 70000", "Correct"),
        ("[policy]\nname = '../x'", "policy.name = '../x': '../x' cannot name a policy", "Correct"),
        ("[run]\nid = 'a b'", "run.id = 'a b'", "Correct"),
        ("[policy]\nalpha = inf", "policy.alpha = inf: Input should be a finite number", "Correct"),
        ("[redis]\noutage_s = nan", "redis.outage_s = nan", "Correct"),
        ("run = 5", "run = 5", "Correct"),
        ("[rollout]\ntemperature = -1", "rollout.temperature = -1", "Correct"),
        ("[policy]\nname = 'base'", "policy.name = 'base': that is what servers call the base model", "Correct"),
        (
            "[generators]\nurls = ['host:1']",
            "generators.urls = ['host:1']: 'host:1' is not http://host:port",
            "Correct",
        ),
        (
            "[generators]\ncontrol = ['x']",
            "generators.control = ['x']: 'x' is not http://host:port or unix:",
            "Correct",
        ),
        (
            "[generators]\nurls = ['http://:1']",
            "generators.urls = ['http://:1']: 'http://:1' is not http://host:port",
            "Correct",
        ),
        ("[generators]\nurls = ['http://host:x']", "generators.urls = ['http://host:x']: Port", "Correct"),
        ("[trainer.extra]\nseed = 1", "trainer.extra = {'seed': 1}: seed is decided by [run] seed", "Correct"),
        ("[rollout]\ngroups_ahead = 9", "rollout.groups_ahead is 9, and training would wait for ever", "Correct"),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_the_next_step(
    tmp_path: Path, text: str, problem: str, action: str
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert caught.value.problem.startswith(f"{file}: {problem}")
    assert caught.value.action.startswith(action)


def test_the_same_holds_for_the_environment_and_for_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown key trainer\.max_step"):
        load(None, ["trainer.max_step=1"])
    monkeypatch.setenv("LORABRIDGE_TRAINER__MAX_STEP", "1")
    with pytest.raises(ConfigError, match=r"unknown key trainer\.max_step") as caught:
        load(None)
    assert caught.value.action == "Did you mean trainer.max_steps?"


def test_an_unreadable_value_in_the_environment_is_said_to_come_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORABRIDGE_GENERATORS", "not json")
    with pytest.raises(ConfigError, match="the environment holds a bad value"):
        load(None)


@pytest.mark.parametrize(
    "body", [b"[run", b"a = ", b"\xff\xfe", b"a = 1\na = 2", b"a = " + b"[" * 100_000, b"a = " + b"9" * 5_000]
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, body: bytes) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(body)
    with pytest.raises(ConfigError, match="is not TOML"):
        load(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for missing in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match=str(missing)):
            load(missing)


def test_the_folder_of_a_run_has_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(load(None, ["run.seed=5"])))
    assert settings_of(tmp_path).run.seed == 5
    assert settings_of(tmp_path, ["run.seed=6"]).run.seed == 6
    with pytest.raises(ConfigError, match="not the folder of a run"):
        settings_of(tmp_path / "elsewhere")


def test_the_places_of_a_run_follow_its_folder_unless_they_are_given(tmp_path: Path) -> None:
    inside = load(None, [f"run.dir={tmp_path}"])
    assert (inside.store_url, inside.ledger_dir) == (str(tmp_path / "store"), tmp_path / "ledger")
    outside = load(None, [f"run.dir={tmp_path}", "store.url=file:///elsewhere", "ledger.dir=/ledger"])
    assert (outside.store_url, outside.ledger_dir) == ("file:///elsewhere", Path("/ledger"))


@pytest.mark.parametrize(
    ("batch", "ranks", "accumulation", "size", "least"),
    [(64, 1, 1, 8, 16), (64, 2, 1, 8, 32), (16, 1, 4, 8, 10), (12, 1, 1, 8, 4), (4, 1, 1, 16, 2)],
)
def test_so_many_groups_must_be_under_way_for_a_step_to_end(
    batch: int, ranks: int, accumulation: int, size: int, least: int
) -> None:
    overrides = [
        f"trainer.per_device_train_batch_size={batch}", f"trainer.nproc_per_node={ranks}",
        f"trainer.gradient_accumulation_steps={accumulation}", f"rollout.num_generations={size}",
    ]  # fmt: skip
    settings = load(None, overrides)
    assert settings.least_groups_ahead == least < settings.groups_ahead
    assert load(None, [*overrides, f"rollout.groups_ahead={least}"]).groups_ahead == least
    with pytest.raises(ConfigError, match=f"so {least} groups must be under way"):
        load(None, [*overrides, f"rollout.groups_ahead={least - 1}"])


@pytest.mark.parametrize(("wait", "wanted"), [("0", 0), ("2", 2), ("9", 3), ("all", 3)])
def test_a_quorum_is_never_more_than_there_are(wait: str, wanted: int) -> None:
    assert load(None, ["generators.count=3", f"publish.wait={wait}"]).generators_wanted == wanted


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("token_budget", "the run"), ("max_staleness", "[lag] max"), ("temperature", "[rollout] temperature"),
        ("num_generations", "[rollout] num_generations"), ("max_steps", "[trainer] max_steps"),
        ("per_device_train_batch_size", "[trainer] per_device_train_batch_size"),
        ("gradient_accumulation_steps", "[trainer] gradient_accumulation_steps"),
        ("learning_rate", "[trainer] learning_rate"), ("report_to", "[trainer] report_to"),
        ("max_completion_length", "[rollout] max_completion_length"), ("weight_sync_steps", "[publish] every"),
        ("output_dir", "[run] dir"), ("bf16", "[model] dtype"), ("save_strategy", "the run"),
    ],
)  # fmt: skip
def test_what_the_run_decides_is_refused_among_the_further_arguments(name: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [f"trainer.extra={{{name} = 1}}"])
    assert f"{name} is decided by {key}" in caught.value.problem
    assert load(None, ["trainer.extra={epsilon = 0.1}"]).trainer.extra == {"epsilon": 0.1}


def test_each_server_of_a_run_has_doors_of_its_own() -> None:
    section = GeneratorsSection(port=9000, control_port=9001)
    assert section.doors(0) == ("http://127.0.0.1:9000", "http://127.0.0.1:9001")
    assert section.doors(2) == ("http://127.0.0.1:9004", "http://127.0.0.1:9005")
    unix = GeneratorsSection(host="::1", control_host="unix:/run/x")
    assert [unix.doors(place)[1] for place in (0, 1)] == ["unix:/run/x", "unix:/run/x.1"]
    assert unix.doors(0)[0] == "http://[::1]:8000"


def test_sampling_parameters_are_those_of_the_section() -> None:
    section = RolloutSection(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, max_completion_length=9
    )
    sampling = section.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.max_tokens) == (1.2, 9)


def test_every_key_that_is_not_obvious_by_its_name_can_be_found_by_its_section() -> None:
    for name, field in Settings.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        assert (section.__doc__ or "").startswith(f"[{name}]")


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.booleans() | st.integers(-(2**60), 2**60) | finite | text
values = (
    leaves | st.lists(leaves | st.lists(leaves, max_size=2), max_size=2) | st.dictionaries(text, leaves, max_size=2)
)


@hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(
    extra=st.dictionaries(text, values, max_size=3), path=text, args=st.lists(text, max_size=2), alpha=st.floats(1, 1e9)
)
def test_the_resolved_configuration_reads_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, extra: dict[str, Any], path: str, args: list[str], alpha: float
) -> None:
    settings = Settings.model_validate({
        "model": {"path": path}, "policy": {"alpha": alpha}, "generators": {"args": args}, "trainer": {"extra": extra},
    })  # fmt: skip
    file = tmp_path_factory.getbasetemp() / "round-trip.toml"
    file.write_text(to_toml(settings), encoding="utf-8")
    assert load(file).model_dump() == settings.model_dump()


def test_what_toml_cannot_say_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORABRIDGE_TRAINER__EXTRA", '{"a": null, "b": 1}')
    file = write(tmp_path, to_toml(load(None)))
    monkeypatch.delenv("LORABRIDGE_TRAINER__EXTRA")
    assert load(file).trainer.extra == {"b": 1}
