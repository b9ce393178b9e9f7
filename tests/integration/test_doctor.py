"""What the doctor says of a run on a real Redis and a real store, whose server is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from lorabridge.bridge import cli, codec
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.store import open_store
from lorabridge.bridge.stream.head import move_head
from lorabridge.bridge.stream.keys import Keys
from tests.factories import make_adapter, make_manifest, make_run_record


@pytest.fixture
def config(redis_section: RedisSection, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORABRIDGE_CONTROL_TOKEN", "the control token of this test")
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nid = "{run_id}"\ndir = "{tmp_path}"\n[redis]\nurl = "{redis_section.url}"\n'
        f'[generators]\nurls = ["http://127.0.0.1:9"]\ncontrol = ["http://127.0.0.1:9"]\n'
    )
    if redis_section.password_file:
        file.write_text(
            file.read_text().replace("[generators]", f'password_file = "{redis_section.password_file}"\n[generators]')
        )
    return file


def findings(config: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert cli.run(["doctor", "--config", str(config), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {f"{one['subject']} {one['check']}": one["level"] for one in answer["findings"]}


def test_everything_that_can_be_looked_at_is_and_what_is_missing_is_a_problem(
    config: Path, client: redis.Redis, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path / "store"))
    manifest = make_manifest(digest=store.put(make_adapter()), epoch=store.allocate_epoch("policy"))
    store.commit(manifest)
    move_head(client, keys, manifest)
    client.set(keys.run, codec.encode(make_run_record()))
    found = findings(config, capsys)
    assert found["http://127.0.0.1:9 plugin"] == "problem"
    nothing_to_see = {"http://127.0.0.1:9 plugin", "configuration joins the run"}  # no model is configured
    assert {name for name, level in found.items() if level == "problem"} == nothing_to_see
    assert found["head line"] == found["store bytes"] == found["run record"] == found["Redis version"] == "ok"
    (tmp_path / "store" / "adapters" / "sha256" / manifest.digest[7:] / "adapter_model.safetensors").write_bytes(b"x")
    assert findings(config, capsys)["store bytes"] == "problem"
    client.delete(keys.head("policy"))
    assert findings(config, capsys)["head line"] == "problem"


def test_the_fleet_names_what_does_not_answer(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["fleet", "--config", str(config), "--json"]) == 1
    (generator,) = json.loads(capsys.readouterr().out.splitlines()[-1])["generators"]
    assert (generator["health"], generator["controller"]) == ("out", "")
    assert "does not answer" in generator["why"]
    assert cli.run(["fleet", "--config", str(config)]) == 1
    assert "does not answer" in capsys.readouterr().out


def test_a_redis_that_is_not_there_is_a_finding(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORABRIDGE_REDIS__URL", "redis://127.0.0.1:9/0")
    monkeypatch.setenv("LORABRIDGE_REDIS__CONNECT_S", "0.1")
    assert findings(config, capsys)["Redis reachable"] == "problem"
