"""``summary.json`` from a ledger made by hand."""

from pathlib import Path

import msgspec

from lorabridge.bridge.events import Consumed, Dropped, Event, Happening, Published, Quarantine, Resident
from lorabridge.bridge.fingerprint import Fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.verdict import Audit
from lorabridge.bridge.residency import Residency, Served
from lorabridge.bridge.run.summary import Summary, consumed, in_words, publish_to_serving, summarise
from lorabridge.bridge.trajectory import Sampling, Span, Trajectory, Turn

AUDIT = Audit(
    trajectories=2, tokens=8, confirmed=5, indistinct=2, refuted=0, unverifiable=1, discriminated=5, max_error=2e-5
)


def digest(version: int) -> str:
    return f"sha256:{version:064x}"


def manifest(version: int, created_ms: int, policy: str = "sort") -> Manifest:
    return Manifest(
        policy=policy, version=version, digest=digest(version), parent=None,
        base=Fingerprint(checkpoint="c", tokenizer="t", template="p"), rank=8, targets=("q_proj",), dtype="F32",
        step=version - 1, epoch=1, run="demo", created_ms=created_ms, size=1,
    )  # fmt: skip


def resident(version: int, at_ms: int, of: str | None = None, on: str = "g") -> Event:
    residency = Residency(
        generator=on, instance="i", epoch=version, kv="keep",
        serves={"sort": Served(version=version, digest=of or digest(version))}, at_ms=0,
    )  # fmt: skip
    return event(at_ms, Resident(residency=residency, swap_ms={}))


def event(at_ms: int, happening: Happening) -> Event:
    return Event(source="test", at_ms=at_ms, happening=happening)


def step(number: int, at_ms: int, reward: float, lag_total: int = 10, policy: str = "sort") -> Event:
    names = (f"demo/{number}.1/0", f"demo/{number}.1/1")
    return event(
        at_ms,
        Consumed(
            policy=policy, step=number, trajectories=names, tokens=20, lag_total=lag_total, lag_max=lag_total // 5,
            lag_s=1, reward=reward,
        ),
    )  # fmt: skip


def published(version: int, blocked: float) -> Event:
    phases = {"blocked": blocked, "export": 1.0}
    return event(0, Published(policy="sort", version=version, digest=digest(version), step=0, phases_ms=phases))


def trajectory(group: int, *lengths: int) -> Trajectory:
    """One turn, whose spans have these lengths."""
    spans, start = [], 0
    for version, length in enumerate(lengths, 1):
        spans.append(
            Span(policy="sort", version=version, digest=digest(version), epoch=version, start=start,
                 end=start + length, kv="kept" if start else "fresh")
        )  # fmt: skip
        start += length
    turn = Turn(
        prompt_ids=(1,), token_ids=(2,) * start, logprobs=(-0.5,) * start, mask=(1,) * start, spans=tuple(spans),
        finish_reason="stop",
    )  # fmt: skip
    return Trajectory(
        run="demo", policy="sort", group=group, attempt=1, index=0, environment="e", prompt="p", base="b",
        turns=(turn,), sampling=Sampling(), seed=0, logprobs_mode="processed_logprobs", dtype="float32",
        generator="g", instance="i", reward=1.0, rewards={}, advantage=0.0, times_ms={},
    )  # fmt: skip


def summary(*events: Event, manifests: tuple[Manifest, ...] = (), sampled: tuple[Trajectory, ...] = ()) -> Summary:
    return summarise(
        run="demo", policy="sort", manifests=manifests, events=events, trajectories=sampled, audit=AUDIT, wall_s=60
    )


def test_rewards_are_means_over_the_first_and_last_fifth() -> None:
    ten = [step(number, 1000 * number, float(number)) for number in range(10)]
    found = summary(*ten)
    assert (found.steps, found.reward_first, found.reward_last) == (10, 0.5, 8.5)


def test_a_run_of_one_step_has_a_reward_and_no_speed() -> None:
    found = summary(step(0, 0, 0.25))
    assert (found.reward_first, found.reward_last, found.samples_per_s) == (0.25, 0.25, None)


def test_a_run_that_did_nothing_has_nulls() -> None:
    found = summary()
    assert (found.steps, found.reward_first, found.lag_mean, found.lag_max) == (0, None, None, None)
    assert (found.publish_blocked_ms_p50, found.publish_to_serving_ms_p50) == (None, None)
    assert "0 steps" in in_words(found, Path("runs/demo"))


def test_a_step_taken_again_after_a_restart_counts_once() -> None:
    found = summary(step(0, 0, 0.1), step(1, 1000, 0.2), step(1, 9000, 0.4))
    assert (found.steps, found.reward_last) == (2, 0.4)


