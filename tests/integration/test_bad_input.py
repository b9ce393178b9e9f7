"""What a user gets wrong: each command ends with one sentence, the next step, and its documented exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.stream.embedded import embedded_valkey

_SILENT = ("Traceback", 'File "')


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSection]:
    with embedded_valkey(tmp_path_factory.mktemp("valkey")) as section:
        yield section


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As much of a model's folder as these commands look at before they need a real one."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, without a terminal."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LORABRIDGE_")}
    return subprocess.run(
        [sys.executable, "-m", "lorabridge.bridge.cli", *arguments],
        capture_output=True, text=True, timeout=120, check=False, env=inherited | environment,
    )  # fmt: skip


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One sentence on stderr, with these words in it, and this exit code."""
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert not any(word in done.stderr for word in _SILENT)
    for word in words:
        assert word in lines[0], done.stderr


def nowhere() -> str:
    """An address on loopback where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"redis://127.0.0.1:{probe.getsockname()[1]}/0"


@pytest.mark.parametrize("command", ["up", "train", "head", "archiver"])
def test_redis_that_nobody_runs(command: str, model: Path, tmp_path: Path) -> None:
    sets = (f"redis.url={nowhere()}", "redis.connect_s=0.5", f"model.path={model}", f"run.dir={tmp_path / 'run'}")
    done = run(command, *(part for value in sets for part in ("--set", value)))
    refused(done, 3, "Redis", "does not answer", "Start Redis or Valkey")


def test_a_wrong_redis_password(valkey: RedisSection, model: Path) -> None:
    sets = ("--set", f"redis.url={valkey.url}", "--set", f"model.path={model}")
    done = run("head", *sets, LORABRIDGE_REDIS_PASSWORD="wrong-password")
    refused(done, 3, "password", "LORABRIDGE_REDIS_PASSWORD")
    assert "wrong-password" not in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[trainer]\nmax_step = 3\n", ("trainer.max_step", "trainer.max_steps")),
        ("[trainner]\nmax_steps = 3\n", ("trainner", "trainer")),
        ("[rollout]\ntemperature = -1\n", ("rollout.temperature", "-1")),
        ('[generators]\nkv = "drop"\n', ("generators.kv", "drop", "keep")),
        ("[trainer\n", ("TOML",)),
    ],
)
def test_a_configuration_with_a_mistake(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    refused(run("head", "--config", str(file)), 2, str(file), *words)


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    refused(run("train", "--config", str(tmp_path / "none.toml")), 2, "none.toml")


@pytest.mark.parametrize("command", ["train", "serve", "worker"])
def test_a_model_folder_that_is_not_there(command: str, valkey: RedisSection, tmp_path: Path) -> None:
    sets = (f"redis.url={valkey.url}", f"redis.password_file={valkey.password_file}", "model.path=/no/such/model",
            "rollout.environment=lorabridge.rollout.tasks.sort", f"run.dir={tmp_path}")  # fmt: skip
    done = run(command, *(part for value in sets for part in ("--set", value)))
    refused(done, 6, "/no/such/model", "[model] path")


@pytest.mark.parametrize("taken", ["port", "control_port"])
def test_a_port_that_is_taken(taken: str, model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sets = (f"generators.{taken}={port}", f"model.path={model}", f"run.dir={tmp_path / 'run'}")
        done = run("serve", *(part for value in sets for part in ("--set", value)))
    refused(done, 9, str(port), "[generators] port")


def test_a_control_token_that_is_too_short(model: Path, tmp_path: Path) -> None:
    sets = ("--set", f"model.path={model}", "--set", f"run.dir={tmp_path / 'run'}")
    refused(run("serve", *sets, LORABRIDGE_CONTROL_TOKEN="short"), 2, "control token")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('policy.target_modules=["lm_head"]', ("lm_head",)),
        ("policy.rank=1000", ("rank 1000",)),
        ("publish.max_lora_rank=4", ("rank 8", "4")),
    ],
)
def test_an_adapter_that_vllm_cannot_serve_is_refused_before_training(
    override: str, words: tuple[str, ...], valkey: RedisSection, model: Path, tmp_path: Path
) -> None:
    sets = (f"redis.url={valkey.url}", f"redis.password_file={valkey.password_file}", f"model.path={model}",
            "rollout.environment=lorabridge.rollout.tasks.sort", f"run.dir={tmp_path / 'run'}", override)  # fmt: skip
    refused(run("train", *(part for value in sets for part in ("--set", value))), 6, *words)


@pytest.mark.parametrize("command", [["audit"], ["lag"], ["replay", "show", "x"], ["replay", "verify", "x"]])
def test_a_folder_that_is_not_a_run(command: list[str], tmp_path: Path) -> None:
    refused(run(*command, "--run", str(tmp_path)), 2, "not the folder of a run")


def test_a_run_without_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'[run]\ndir = "{tmp_path}"\n')
    refused(run("lag", "--run", str(tmp_path)), 7, "ledger", "archiver")


def test_a_worker_whose_task_is_not_to_be_found(valkey: RedisSection, model: Path, tmp_path: Path) -> None:
    sets = (f"redis.url={valkey.url}", f"redis.password_file={valkey.password_file}", f"model.path={model}",
            "rollout.environment=no_such_task:environment", f"run.dir={tmp_path}")  # fmt: skip
    refused(run("worker", *(part for value in sets for part in ("--set", value))), 2, "no_such_task", "PYTHONPATH")
