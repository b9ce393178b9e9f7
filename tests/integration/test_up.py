"""``up`` from its first process to its summary, with the real archiver and stand-ins for what imports torch or vllm."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lorabridge.bridge.errors import BridgeError, ProcessDied
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.run import commands, up
from lorabridge.bridge.settings import Settings, load
from lorabridge.bridge.stream.embedded import embedded_valkey, free_port

STAND_INS = """
import os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

COMMAND = sys.argv[1]

def serve(settings):
    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    HTTPServer((settings.generators.host, settings.generators.port), Health).serve_forever()

def worker(settings):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("drained")))
    time.sleep(600)

def train(settings):
    from lorabridge.bridge import codec
    from lorabridge.bridge.events import Consumed, Event, Published
    from lorabridge.bridge.fingerprint import Fingerprint
    from lorabridge.bridge.manifest import Manifest
    from lorabridge.bridge.stream.connection import connect, now_ms
    from lorabridge.bridge.stream.head import move_head
    from lorabridge.bridge.stream.keys import Keys
    redis, keys = connect(settings.redis), Keys(settings.run.id)
    base = Fingerprint(checkpoint="c", tokenizer="t", template="p")
    for step in range(settings.trainer.max_steps):
        digest = f"sha256:{step:064x}"
        move_head(redis, keys, Manifest(
            policy="policy", version=step + 1, digest=digest, parent=None, base=base, rank=8, targets=("q_proj",),
            dtype="F32", step=step, epoch=1, run=settings.run.id, created_ms=now_ms(redis), size=1))
        for happening in (
            Published(policy="policy", version=step + 1, digest=digest, step=step, phases_ms={"blocked": 4.0}),
            Consumed(policy="policy", step=step, trajectories=("a", "b"), tokens=10, lag_total=10, lag_max=step,
                     lag_s=1, reward=step / 10)):
            event = Event(source="train", at_ms=now_ms(redis), happening=happening)
            redis.xadd(keys.events, {"body": codec.encode(event)})
        time.sleep(0.01)
    while not redis.exists(keys.archiver):  # one that is not up yet would write nothing
        time.sleep(0.01)
    if os.environ.get("TRAIN_DIES"):
        sys.exit("lorabridge: adapter: it is full of NaN. Lower the learning rate")

def audit():
    refuted = int(os.environ.get("REFUTED", "0"))
    print('{"trajectories": 0, "tokens": 9, "confirmed": 9, "indistinct": 0, "refuted": %d, "unverifiable": 0,'
          ' "discriminated": 7, "max_error": 1e-5, "and": "more"}' % refuted)
    print("a library says goodbye")
    sys.exit(refuted > 0)

if COMMAND == "audit":
    audit()
elif COMMAND == "archiver":
    from lorabridge.bridge import cli
    cli.main()
else:
    from lorabridge.bridge.settings import (load)
    {"serve": serve, "worker": worker, "train": train}[COMMAND](load(Path(sys.argv[3])))
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the run, whose processes are stand-ins."""
    (tmp_path / "stand_ins.py").write_text(STAND_INS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(up, "_CLI", "stand_ins")
    monkeypatch.setenv(up.PASSWORD, "")  # so that it is put back
    monkeypatch.setenv("LORABRIDGE_TRAINER__MAX_STEPS", "999")  # a setting of the shell's loses against the file
    return tmp_path / "runs" / "x"


def settings_in(folder: Path, url: str, password_file: Path | None, *overrides: str) -> Settings:
    return load(None, [
        "run.id=x", f"run.dir={folder}", f"redis.url={url}", f"redis.password_file={password_file}",
        "trainer.max_steps=10", f"generators.port={free_port()}", *overrides,
    ])  # fmt: skip


def test_a_run_from_its_first_process_to_its_summary(stand_ins: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with embedded_valkey(tmp_path / "valkey") as redis:
        summary, folder = up.up(settings_in(stand_ins, redis.url, redis.password_file), console)
    assert folder == stand_ins
    assert (summary.steps, summary.versions_published, summary.lag_max) == (10, 10, 9)
    assert summary.reward_first == pytest.approx(0.05)
    assert summary.reward_last == pytest.approx(0.85)
    assert (summary.tokens_audited, summary.publish_blocked_ms_p50) == (9, 4.0)
    left = {path.name for path in folder.iterdir()}
    assert {"config.toml", "control.token", "ledger", "logs", "summary.json", "reward.png", "lag.png"} <= left
    assert json.loads((folder / "summary.json").read_text())["steps"] == 10
    assert {log.name for log in (folder / "logs").iterdir()} == {
        f"{name}.log" for name in ("serve", "archiver", "train", "worker", "audit")
    }
    assert "drained" in (folder / "logs/worker.log").read_text()
    assert redis.password_file and redis.password_file.read_text() not in (folder / "config.toml").read_text()
    assert isinstance(console.file, io.StringIO)
    assert "waits for the audit" in console.file.getvalue()


def test_a_trainer_that_dies_ends_the_run_which_stays_readable(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_DIES", "1")
    with embedded_valkey(tmp_path / "valkey") as redis, pytest.raises(ProcessDied) as caught:
        up.up(settings_in(stand_ins, redis.url, redis.password_file), Console(file=io.StringIO()))
    assert "train ended (exit code 1): adapter: it is full of NaN" in caught.value.problem
    assert len(Ledger(stand_ins / "ledger").manifests()) == 10


def test_an_audit_that_refutes_is_the_answer_no(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFUTED", "3")
    with embedded_valkey(tmp_path / "valkey") as redis:
        settings = settings_in(stand_ins, redis.url, redis.password_file)
        config = tmp_path / "config.toml"
        config.write_text(f'[run]\nid = "x"\ndir = "{stand_ins}"\n[redis]\nurl = "{redis.url}"\n'
                          f'password_file = "{redis.password_file}"\n')  # fmt: skip
        with pytest.raises(BridgeError, match="refutes 3 tokens") as caught:
            overrides = [f"generators.port={settings.generators.port}", "trainer.max_steps=5"]
            commands.up(config=config, overrides=overrides, json=True)
    assert caught.value.exit_code == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens_refuted"] == 3
    assert "3 refuted" in said.err
