"""The audit against a real model: trajectories are sampled here, token by token with plain PEFT, and then judged.

The loop that samples shares nothing with the scorer: no batches, no padding, adapters loaded from folders as PEFT
saved them, KV kept or dropped by hand.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from lorabridge.bridge.adapter import Adapter  # noqa: E402
from lorabridge.bridge.digest import TENSORS_FILE, hex_of, read_config  # noqa: E402
from lorabridge.bridge.fingerprint import Fingerprint, fingerprint  # noqa: E402
from lorabridge.bridge.manifest import Manifest  # noqa: E402
from lorabridge.bridge.replay.audit import AuditReport, SpanReport, audit, verify  # noqa: E402
from lorabridge.bridge.replay.scorer import Scorer  # noqa: E402
from lorabridge.bridge.replay.verdict import Verdict  # noqa: E402
from lorabridge.bridge.residency import KvMode, Residency, Served  # noqa: E402
from lorabridge.bridge.store.local import LocalStore  # noqa: E402
from lorabridge.bridge.trajectory import Sampling, Span, Trajectory, Turn  # noqa: E402

VERSIONS = 7
VOCABULARY = 64
POLICY = "policy"
Kv = Literal["kept", "fresh"]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class World(msgspec.Struct, frozen=True):
    """A base model, a store with a line of versions, and the trajectories sampled under them."""

    folder: Path
    base: Path
    store: LocalStore
    scorer: Scorer
    digests: tuple[str, ...]
    trajectories: tuple[Trajectory, ...]

    def audit(self, trajectories: Iterable[Trajectory], **options: Any) -> AuditReport:
        return audit(trajectories, self.store, self.scorer, **options)

    def verify(self, trajectories: Sequence[Trajectory], **options: Any) -> list[SpanReport]:
        return verify(trajectories, self.store, self.scorer, **options)


def make_base(folder: Path, hidden: int = 64, seed: int = 0) -> Path:
    """A random Qwen2 on disk."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapters(base: Path, folder: Path, count: int) -> list[Path]:
    """A line of adapters as training makes it: each is the one before with some noise. Saved by PEFT."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=LINEAR, init_lora_weights=False)
    model = peft.get_peft_model(transformers.Qwen2ForCausalLM.from_pretrained(base), config)
    for version in range(1, count + 1):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.add_(torch.randn_like(weight), alpha=0.05)
        model.save_pretrained(folder / str(version))
    return [folder / str(version) for version in range(1, count + 1)]


def commit_line(store: LocalStore, base: Fingerprint, adapters: list[Path]) -> tuple[str, ...]:
    """Commit every adapter as the next version; their digests."""
    epoch, digests = store.allocate_epoch(POLICY), []
    for version, folder in enumerate(adapters, 1):
        adapter = Adapter.of(read_config(folder), (folder / TENSORS_FILE).read_bytes())
        digests.append(store.put(adapter))
        store.commit(
            Manifest(
                policy=POLICY, version=version, digest=digests[-1], parent=digests[-2] if version > 1 else None,
                base=base, rank=4, targets=tuple(sorted(LINEAR)), dtype="F32", step=version - 1, epoch=epoch,
                run="run", created_ms=0, size=len(adapter.tensors),
            )
        )  # fmt: skip
    return tuple(digests)


class Sampler:
    """Samples as an engine does: one token at a time, with a KV cache, under whatever adapter is active then."""

    def __init__(self, base: Path, adapters: list[Path], digests: tuple[str, ...], digest: str) -> None:
        model = transformers.Qwen2ForCausalLM.from_pretrained(base)
        self.model = peft.PeftModel.from_pretrained(model, adapters[0], adapter_name="1")
        for version, folder in enumerate(adapters[1:], 2):
            self.model.load_adapter(folder, adapter_name=str(version))
        self.model.eval()
        self.digests, self.base = digests, digest
        self.rng = torch.Generator().manual_seed(7)

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.rng))

    def turn(self, legs: Sequence[tuple[int, int, Kv]], temperature: float) -> Turn:
        """One turn of legs (version, tokens, what became of the KV before it)."""
        prompt = [self.draw(1, VOCABULARY - 1) for _ in range(self.draw(3, 20))]
        tokens: list[int] = []
        logprobs: list[float] = []
        spans: list[Span] = []
        cache: Any = transformers.DynamicCache()
        feed = list(prompt)
        for epoch, (version, count, kv) in enumerate(legs, 1):
            self.model.set_adapter(str(version))
            if kv == "fresh":
                cache, feed = transformers.DynamicCache(), prompt + tokens
            start = len(tokens)
            for _ in range(count):
                with torch.no_grad():
                    logits = self.model(input_ids=torch.tensor([feed]), past_key_values=cache).logits[0, -1]
                row = (logits / temperature).log_softmax(-1)
                token = int(torch.multinomial(row.exp(), 1, generator=self.rng))
                tokens.append(token)
                logprobs.append(row[token].item())
                feed = [token]
            digest = self.digests[version - 1]
            spans.append(
                Span(policy=POLICY, version=version, digest=digest, epoch=epoch, start=start, end=len(tokens), kv=kv)
            )
        return Turn(
            prompt_ids=tuple(prompt), token_ids=tuple(tokens), logprobs=tuple(logprobs), mask=(1,) * len(tokens),
            spans=tuple(spans), finish_reason="length",
        )  # fmt: skip

    def trajectory(self, number: int, turns: Sequence[Sequence[tuple[int, int, Kv]]], temperature: float) -> Trajectory:
        return Trajectory(
            run="run", policy=POLICY, group=number, attempt=1, index=0, environment="", prompt="", base=self.base,
            turns=tuple(self.turn(legs, temperature) for legs in turns), sampling=Sampling(temperature=temperature),
            seed=0, logprobs_mode="processed_logprobs", dtype="float32", generator="generator",
            instance=f"instance-{number}", reward=0.0, rewards={}, advantage=0.0, times_ms={},
        )  # fmt: skip


def plans(sampler: Sampler) -> list[tuple[list[list[tuple[int, int, Kv]]], float]]:
    """What to sample: one span, swaps with kept KV, swaps that drop it, both, several turns, other temperatures."""
    draw = sampler.draw
    planned: list[tuple[list[list[tuple[int, int, Kv]]], float]] = []
    for _ in range(12):
        planned.append(([[(draw(1, VERSIONS), draw(24, 36), "fresh")]], 1.0))
    for kv in ("kept", "fresh"):
        for _ in range(9):
            version = draw(1, VERSIONS - 1)
            planned.append(([[(version, draw(1, 20), "fresh"), (version + 1, draw(12, 24), kv)]], 1.0))
    for _ in range(3):
        planned.append(([[(2, draw(2, 9), "fresh"), (3, draw(1, 9), "kept"), (5, draw(8, 12), "kept")]], 1.0))
        planned.append(([[(2, 6, "fresh"), (3, 5, "kept"), (4, 7, "fresh"), (5, draw(8, 12), "kept")]], 1.0))
    planned.append(([[(3, 12, "fresh")], [(3, 4, "fresh"), (4, 12, "kept")]], 1.0))
    planned.append(([[(3, 24, "fresh")]], 0.7))
    planned.append(([[(3, 8, "fresh"), (4, 16, "kept")]], 1.3))
    return planned


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)  # matrices this small gain nothing from more, and lose much on a busy machine
    folder = tmp_path_factory.mktemp("audit")
    base = make_base(folder / "base")
    store = LocalStore(folder / "store", 1 << 30)
    print_ = fingerprint(base)
    adapters = make_adapters(base, folder / "adapters", VERSIONS)
    digests = commit_line(store, print_, adapters)
    sampler = Sampler(base, adapters, digests, print_.digest)
    sampled = [sampler.trajectory(number, *plan) for number, plan in enumerate(plans(sampler))]
    return World(folder, base, store, Scorer(base, store, max_adapters=4), digests, tuple(sampled))


def change_turn(trajectory: Trajectory, change: Callable[[Turn], Turn]) -> Trajectory:
    """The trajectory with its first turn changed."""
    return msgspec.structs.replace(trajectory, turns=(change(trajectory.turns[0]), *trajectory.turns[1:]))


def change_spans(trajectory: Trajectory, **fields: Sequence[Any]) -> Trajectory:
    """The trajectory with fields of the first turn's spans replaced, one value per span."""

    def change(turn: Turn) -> Turn:
        spans = [
            msgspec.structs.replace(span, **{name: values[n] for name, values in fields.items()})
            for n, span in enumerate(turn.spans)
        ]
        return msgspec.structs.replace(turn, spans=tuple(spans))

    return change_turn(trajectory, change)


