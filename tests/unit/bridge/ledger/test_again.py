"""An entry that was put on a stream a second time is in the ledger once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorabridge.bridge.ledger.again import without_known
from lorabridge.bridge.ledger.commits import read_log
from lorabridge.bridge.stream.keys import WAS

A, B, C = "4-0", "5-0", "6-0"


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ("", True),
        ("1-1", False),  # the ledger has it
        ("2-1", True),  # the ledger has what came before and after, and not this
        (A, False),  # it was read just now, before the server forgot it
        (f"2-1 {A}", False),  # put there twice, of which the first had come
        ("3-0 2-2", False),
        ("9-9", True),
    ],
)
def test_by_the_ids_that_it_had(ledger: Path, make: Any, before: str, kept: bool) -> None:
    group = make.group(make.trajectory(7, 0))
    entries = [(A, make.group(make.trajectory(6, 0))), (B, group | ({WAS: before.encode()} if before else {}))]
    found = without_known(ledger, read_log(ledger), "trajectories", [*entries, (C, group)])
    assert [entry for entry, _ in found] == ([A, B, C] if kept else [A, C])


def test_of_another_stream_it_is_another_entry(ledger: Path, make: Any) -> None:
    entries = [("5-0", make.fields(make.manifest(3)) | {WAS: b"3-0"})]
    assert without_known(ledger, read_log(ledger), "announce", entries) == entries
    entries = [("5-0", make.fields(make.manifest(1)) | {WAS: b"4-0"})]
    assert without_known(ledger, read_log(ledger), "announce", entries) == []
