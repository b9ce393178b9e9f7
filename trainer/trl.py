"""TRL's AsyncGRPOTrainer with our source of trajectories and our publisher.

Overridden: ``_sync_weight`` (publish a version instead of syncing a server), ``get_train_dataloader`` (a dataset and a
collator that keep track of which trajectory is where), ``training_step``. The loss and everything else are TRL's.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout, FixedCountBatcher

from lorabridge.bridge.errors import AdapterUnservable
from lorabridge.trainer.canary import canary_model
from lorabridge.trainer.export import gather
from lorabridge.trainer.publisher import Publisher
from lorabridge.trainer.quorum import Quorum
from lorabridge.trainer.source import Consumption, Sample, TrajectorySource

_POLL_S = 5.0


class NoTransfer:
    """TRL's ``WeightTransferProtocol``, doing nothing: workers fetch what is published."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class TrajectoryDataset(IterableDataset[dict[str, Any]]):
    """What TRL's ``RolloutQueueDataset`` does, and each row also says which trajectory it is.

    ``wait_s`` is the time the trainer was blocked on an empty buffer, which TRL flushes at the end of a step. While it
    waits, ``check`` is called, which raises if what it waits for cannot come.
    """

    def __init__(
        self, source: TrajectorySource, metrics: dict[str, list[Any]], version: Callable[[], int],
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        self._source, self._metrics, self._version, self._check = source, metrics, version, check
        self.wait_s = 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            started = time.time()
            sample = self._next()
            self.wait_s += time.time() - started
            if not self._source.admit(sample):
                self._metrics["sample/dropped_stale_total"].append(1.0)
                continue
            staleness = float(self._version() - sample.model_version)
            self._metrics["sample/rollout_queue_size"].append(float(self._source.rollout_buffer.qsize()))
            self._metrics["sample/time_in_queue_s"].append(time.time() - sample.enqueued_at)
            self._metrics["sample/staleness_mean"].append(staleness)
            self._metrics["sample/staleness_max"].append(staleness)
            yield {
                "input_ids": sample.input_ids,
                "completion_mask": sample.completion_mask,
                "old_log_probs": sample.old_log_probs,
                "advantage": sample.advantage,
                "group_id": sample.group_id,
                "metrics": sample.metrics,
                "trajectory": sample.trajectory,
            }

    def _next(self) -> Sample:
        while True:
            try:
                return self._source.rollout_buffer.get(timeout=_POLL_S)
            except queue.Empty:
                self._check()


class TrackingCollator(DataCollatorForRollout):  # type: ignore[misc]
    """TRL's collator; tells the source which trajectories each micro-batch is made of."""

    source: TrajectorySource

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        batch: dict[str, Any] = super().torch_call(examples)
        (rows,) = examples
        self.source.collated([sample["trajectory"] for row in rows for sample in row.samples])
        return batch


class BridgeGRPOTrainer(AsyncGRPOTrainer):  # type: ignore[misc]
    """Trains a LoRA adapter on trajectories from the stream and publishes its versions.

    Takes AsyncGRPOTrainer's arguments, and:

    Args:
        source: of trajectories, on the main rank; None on the others.
        publisher: of versions, on the main rank; None on the others.
        on_consumed: told on the main rank what each optimizer step trained on, after it; answers with the
            token-weighted seconds from sampled to trained.
        quorum: on the main rank, if training is to wait until a version is served; None: it goes on.

    Raises:
        AdapterUnservable: there is no PEFT adapter to publish.
    """

    def __init__(
        self, *arguments: Any, source: TrajectorySource | None, publisher: Publisher | None,
        on_consumed: Callable[[Consumption], float] | None, quorum: Quorum | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        self._quorum = quorum
        self._source, self._publisher, self._on_consumed = source, publisher, on_consumed
        self._published_at = -1
        super().__init__(*arguments, rollout_worker=source, weight_transfer=NoTransfer(), **keywords)
        if self._adapter_name is None:
            raise AdapterUnservable("the model has no LoRA adapter", action="Pass a peft_config")
        if self._publisher is not None:
            model = canary_model(self.accelerator.unwrap_model(self.model), self._adapter_name)
            self._publisher.canary = model.canary if model else None
        # Before TRL's own callbacks: the step's trajectories are acknowledged before its version is published.
        self.callback_handler.callbacks.insert(0, _EndOfStep(self))

    def get_train_dataloader(self) -> Any:
        """One micro-batch at a time, made on the main rank and scattered, as in TRL."""
        processes = self.accelerator.num_processes
        if self._source is None:
            return self.accelerator.prepare(DataLoader(_Nothing(), batch_size=1, collate_fn=lambda rows: rows))
        metrics = self._metrics["train"]
        self._rollout_dataset = TrajectoryDataset(self._source, metrics, lambda: self.model_version, self._check)
        batches = FixedCountBatcher(self._rollout_dataset, processes, self.args.per_device_train_batch_size * processes)
        collator = TrackingCollator(
            self.processing_class.pad_token_id, processes, groups_trained=self._trained_groups, metrics=metrics
        )
        collator.source = self._source
        return self.accelerator.prepare(DataLoader(batches, batch_size=1, collate_fn=collator))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """TRL's step; its micro-batch now counts as trained on."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self._source is not None:
            self._source.trained()
        return loss

    def _sync_weight(self) -> None:
        """Publish the adapter as it is now. Every rank gathers; the main one copies and goes on."""
        started = time.perf_counter()
        self._published_at = self.state.global_step
        model = self.accelerator.unwrap_model(self.model)
        tensors = gather(model, self._adapter_name, self.accelerator.is_main_process)
        if self._publisher is not None:
            version = self._publisher.publish(tensors, self.state.global_step, started)
            self.model_version += 1
            self._metrics["train"]["publish/blocked_s"].append(time.perf_counter() - started)
            if self._quorum is not None:
                self._quorum.wait(version, self._publisher.check)
                self._metrics["train"]["publish/quorum_s"].append(time.perf_counter() - started)

    def end_step(self) -> None:
        """Acknowledge what the step used, and log its lag."""
        consumed = self._source.end_step() if self._source else None
        if consumed is None or self._on_consumed is None:
            return
        seconds = self._on_consumed(consumed)
        metrics = self._metrics["train"]
        metrics["lag/mean"].append((float(consumed.lag.total), float(consumed.lag.tokens)))
        metrics["lag/max"].append(float(consumed.lag.largest))
        metrics["lag/seconds_mean"].append(seconds)

    def end_training(self) -> None:
        """Publish the last weights, if the last step was between two publishes."""
        if self._published_at != self.state.global_step:
            self._sync_weight()

    def _check(self) -> None:
        """Raise what the reader or the publisher failed with: without version 1 nothing will ever be sampled."""
        if self._source is not None:
            self._source.check_health(0)
        if self._publisher is not None:
            self._publisher.check()

    def close(self) -> None:
        """Wait for the publishes that are queued. Raises what one failed with."""
        if self._publisher is not None:
            self._publisher.close()

    def abandon(self) -> None:
        """Training has failed: publish nothing more, read nothing more, and keep no thread alive."""
        if self._publisher is not None:
            self._publisher.abandon()
        if self._source is not None:
            self._source.stop()


class _EndOfStep(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: BridgeGRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.end_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trainer.end_training()


class _Nothing(IterableDataset[Any]):
    """The other ranks' dataset: they are sent their rows."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())
