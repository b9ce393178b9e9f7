"""Law 5 at the trainer: a group is acknowledged after the step that used the last of it, and not before."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.trajectory import Group, Trajectory, Turn
from lorabridge.trainer.source import Consumption, Sample, TrajectorySource, as_sample
from tests.factories import make_manifest, make_span, make_trajectory, make_turn

EPOCH = 3


BY_VERSION_1 = make_turn((make_span(1, 0, 4),))


def make_group(number: int, size: int = 4, turn: Turn = BY_VERSION_1) -> Group:
    """A group of trajectories of one turn."""
    trajectories = tuple(make_trajectory(number, index=index, turns=(turn,)) for index in range(size))
    return Group(group=number, attempt=1, worker="w", trajectories=trajectories)


class FakeReader:
    """Hands out groups, and writes down which entries were finished."""

    def __init__(self, groups: list[Group]) -> None:
        self.waiting: queue.Queue[tuple[str, Group]] = queue.Queue()
        for number, group in enumerate(groups):
            self.waiting.put((str(number), group))
        self.finished: list[str] = []

    def read(self, block_ms: int) -> tuple[str, Group] | None:
        try:
            return self.waiting.get(timeout=0.01)
        except queue.Empty:
            return None

    def finish(self, entries: list[str]) -> int:
        self.finished += entries
        return len(entries)


class Bench:
    def __init__(self, groups: list[Group], lag_max: int = 100, per_step: int = 4, old: int = 0) -> None:
        self.reader = FakeReader(groups)
        self.dropped: list[str] = []
        self.reasons: set[str] = set()
        self.old = old  # versions up to this one are of an earlier trainer
        reader: Any = self.reader
        self.source = TrajectorySource(
            reader=reader, ahead=1000, per_step=per_step, manifest_of=self.manifest, epoch=EPOCH, lag_max=lag_max,
            on_dropped=self.on_dropped, clock_s=lambda: 0.0,
        )  # fmt: skip

    def manifest(self, policy: str, version: int) -> Manifest:
        """The n-th version of a trainer was made at step n - 1."""
        earlier = version <= self.old
        return make_manifest(version, epoch=EPOCH - earlier, step=version - 1 if earlier else version - self.old - 1)

    def on_dropped(self, trajectory: Trajectory, reason: str) -> None:
        self.dropped.append(trajectory.id)
        self.reasons.add(reason)

    def take(self, count: int) -> list[Sample]:
        """What TRL's dataset takes from the buffer, the stale dropped."""
        taken: list[Sample] = []
        while len(taken) < count:
            sample = self.source.rollout_buffer.get(timeout=5)
            if self.source.admit(sample):
                taken.append(sample)
        return taken


def test_a_group_is_acknowledged_only_after_the_step_that_used_the_last_of_it() -> None:
    bench = Bench([make_group(0), make_group(1)])
    bench.source.start()
    first, ahead = bench.take(4), bench.take(4)
    bench.source.collated([s.trajectory for s in first[:2]])
    bench.source.collated([s.trajectory for s in first[2:]])
    bench.source.collated([s.trajectory for s in ahead])  # accelerate reads a batch ahead
    bench.source.trained()
    assert bench.reader.finished == []
    bench.source.trained()
    assert bench.reader.finished == []  # backward is done, the optimizer's step is not
    consumption = bench.source.end_step()
    assert consumption is not None
    assert [t.group for t in consumption.trajectories] == [0, 0, 0, 0]
    assert bench.reader.finished == ["0"]
    bench.source.trained()
    assert bench.reader.finished == ["0"]
    bench.source.end_step()
    assert bench.reader.finished == ["0", "1"]
    bench.source.stop()


def test_a_group_split_over_two_steps_is_acknowledged_after_the_second() -> None:
    bench = Bench([make_group(0)])
    bench.source.start()
    taken = bench.take(4)
    for half in (taken[:2], taken[2:]):
        assert bench.reader.finished == []
        bench.source.collated([s.trajectory for s in half])
        bench.source.trained()
        bench.source.end_step()
    assert bench.reader.finished == ["0"]
    bench.source.stop()


def test_a_group_delivered_again_while_it_is_held_is_not_trained_twice() -> None:
    bench = Bench([make_group(number, size=2) for number in (0, 0, 1)])
    bench.source.start()
    assert [s.group_id for s in bench.take(4)] == [0, 0, 1, 1]
    bench.source.stop()
    assert bench.source.rollout_buffer.empty()


def test_every_entry_of_a_group_that_came_twice_is_finished_with_it() -> None:
    bench = Bench([make_group(0), make_group(0), make_group(1)])
    bench.source.start()
    _train(bench, 4)
    assert bench.reader.finished == ["0", "1"]
    bench.source.stop()


def test_a_group_that_comes_again_after_it_was_trained_on_is_not_trained_on_again() -> None:
    bench = Bench([make_group(0)])
    bench.source.start()
    _train(bench, 4)
    for late in (("1", make_group(0)), ("2", make_group(1))):
        bench.reader.waiting.put(late)
    assert {s.group_id for s in bench.take(4)} == {1}
    assert bench.reader.finished == ["0", "1"]
    bench.source.stop()