def test_a_trainer_that_starts_afresh_undoes_the_steps_of_the_one_before() -> None:
    found = summary(*(step(number, number, 0.9) for number in range(5)), step(0, 8000, 0.1), step(1, 9000, 0.2))
    assert (found.steps, found.reward_first, found.reward_last, found.tokens_per_s) == (2, 0.1, 0.2, 20.0)


def test_lag_is_weighted_by_tokens_and_speed_leaves_out_the_first_step() -> None:
    found = summary(step(0, 0, 0, lag_total=0), step(1, 500, 0, lag_total=60), step(2, 2000, 0, lag_total=60))
    assert (found.lag_mean, found.lag_max) == (2.0, 12)
    assert (found.samples_per_s, found.tokens_per_s) == (2.0, 20.0)


def test_trajectories_count_once_and_spans_are_looked_at_by_turn() -> None:
    found = summary(sampled=(trajectory(1, 5), trajectory(1, 5), trajectory(2, 1, 2)))
    assert (found.trajectories, found.tokens, found.multi_span_trajectories) == (2, 8, 1)


def test_what_the_audit_could_not_verify_is_not_audited() -> None:
    found = summary()
    assert (found.tokens_audited, found.tokens_unverifiable, found.tokens_refuted) == (7, 1, 0)
    assert (found.tokens_discriminated, found.max_logprob_error) == (5, 2e-5)


def test_what_was_lost_is_counted_once() -> None:
    lost = Dropped(policy="sort", trajectories=("demo/1.1/0",), reason="lag")
    found = summary(event(0, lost), event(1, lost), event(2, Quarantine(subject="x", reason="y")))
    assert (found.dropped, found.quarantined) == (1, 1)


def test_publishes_are_medians() -> None:
    manifests = (manifest(1, 100), manifest(2, 200), manifest(3, 300))
    events = (published(1, 30.0), published(2, 10.0), published(3, 20.0), resident(1, 5100), resident(3, 350))
    found = summary(*events, manifests=manifests)
    assert found.versions_published == 3
    assert found.publish_blocked_ms_p50 == 20.0
    assert found.publish_to_serving_ms_p50 == (5000 + 50) / 2


def test_serving_begins_with_the_first_epoch_of_these_very_bytes() -> None:
    events = [resident(1, 700), resident(1, 400), resident(1, 150, of=digest(9))]
    assert publish_to_serving([manifest(1, 100), manifest(2, 100)], events, "sort") == [{"g": 300.0}]


def test_serving_is_measured_for_each_generator_and_in_all_for_the_first() -> None:
    manifests = (manifest(1, 100), manifest(2, 200))
    events = (resident(1, 150), resident(1, 500, on="b"), resident(2, 270, on="b"))
    found = summary(*events, manifests=manifests)
    assert found.publish_to_serving_ms_p50 == (50 + 70) / 2
    assert found.publish_to_serving_ms_p50_by_generator == {"g": 50.0, "b": (400 + 70) / 2}


def test_another_policy_is_left_out() -> None:
    found = summary(step(0, 0, 0.5, policy="other"), manifests=(manifest(1, 0, policy="other"),))
    assert (found.steps, found.versions_published) == (0, 0)


def test_it_has_every_figure_that_was_promised() -> None:
    promised = (
        "reward_first reward_last steps versions_published trajectories tokens multi_span_trajectories tokens_audited "
        "tokens_confirmed tokens_indistinct tokens_refuted tokens_discriminated max_logprob_error lag_mean lag_max "
        "dropped samples_per_s publish_blocked_ms_p50 publish_to_serving_ms_p50 wall_s"
    )
    assert set(promised.split()) <= set(msgspec.to_builtins(summary()))


def test_words_for_whoever_started_it() -> None:
    found = summary(step(0, 0, 0.5), step(1, 1000, 0.75), manifests=(manifest(1, 0),), sampled=(trajectory(1, 2, 3),))
    assert in_words(found, Path("runs/demo")).splitlines() == [
        "2 steps, 1 versions published, in 60 s.",
        "The reward went from 0.500 to 0.750.",
        "1 trajectories of 5 tokens were sampled; the weights changed in the middle of 1 of them. 0 were dropped.",
        "Tokens were trained on 0.5 steps after they were sampled, 2 at most.",
        "The audit recomputed 7 tokens under the weights they name: 0 refuted, 1 could not be verified; 5 of them "
        "could tell neighbouring versions apart. The largest error was 2.0e-05 nats.",
        "It is all in runs/demo: summary.json, reward.png, lag.png, the ledger, the adapters, the logs.",
    ]


def test_a_step_that_a_server_had_forgotten_is_told_later_and_undoes_none() -> None:
    told = [step(0, 1000, 0.1), step(2, 3000, 0.3), step(1, 2000, 0.2)]
    assert [each.step for _, each in consumed(told, "sort")] == [0, 1, 2]