def with_kept_swap(world: World) -> Trajectory:
    """One of two spans, the second long and on kept KV."""
    return next(t for t in world.trajectories if len(t.turns) == 1 and [s.kv for s in t.spans] == ["fresh", "kept"])


def test_every_token_of_an_honest_record_holds(world: World) -> None:
    told: list[tuple[int, int]] = []
    report = world.audit(world.trajectories, on_progress=lambda done, total: told.append((done, total)))
    assert report.trajectories == len(world.trajectories)
    assert report.tokens == sum(t.tokens for t in world.trajectories) == told[-1][0] == told[-1][1]
    assert (report.refuted, report.unverifiable, report.holds) == (0, 0, True)
    assert report.max_error is not None and report.max_error < 2e-5
    assert report.discriminated == report.confirmed > 0.9 * report.tokens
    assert told == sorted(told)


def test_one_row_at_a_time_gives_the_same_answer(world: World) -> None:
    alone = Scorer(world.base, world.store, max_adapters=1, max_rows=1)
    assert audit(world.trajectories, world.store, alone).refuted == 0


def test_labels_one_version_off_are_refuted(world: World) -> None:
    """Power: wherever the audit can tell versions apart, it does."""
    honest = world.verify(world.trajectories)
    telling: dict[str, int] = {}
    for span in honest:
        telling[span.trajectory] = telling.get(span.trajectory, 0) + span.discriminated

    def shifted(trajectory: Trajectory) -> Trajectory:
        turns = []
        for turn in trajectory.turns:
            other = [s.version + 1 if s.version < VERSIONS else s.version - 1 for s in turn.spans]
            spans = tuple(
                msgspec.structs.replace(span, version=version, digest=world.digests[version - 1])
                for span, version in zip(turn.spans, other, strict=True)
            )
            turns.append(msgspec.structs.replace(turn, spans=spans))
        return msgspec.structs.replace(trajectory, turns=tuple(turns))

    able = [t for t in world.trajectories if telling[t.id] >= 20]
    reports = world.verify([shifted(t) for t in able])
    refuted = {report.trajectory for report in reports if report.verdict is Verdict.REFUTED}
    assert len(able) >= 25
    assert len(refuted) >= 0.99 * len(able)
    # A refuted token that a neighbour explains was told apart too.
    assert sum(report.discriminated for report in reports) > 0.5 * sum(report.tokens for report in reports)


