"""vLLM's own layers keep what is in a slot where attestation looks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_slot_is_the_first_dimension_of_every_matrix_of_an_embedding() -> None:
    command = [sys.executable, "-m", "tests.e2e.layers"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == [[[each == slot for each in range(3)]] * 2 for slot in range(3)]
