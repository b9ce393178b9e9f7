"""Two kills of a real run, as ``make chaos`` does many: it ends as it should have, and its audit refutes nothing."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.processes import Process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 16
SEED = 0  # of those two kinds it draws one after the other
END_S = 800.0


def test_a_trainer_and_a_worker_are_killed_and_the_run_ends_and_audits_clean(base: Path, tmp_path: Path) -> None:
    results = tmp_path / "chaos.jsonl"
    arguments = [
        "--rounds", "2", "--seed", str(SEED), "--kinds", "worker", "trainer", "--steps", str(STEPS),
        "--set", f"model.path={base}", "--set", "trainer.per_device_train_batch_size=16", "--results", str(results),
    ]  # fmt: skip
    with Process(tmp_path, "tests.chaos", *arguments) as chaos:
        deadline = time.monotonic() + END_S
        while chaos.running and time.monotonic() < deadline:
            time.sleep(0.2)
        assert chaos.code == 0, chaos.said()
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    kills: Counter[str] = Counter()
    for run in runs:
        kills.update(run["kills"])
        assert run["steps"] == STEPS
        assert run["tokens"] > run["tokens_refuted"] == run["tokens_unverifiable"] == 0
    assert kills == {"trainer": 1, "worker": 1}
