"""A worker that differs from the run is refused and told in what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lorabridge.bridge.errors import ConfigError, RunMismatch
from lorabridge.bridge.run_record import RunRecord, check_base, check_joins, environment_digest
from lorabridge.bridge.trajectory import Sampling
from tests.factories import BASE, digest_of, make_run_record

OTHER: dict[str, Any] = {
    "run": "elsewhere", "policy": "other", "num_generations": 4, "eos_ids": (0,), "environment": digest_of("edited"),
    "seed": 1,
}  # fmt: skip
# What the servers must take, what only the trainer decides, and what the codec already refused.
NOT_A_WORKERS = {"rank", "epoch", "groups_ahead", "schema"}


def test_the_same_record_joins() -> None:
    check_joins(make_run_record(), make_run_record())


def test_the_tables_below_cover_every_field() -> None:
    assert set(RunRecord.__struct_fields__) == set(OTHER) | {"base", "sampling"} | NOT_A_WORKERS


@pytest.mark.parametrize("field", OTHER)
def test_a_field_that_differs_is_named_with_both_values(field: str) -> None:
    mine = make_run_record(**{field: OTHER[field]})
    with pytest.raises(RunMismatch) as caught:
        check_joins(make_run_record(), mine)
    assert caught.value.problem.startswith(f"{field} is {OTHER[field]!r} here")
    assert repr(getattr(make_run_record(), field)) in caught.value.problem


@pytest.mark.parametrize("field", Sampling.__struct_fields__)
def test_a_sampling_parameter_that_differs_is_named_with_both_values(field: str) -> None:
    ours, theirs = Sampling(), getattr(Sampling(), field)
    changed = msgspec.structs.replace(ours, **{field: theirs + 1})
    with pytest.raises(RunMismatch, match=rf"sampling\.{field} is {theirs + 1} here and {theirs} at the trainer"):
        check_joins(make_run_record(), make_run_record(sampling=changed))


@pytest.mark.parametrize("part", ["checkpoint", "tokenizer", "template"])
def test_another_base_model_is_named_by_its_part(part: str) -> None:
    other = msgspec.structs.replace(BASE, **{part: digest_of("another")})
    with pytest.raises(RunMismatch, match=f"base model's {part} differs: this worker has {digest_of('another')}"):
        check_joins(make_run_record(), make_run_record(base=other))
    with pytest.raises(RunMismatch, match=f"{part} differs: the generator"):
        check_base(BASE, other, "the generator")


def test_the_environments_digest_is_that_of_its_source_and_running_it_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "a_task_of_ours.py"
    file.write_text("raise AssertionError('imported')")
    before = environment_digest("a_task_of_ours:environment")
    assert before == environment_digest("a_task_of_ours")
    file.write_text("raise AssertionError('edited')")
    assert environment_digest("a_task_of_ours:environment") != before


@pytest.mark.parametrize("reference", ["", ":x", "no_such_module:x", "no.such.module:x", "sys:path", "a b:c", "..x:y"])
def test_an_environment_without_a_source_is_a_configuration_error(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"\[rollout\] environment"):
        environment_digest(reference)