def test_what_an_earlier_trainers_version_sampled_is_dropped_with_that_reason() -> None:
    old = make_turn((make_span(1, 0, 2), make_span(2, 2, 4)))
    new = make_turn((make_span(2, 0, 4),))
    bench = Bench([make_group(0, 2, old), make_group(1, 1, new)], old=1)
    bench.source.start()
    (sample,) = bench.take(1)
    assert sample.group_id == 1
    assert bench.dropped == ["run/0.1/0", "run/0.1/1"]
    assert bench.reasons == {"of an earlier trainer"}
    assert bench.reader.finished == ["0"]
    bench.source.stop()


def test_what_would_be_too_old_when_it_is_trained_on_is_dropped_counted_and_acknowledged() -> None:
    groups = [make_group(number) for number in range(5)]  # version 1, made at step 0
    bench = Bench(groups, lag_max=2)
    bench.source.start()
    # Read ahead, before any step was taken: the fourth group would be trained on at step 3.
    assert [s.group_id for s in bench.take(12)] == [0] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(queue.Empty):
        while True:
            assert not bench.source.admit(bench.source.rollout_buffer.get(timeout=0.5))
    assert bench.dropped == [f"run/{group}.1/{index}" for group in (3, 4) for index in range(4)]
    assert bench.reasons == {"too old"}
    assert bench.reader.finished == ["3", "4"]
    bench.source.stop()


def test_lag_is_steps_from_the_manifests_step_to_the_training_step_weighted_by_tokens() -> None:
    turn = make_turn((make_span(1, 0, 3), make_span(4, 3, 4)))
    bench = Bench([*(make_group(number, 1) for number in range(5)), make_group(5, 1, turn)], per_step=1)
    bench.source.start()
    for _ in range(5):
        _train(bench, 1)
    consumption = _train(bench, 1)
    assert consumption is not None
    assert consumption.step == 5
    # Three tokens of version 1 (made at step 0) and one of version 4 (made at step 3), trained at step 5.
    assert (consumption.lag.tokens, consumption.lag.total, consumption.lag.largest) == (4, 3 * 5 + 2, 5)
    bench.source.stop()


def test_a_version_of_this_trainer_that_is_newer_than_the_step_to_come_is_an_error() -> None:
    bench = Bench([make_group(0, 1, make_turn((make_span(2, 0, 4),)))])  # made at step 1
    bench.source.start()
    with pytest.raises(ValueError, match="made at step 1 cannot"):
        bench.take(1)
    bench.source.stop()


def test_a_failing_reader_is_raised_where_trl_asks_for_health() -> None:
    bench = Bench([])
    error = RuntimeError("the stream is gone")

    def read(block_ms: int) -> None:
        raise error

    bench.reader.read = read  # type: ignore[method-assign]
    bench.source.start()
    bench.source._thread.join(5)
    with pytest.raises(RuntimeError, match="the stream is gone"):
        bench.source.check_health(0)
    bench.source.stop()


def test_a_sample_has_one_entry_per_token_of_prompt_and_completion() -> None:
    trajectory = make_trajectory()
    sample = as_sample(trajectory, 7.0)
    turn = trajectory.turns[0]
    assert list(sample.input_ids) == [*turn.prompt_ids, *turn.token_ids]
    assert list(sample.completion_mask) == [0, 0, 0, 1, 1, 1, 1]
    assert np.allclose(sample.old_log_probs, [0, 0, 0, *turn.logprobs])
    assert (sample.advantage, sample.model_version, sample.enqueued_at) == (0.5, 1, 7.0)
    assert sample.metrics["reward"] == 1.0
    assert sample.metrics["rewards/right"] == 1.0
    assert np.isnan(sample.metrics["rewards/short"])


def _train(bench: Bench, count: int) -> Consumption | None:
    bench.source.collated([s.trajectory for s in bench.take(count)])
    bench.source.trained()
    return bench.source.end_step()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 7))
def test_every_group_is_acknowledged_once_whatever_the_batches(sizes: list[int], batch: int) -> None:
    bench = Bench([make_group(number, size=size) for number, size in enumerate(sizes)])
    bench.source.start()
    samples = bench.take(sum(sizes))
    used: set[str] = set()
    for start in range(0, len(samples), batch):
        part: list[Trajectory] = [s.trajectory for s in samples[start : start + batch]]
        bench.source.collated(part)
        bench.source.trained()
        bench.source.end_step()
        used |= {t.id for t in part}
        complete = [str(n) for n, size in enumerate(sizes) if all(f"run/{n}.1/{i}" in used for i in range(size))]
        assert sorted(bench.reader.finished) == sorted(complete)
    assert sorted(bench.reader.finished) == sorted(str(n) for n in range(len(sizes)))
    bench.source.stop()