def test_ignoring_that_kv_was_kept_is_refuted(world: World) -> None:
    kept = [t for t in world.trajectories if any(s.kv == "kept" for s in t.turns[0].spans)]
    assert kept
    for trajectory in kept:
        fresh = change_spans(trajectory, kv=["fresh"] * len(trajectory.turns[0].spans))
        assert world.audit([fresh]).refuted > 0


def test_digests_of_two_spans_exchanged(world: World) -> None:
    trajectory = with_kept_swap(world)
    first, second = trajectory.spans
    exchanged = change_spans(trajectory, digest=[second.digest, first.digest])
    report = world.audit([exchanged])
    assert report.refuted == trajectory.tokens
    assert report.refuted_trajectories == (trajectory.id,)
    assert all("has another digest" in reason for reason in report.reasons)
    thorough = change_spans(exchanged, version=[second.version, first.version])
    assert world.audit([thorough]).refuted > 0


def test_bytes_of_two_adapters_exchanged_in_the_store(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.store.root, tmp_path / "store")
    store = LocalStore(tmp_path / "store", 1 << 30)
    adapters = tmp_path / "store" / "adapters" / "sha256"
    third, fourth = (adapters / hex_of(world.digests[n]) for n in (2, 3))
    third.rename(adapters / "aside")
    fourth.rename(third)
    (adapters / "aside").rename(fourth)
    report = audit(world.trajectories, store, Scorer(world.base, store))
    touched = [s for t in world.trajectories for s in t.spans if s.version in (3, 4)]
    assert touched
    assert report.refuted == 0
    assert report.unverifiable >= sum(s.end - s.start for s in touched)
    assert any(f"the bytes stored as {world.digests[2]} have the digest" in reason for reason in report.reasons)


def test_an_adapter_that_is_gone(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.store.root, tmp_path / "store")
    store = LocalStore(tmp_path / "store", 1 << 30)
    shutil.rmtree(tmp_path / "store" / "adapters" / "sha256" / hex_of(world.digests[0]))
    first = [t for t in world.trajectories if t.spans[0].version == 1 and all(s.kv == "kept" for s in t.spans[1:])]
    reports = verify(first, store, Scorer(world.base, store))
    assert {report.verdict for report in reports} == {Verdict.UNVERIFIABLE}
    assert any("continues on KV that cannot be recomputed" in reason for r in reports for reason in r.reasons)


