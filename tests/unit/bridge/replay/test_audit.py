"""What the audit finds before it computes anything, and how verdicts sum up. The scorer computes nothing here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lorabridge.bridge.digest import hex_of
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.replay.audit import LISTED, SpanReport, audit, draw, verify
from lorabridge.bridge.replay.scorer import Chain, Piece, batches
from lorabridge.bridge.replay.verdict import Verdict
from lorabridge.bridge.residency import KvMode, Residency, Served
from lorabridge.bridge.trajectory import Trajectory, Turn

if TYPE_CHECKING:
    from tests.unit.bridge.replay.conftest import Case

ROOM = Path(__file__).parents[4] / "bridge" / "replay"


def verdicts(case: Case, *trajectories: Trajectory, **options: Any) -> list[Verdict]:
    return [report.verdict for report in verify(trajectories, case.store, case.scorer, **options)]


def reasons(case: Case, trajectory: Trajectory, **options: Any) -> set[str]:
    reports: list[SpanReport] = verify([trajectory], case.store, case.scorer, **options)
    return {reason for report in reports for reason in report.reasons}


def change(turn: Turn, at: int, **fields: Any) -> Turn:
    """The turn with fields of its span ``at`` changed."""
    spans = list(turn.spans)
    spans[at] = msgspec.structs.replace(spans[at], **fields)
    return msgspec.structs.replace(turn, spans=tuple(spans))


def test_an_honest_record_holds(case: Case) -> None:
    two = case.trajectory(case.turn((2, 4, "fresh")), case.turn((2, 3, "fresh"), (3, 5, "kept")))
    told: list[tuple[int, int]] = []
    report = audit([two], case.store, case.scorer, on_progress=lambda *done: told.append(done))
    assert report.figures() == {
        "trajectories": 1, "tokens": 12, "confirmed": 12, "indistinct": 0, "refuted": 0, "unverifiable": 0,
        "discriminated": 12, "max_error": 0.0,
    }  # fmt: skip
    assert report.holds
    assert told[-1] == (12, 12)


def test_nothing_to_audit_does_not_hold(case: Case) -> None:
    report = audit([], case.store, case.scorer)
    assert (report.tokens, report.max_error, report.holds) == (0, None, False)


def test_a_turn_without_tokens_is_no_finding(case: Case) -> None:
    assert verdicts(case, case.trajectory(case.turn(), case.turn((1, 2, "fresh")))) == [Verdict.CONFIRMED]


def test_spans_on_kept_kv_are_chained_and_fresh_ones_start_again(case: Case) -> None:
    turn = case.turn((1, 2, "fresh"), (2, 3, "kept"), (3, 2, "fresh"), (4, 2, "kept"))
    verdicts(case, case.trajectory(turn))
    assert [[piece.version for piece in chain.pieces] for chain in case.scorer.chains] == [[1, 2], [3, 4]]
    first, second = case.scorer.chains
    assert [first.fed(n) for n in (0, 1)] == [(1, 3), (3, 6)]  # two prompt tokens; all but the last sampled one
    assert [second.fed(n) for n in (0, 1)] == [(1, 8), (8, 10)]


def test_neighbours_are_the_versions_before_and_after(case: Case) -> None:
    verdicts(case, *(case.trajectory(case.turn((version, 1, "fresh"))) for version in (1, 3, 5)))
    found = [chain.pieces[0].neighbours for chain in case.scorer.chains]
    ds = case.digests
    assert found == [(ds[1],), (ds[1], ds[3]), (ds[3],)]


def test_a_neighbour_that_cannot_be_read_is_left_out(case: Case) -> None:
    for version in (2, 4):
        shutil.rmtree(case.store.root / "adapters" / "sha256" / hex_of(case.digests[version - 1]))
    trajectory = case.trajectory(case.turn((3, 2, "fresh")))
    assert verdicts(case, trajectory) == [Verdict.INDISTINCT]
    assert reasons(case, trajectory) == {"no neighbouring version to tell it from"}


def test_a_digest_that_the_manifest_does_not_have_is_refuted(case: Case) -> None:
    turn = case.turn((1, 2, "fresh"), (2, 3, "kept"), (3, 2, "kept"), (4, 2, "fresh"))
    changed = case.trajectory(change(turn, 1, digest=case.digests[3]))
    assert verdicts(case, changed) == [Verdict.CONFIRMED, Verdict.REFUTED, Verdict.UNVERIFIABLE, Verdict.CONFIRMED]
    assert reasons(case, changed) == {
        "the manifest of policy version 2 has another digest",
        "it continues on KV that cannot be recomputed",
    }


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"version": 99}, "has no version 99"),
        ({"policy": "../other"}, "cannot name a policy"),
    ],
)
def test_a_version_that_was_never_committed_is_unverifiable(case: Case, fields: dict[str, Any], word: str) -> None:
    trajectory = case.trajectory(change(case.turn((1, 2, "fresh")), 0, **fields))
    assert verdicts(case, trajectory) == [Verdict.UNVERIFIABLE]
    assert any(word in reason for reason in reasons(case, trajectory))


def test_an_unreadable_manifest_is_unverifiable(case: Case) -> None:
    file = case.store.root / "policies" / "policy" / "3.json"
    file.write_bytes(b"{}")
    assert verdicts(case, case.trajectory(case.turn((3, 2, "fresh")))) == [Verdict.UNVERIFIABLE]


def test_changed_bytes_are_a_finding_and_no_crash(case: Case) -> None:
    place = case.store.root / "adapters" / "sha256" / hex_of(case.digests[2])
    (place / "adapter_model.safetensors").write_bytes(b"other")
    trajectory = case.trajectory(case.turn((3, 2, "fresh")))
    assert verdicts(case, trajectory) == [Verdict.UNVERIFIABLE]
    assert any("have the digest" in reason for reason in reasons(case, trajectory))


@pytest.mark.parametrize("part", ["checkpoint", "tokenizer", "template"])
def test_another_base_is_named_by_the_part_that_differs(case: Case, part: str) -> None:
    case.scorer.base = msgspec.structs.replace(case.scorer.base, **{part: "sha256:other"})
    trajectory = case.trajectory(case.turn((3, 2, "fresh")))
    assert verdicts(case, trajectory) == [Verdict.UNVERIFIABLE]
    assert reasons(case, trajectory) == {f"the base model here is not the manifest's: {part} differs"}


def test_a_sample_from_another_base_than_its_adapter_is_unverifiable(case: Case) -> None:
    other = Fingerprint(checkpoint="sha256:x", tokenizer="", template="").digest
    assert verdicts(case, case.trajectory(case.turn((3, 2, "fresh")), base=other)) == [Verdict.UNVERIFIABLE]


@pytest.mark.parametrize(
    ("fields", "verdict", "word"),
    [
        ({"logprobs": (-1.0,)}, Verdict.UNVERIFIABLE, "as many logprobs"),
        ({"prompt_ids": ()}, Verdict.UNVERIFIABLE, "prompt is empty"),
        ({"token_ids": (1, 50)}, Verdict.REFUTED, "token 50 is not in"),
        ({"prompt_ids": (-1,)}, Verdict.REFUTED, "token -1 is not in"),
        ({"spans": ()}, Verdict.UNVERIFIABLE, "cover 0 of 2"),
    ],
)
def test_what_is_wrong_with_a_whole_turn(case: Case, fields: dict[str, Any], verdict: Verdict, word: str) -> None:
    trajectory = case.trajectory(msgspec.structs.replace(case.turn((3, 2, "fresh")), **fields))
    (report,) = verify([trajectory], case.store, case.scorer)
    assert (report.verdict, report.span, report.tokens) == (verdict, None, 2)
    assert word in next(iter(report.reasons))


def test_spans_that_do_not_tile_are_unverifiable(case: Case) -> None:
    turn = case.turn((1, 2, "fresh"), (2, 3, "kept"))
    assert verdicts(case, case.trajectory(change(turn, 1, start=1))) == [Verdict.UNVERIFIABLE]
    assert verdicts(case, case.trajectory(change(turn, 0, kv="kept"))) == [Verdict.UNVERIFIABLE]


def test_another_dtype_is_not_calibrated(case: Case) -> None:
    trajectory = case.trajectory(case.turn((3, 2, "fresh")), dtype="bfloat16")
    assert reasons(case, trajectory) == {"not calibrated for bfloat16"}


def test_an_adapter_that_cannot_be_loaded_is_a_finding(case: Case) -> None:
    case.scorer.broken = {case.digests[2]}
    fits, not_fits = case.trajectory(case.turn((1, 2, "fresh"))), case.trajectory(case.turn((3, 2, "fresh")))
    assert verdicts(case, fits, not_fits) == [Verdict.CONFIRMED, Verdict.UNVERIFIABLE]
    assert reasons(case, not_fits) == {"it does not fit"}


def test_a_wrong_label_is_refuted_and_the_right_one_named(case: Case) -> None:
    turn = change(case.turn((2, 4, "fresh")), 0, version=3, digest=case.digests[2])
    report = audit([case.trajectory(turn)], case.store, case.scorer)
    assert (report.refuted, report.discriminated, report.refuted_trajectories) == (4, 4, ("run/3.1/0",))
    assert report.reasons == {"its own version does not explain it, a neighbouring one does": 4}
    assert report.max_error == pytest.approx(0.1)


def records(case: Case, *epochs: tuple[int, KvMode]) -> dict[str, Residency]:
    """Epoch n serves version n; (epoch, kv)."""
    made = [
        Residency(
            generator="generator", instance="instance", epoch=epoch, kv=kv, at_ms=0,
            serves={"policy": Served(version=epoch, digest=case.digests[epoch - 1])},
        )
        for epoch, kv in epochs
    ]  # fmt: skip
    return {record.label: record for record in made}


def test_residency_records_are_held_against_spans(case: Case) -> None:
    kept = case.trajectory(case.turn((2, 2, "fresh"), (3, 3, "kept")))
    assert verdicts(case, kept, residencies=records(case, (2, "keep"), (3, "keep"))) == [Verdict.CONFIRMED] * 2
    dropped = records(case, (2, "keep"), (3, "recompute"))
    assert verdicts(case, kept, residencies=dropped) == [Verdict.CONFIRMED, Verdict.REFUTED]
    assert verdicts(case, kept, residencies=records(case, (2, "keep"))) == [Verdict.UNVERIFIABLE] * 2
    moved = case.trajectory(change(case.turn((2, 2, "fresh")), 0, epoch=4))
    assert verdicts(case, moved, residencies=records(case, (4, "keep"))) == [Verdict.REFUTED]


def test_a_report_names_some_of_the_refuted(case: Case) -> None:
    wrong = change(case.turn((2, 1, "fresh")), 0, version=3, digest=case.digests[2])
    many = [case.trajectory(wrong, index=n) for n in range(LISTED + 5)]
    assert len(audit(many, case.store, case.scorer).refuted_trajectories) == LISTED


def test_drawing_is_even_and_by_seed(case: Case) -> None:
    every = [case.trajectory(index=n) for n in range(10)]
    assert draw(every, 3, 1) == draw(iter(every), 3, 1)
    assert draw(every, 20, 0) == every
    times = Counter(t.index for seed in range(600) for t in draw(every, 3, seed))
    assert set(times) == set(range(10))
    assert all(120 < count < 240 for count in times.values())


def chain(key: int, digest: str, prompt: int, count: int) -> Chain:
    piece = Piece(policy="policy", version=1, digest=digest, neighbours=(), start=0, end=count)
    return Chain(
        key=(key,), prompt_ids=(1,) * prompt, token_ids=(2,) * count, pieces=(piece,), divisor=1.0
    )  # fmt: skip


def test_batches_hold_each_chain_once_within_their_limits() -> None:
    chains = [chain(n, f"d{n % 3}", 1 + n % 5, 1 + n % 7) for n in range(40)]
    made = list(batches(chains, max_rows=4, max_positions=30))
    assert sorted(each.key for batch in made for each in batch) == [(n,) for n in range(40)]
    for batch in made:
        assert len({each.adapters for each in batch}) == 1
        assert len(batch) <= 4
        assert len(batch) == 1 or len(batch) * max(each.length for each in batch) <= 30


def test_importing_the_room_loads_no_torch() -> None:
    modules = ", ".join(f"lorabridge.bridge.replay.{file.stem}" for file in ROOM.glob("[!_]*.py"))
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers', 'peft'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
