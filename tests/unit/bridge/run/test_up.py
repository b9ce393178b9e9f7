"""What a run leaves and what it hands on: no password on disk, paths that mean the same anywhere."""

import os
import stat
from pathlib import Path

import pytest

from lorabridge.bridge.errors import ConfigError, MachineError
from lorabridge.bridge.run.up import (
    PASSWORD,
    _alone,
    check_installed,
    check_new,
    resolved,
    without_password,
    write_configuration,
)
from lorabridge.bridge.settings import Settings, load


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PASSWORD, "")  # so that it is put back
    monkeypatch.delenv("LORABRIDGE_CONTROL_TOKEN", raising=False)


def settings(*overrides: str) -> Settings:
    return load(None, overrides)


def test_a_password_in_the_url_moves_to_the_environment() -> None:
    found = resolved(settings("redis.url=rediss://user:p%40ss@host:6380/2?x=1"))
    assert found.redis.url == "rediss://user@host:6380/2?x=1"
    assert os.environ[PASSWORD] == "p@ss"
    assert resolved(settings("redis.url=redis://:secret@host/0")).redis.url == "redis://host/0"


def test_paths_are_absolute(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    found = resolved(settings("run.dir=runs/x", "model.path=model", "generators.token_file=t", "store.url=s"))
    assert found.run.dir == tmp_path / "runs/x"
    assert found.ledger_dir == tmp_path / "runs/x/ledger"
    assert found.model.path == str(tmp_path / "model")
    assert found.token_file == tmp_path / "t"
    assert found.store_url == str(tmp_path / "s")


def test_what_is_no_path_is_left_alone() -> None:
    found = resolved(settings("model.path=org/model", "store.url=file:///adapters"))
    assert (found.model.path, found.store_url) == ("org/model", "file:///adapters")


def test_the_configuration_that_is_left_is_the_one_that_ran(tmp_path: Path) -> None:
    run = resolved(settings("run.dir=x", "redis.url=redis://u:secret@host/0", "trainer.max_steps=7"))
    run.run.dir.mkdir()
    write_configuration(run)
    text = (tmp_path / "x/config.toml").read_text()
    assert "secret" not in text
    assert load(tmp_path / "x/config.toml").model_dump() == run.model_dump()


@pytest.mark.parametrize(
    ("url", "without", "password"),
    [
        ("redis://u:p%40ss@host:1/0", "redis://u@host:1/0", "p@ss"),
        ("redis://host/0?password=p%26s&protocol=3", "redis://host/0?protocol=3", "p&s"),
        ("unix://u@/run/redis.sock?db=1&password=x", "unix://u@/run/redis.sock?db=1", "x"),
        ("redis://u:one@host/0?password=two", "redis://u@host/0", "one"),
        ("redis://host?password=first&password=second", "redis://host", "first"),
        ("rediss://host", "rediss://host", None),
    ],
)
def test_a_password_is_taken_out_of_the_url_wherever_it_stands(url: str, without: str, password: str | None) -> None:
    assert without_password(url) == (without, password)


def test_a_folder_with_a_finished_run_is_not_used_again(tmp_path: Path) -> None:
    check_new(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a finished run"):
        check_new(tmp_path)


def test_the_control_token_is_its_owners_and_stays(tmp_path: Path) -> None:
    run = resolved(settings("run.dir=x"))
    run.run.dir.mkdir()
    write_configuration(run)
    token = tmp_path / "x/control.token"
    first = token.read_text()
    assert len(first) >= 32
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    write_configuration(run)
    assert token.read_text() == first


def test_servers_of_others_have_a_token_of_their_own(tmp_path: Path) -> None:
    run = resolved(settings("run.dir=x", 'generators.urls=["http://host:8000"]'))
    run.run.dir.mkdir()
    write_configuration(run)
    assert not (tmp_path / "x/control.token").exists()


def test_packages_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("trl", "vllm") else name)
    with pytest.raises(ConfigError, match="needs trl, vllm, not installed"):
        check_installed(serves=True)
    with pytest.raises(ConfigError, match="needs trl, not installed"):
        check_installed(serves=False)


def test_a_folder_has_one_supervisor(tmp_path: Path) -> None:
    with _alone(tmp_path), pytest.raises(MachineError, match="another lorabridge runs in"), _alone(tmp_path):
        pass
    with _alone(tmp_path):
        pass