def test_one_token_changed(world: World) -> None:
    def change(turn: Turn) -> Turn:
        changed = (turn.token_ids[0] % (VOCABULARY - 1) + 1, *turn.token_ids[1:])
        return msgspec.structs.replace(turn, token_ids=changed)

    for trajectory in world.trajectories:
        assert world.audit([change_turn(trajectory, change)]).refuted > 0


def test_one_span_boundary_moved(world: World) -> None:
    trajectory = with_kept_swap(world)
    first, second = trajectory.spans
    for by in (1, -1) if first.end > 1 else (1,):
        moved = change_spans(trajectory, end=[first.end + by, second.end], start=[0, second.start + by])
        assert world.audit([moved]).refuted > 0
    torn = change_spans(trajectory, end=[first.end + 1, second.end])
    assert world.audit([torn]).unverifiable == trajectory.tokens


def test_another_dtype_is_not_calibrated(world: World) -> None:
    half = msgspec.structs.replace(world.trajectories[0], dtype="bfloat16")
    report = world.audit([half])
    assert report.unverifiable == half.tokens
    assert report.reasons == {"not calibrated for bfloat16": half.tokens}


def test_another_base_model_is_named_by_its_part(world: World, tmp_path: Path) -> None:
    other = make_base(tmp_path / "base", seed=5)
    report = audit(world.trajectories, world.store, Scorer(other, world.store))
    assert report.unverifiable == report.tokens
    assert report.reasons == {"the base model here is not the manifest's: checkpoint differs": report.tokens}


def test_an_adapter_that_does_not_fit_the_base_is_a_finding(world: World, tmp_path: Path) -> None:
    """Bytes and manifest agree, but PEFT cannot put them on the base: those tokens only are unverifiable."""
    store = LocalStore(tmp_path / "store", 1 << 30)
    wide = make_base(tmp_path / "wide", hidden=128)
    adapters = [*make_adapters(world.base, tmp_path / "a", 1), *make_adapters(wide, tmp_path / "b", 1)]
    digests = commit_line(store, fingerprint(world.base), [adapters[1], adapters[0], adapters[1], adapters[0]])
    trajectory = next(t for t in world.trajectories if len(t.spans) == 1)
    misfit = change_spans(trajectory, version=[1], digest=[digests[0]])
    scorer = Scorer(world.base, store)
    for _ in range(2):
        report = audit([misfit], store, scorer)
        assert report.unverifiable == trajectory.tokens
        assert any("does not fit the base model" in reason for reason in report.reasons)


def residencies(trajectory: Trajectory, *, kv: KvMode) -> dict[str, Residency]:
    """The records that a generator would have left about a trajectory of one turn."""
    records = [
        Residency(
            generator="generator", instance=trajectory.instance, epoch=span.epoch, kv=kv if n else "recompute",
            serves={POLICY: Served(version=span.version, digest=span.digest)}, at_ms=0,
        )
        for n, span in enumerate(trajectory.spans)
    ]  # fmt: skip
    return {record.label: record for record in records}


def test_residency_records_are_held_against_the_spans(world: World) -> None:
    trajectory = with_kept_swap(world)
    honest = residencies(trajectory, kv="keep")
    assert world.audit([trajectory], residencies=honest).holds
    dropped = world.audit([trajectory], residencies=residencies(trajectory, kv="recompute"))
    assert dropped.refuted >= trajectory.spans[1].end - trajectory.spans[1].start
    missing = world.audit([trajectory], residencies={})
    assert missing.unverifiable == trajectory.tokens
    label, record = next(iter(honest.items()))
    served = Served(version=VERSIONS, digest=world.digests[-1])
    other = {**honest, label: msgspec.structs.replace(record, serves={POLICY: served})}
    reports = world.verify([trajectory], residencies=other)
    assert [report.verdict for report in reports] == [Verdict.REFUTED, Verdict.UNVERIFIABLE]


def test_a_sample_is_drawn_by_its_seed(world: World) -> None:
    some = world.audit(world.trajectories, sample=5, seed=3)
    assert some.trajectories == 5
    assert some == world.audit(iter(world.trajectories), sample=5, seed=3)
    assert world.audit(world.trajectories, sample=10_000).trajectories == len(world.trajectories)
