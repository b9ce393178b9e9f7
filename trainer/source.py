"""Trajectories from the stream into TRL's rollout protocol, and the account of what each step trained on.

::

    stream --(reader thread)--> rollout_buffer --TRL's dataset--> collator --> training step --> finished
                                                                  |              |               |
                                                  queues the micro-batch's ids   takes one       acknowledges (law 5)

Accelerate reads a batch ahead, so a sample taken from the buffer is not yet one that was trained on: only the end of
the step that used it acknowledges its group.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from lorabridge.bridge.lag import LagSummary, summarise, token_lags, too_old
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.stream.groups import GroupReader
from lorabridge.bridge.trajectory import Group, Span, Trajectory

_POLL_MS = 500


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A trajectory as TRL trains on it: its last turn, whose prompt is everything before it.

    The names are those of TRL's ``RolloutSample``; the arrays have one entry per token of prompt and completion.
    """

    trajectory: Trajectory
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float


class Consumption(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step trained on. ``step`` counts the steps before it."""

    step: int
    trajectories: tuple[Trajectory, ...]
    lag: LagSummary

    @property
    def reward(self) -> float:
        return sum(t.reward for t in self.trajectories) / len(self.trajectories)


@dataclass
class _Open:
    """A group under way: its entries in the stream, and the ids of its trajectories that are not yet done with."""

    entries: list[str]
    waiting: set[str]


def as_sample(trajectory: Trajectory, entered_s: float) -> Sample:
    """The trajectory for TRL; ``entered_s`` is when it entered the buffer, seconds since 1970."""
    turn = trajectory.turns[-1]
    before = len(turn.prompt_ids)
    return Sample(
        trajectory=trajectory,
        input_ids=np.array(turn.prompt_ids + turn.token_ids, dtype=np.int64),
        completion_mask=np.array((0,) * before + turn.mask, dtype=np.int64),
        old_log_probs=np.array((0.0,) * before + turn.logprobs, dtype=np.float32),
        advantage=trajectory.advantage,
        model_version=min(span.version for span in trajectory.spans),
        group_id=trajectory.group,
        metrics=_metrics(trajectory),
        enqueued_at=entered_s,
    )


def _metrics(trajectory: Trajectory) -> dict[str, float]:
    """TRL's names: ``reward`` and ``rewards/<function>``."""
    named = {f"rewards/{name}": float("nan") if r is None else r for name, r in trajectory.rewards.items()}
    return {"reward": trajectory.reward, **named, "completions/mean_length": float(trajectory.tokens)}


class TrajectorySource:
    """TRL's ``RolloutWorkerProtocol`` over the stream. Lives on the main rank.

    Args:
        reader: of the stream.
        ahead: samples to hold ready for the trainer.
        per_step: samples that one optimizer step trains on, over all ranks.
        manifest_of: the manifest of a (policy, version).
        epoch: this trainer's.
        lag_max: trajectories with an older token are dropped.
        on_dropped: told of every dropped trajectory, and why.
        clock_s: seconds since 1970, as TRL's dataset reads them.
    """

    def __init__(
        self, *, reader: GroupReader, ahead: int, per_step: int, manifest_of: Callable[[str, int], Manifest],
        epoch: int, lag_max: int, on_dropped: Callable[[Trajectory, str], None], clock_s: Callable[[], float],
    ) -> None:  # fmt: skip
        self.rollout_buffer: queue.Queue[Sample] = queue.Queue(maxsize=ahead)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._reader, self._manifest_of, self._lag_max = reader, manifest_of, lag_max
        self._per_step, self._epoch = per_step, epoch
        self._on_dropped, self._clock_s = on_dropped, clock_s
        self._manifests: dict[tuple[str, int], Manifest] = {}
        self._open: dict[int, _Open] = {}
        self._over: set[int] = set()  # groups that are done with
        self._admitted = 0
        self._micro_batches: deque[list[Trajectory]] = deque()
        self._this_step: list[Trajectory] = []
        self._step = 0
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="trajectories", daemon=True)

    # TRL's protocol

    def start(self) -> None:
        """Begin to fill the buffer."""
        self._thread.start()

    def stop(self) -> None:
        """End the reader thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """TRL's version is not ours: tokens carry theirs."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise what the reader thread failed with. Waiting for rollouts is not a failure."""
        if self._failure is not None:
            raise self._failure

    # The account

    def admit(self, sample: Sample) -> bool:
        """Whether the sample may be trained on; one that may not be is dropped and counted.

        What is admitted is trained on in the order of admission, so its place says which step that will be, also of
        what accelerate reads a batch ahead.
        """
        trajectory = sample.trajectory
        if any(self._manifest(span).epoch != self._epoch for span in trajectory.spans):
            reason = "of an earlier trainer"
        elif too_old(self.lags(trajectory, self._admitted // self._per_step), self._lag_max):
            reason = "too old"
        else:
            self._admitted += 1
            return True
        self._on_dropped(trajectory, reason)
        self._done([trajectory])
        return False

    def collated(self, trajectories: Sequence[Trajectory]) -> None:
        """A micro-batch was made of these; it will be trained on in this order."""
        self._micro_batches.append(list(trajectories))

    def trained(self) -> None:
        """The oldest micro-batch was trained on."""
        self._this_step += self._micro_batches.popleft()

    def lags(self, trajectory: Trajectory, step: int) -> list[tuple[int, int]]:
        """(lag, tokens) of each span, if the trajectory is trained on after ``step`` optimizer steps."""
        steps = {(span.policy, span.version): self._manifest(span).step for span in trajectory.spans}
        return token_lags(trajectory.spans, steps, step)

    def _manifest(self, span: Span) -> Manifest:
        name = (span.policy, span.version)
        if name not in self._manifests:
            self._manifests[name] = self._manifest_of(*name)
        return self._manifests[name]

    def end_step(self) -> Consumption | None:
        """The optimizer step is done: acknowledge every group that it used up. None if it used nothing."""
        used, self._this_step = self._this_step, []
        step, self._step = self._step, self._step + 1
        if not used:
            return None
        self._done(used)
        lag = summarise(pair for trajectory in used for pair in self.lags(trajectory, step))
        return Consumption(step=step, trajectories=tuple(used), lag=lag)

    def _done(self, trajectories: Iterable[Trajectory]) -> None:
        finished: list[str] = []
        with self._lock:
            for trajectory in trajectories:
                group = self._open[trajectory.group]
                group.waiting.discard(trajectory.id)
                if not group.waiting:
                    del self._open[trajectory.group]
                    self._over.add(trajectory.group)
                    finished += group.entries
        if finished:
            self._reader.finish(finished)

    # The reader thread

    def _read(self) -> None:
        try:
            while not self._stop.is_set():
                received = self._reader.read(_POLL_MS)
                if received is None or not self._is_new(*received):
                    continue
                for trajectory in received[1].trajectories:
                    self._offer(as_sample(trajectory, self._clock_s()))
        except Exception as error:
            self._failure = error

    def _is_new(self, entry: str, group: Group) -> bool:
        """Whether the group came for the first time; another entry of it is finished together with it (law 6)."""
        with self._lock:
            if group.group in self._open:
                self._open[group.group].entries.append(entry)
                return False
            if group.group not in self._over:
                self._open[group.group] = _Open([entry], {t.id for t in group.trajectories})
                return True
        self._reader.finish([entry])
        return False

    def _offer(self, sample: Sample) -> None:
        while not self._stop.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=_POLL_MS / 1000)
                return
            except queue.Full:
                continue
