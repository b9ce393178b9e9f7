"""Damaged input is harmless or refused with an error of ours (4xx at a door): a slice of ``python -m tests.fuzz``."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz.campaign import campaign


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    return campaign(tmp_path_factory.mktemp("fuzz"), 3000, seed=1)


@pytest.mark.parametrize(
    "target",
    [
        "group", "event", "announced manifest", "run record", "manifest", "adapter", "swap", "restarts", "generate",
        "ledger", "settings",
    ],
)  # fmt: skip
def test_damaged_input_is_harmless_or_refused(target: str, results: dict[str, Counter[str]]) -> None:
    assert results[target].keys() <= {"taken", "refused"}
    assert results[target]["refused"] > 0
