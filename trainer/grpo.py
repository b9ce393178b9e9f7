"""The torchrun entry: ``torchrun -m lorabridge.trainer.grpo --config FILE``, or ``lorabridge train``.

settings -> run record (published, so that workers can join) -> TRL's trainer with our source and publisher -> train.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import redis

from lorabridge.bridge import codec
from lorabridge.bridge.adapter import check_config
from lorabridge.bridge.base_shapes import Shapes, base_shapes
from lorabridge.bridge.errors import BridgeError, CodecError
from lorabridge.bridge.events import Consumed, Dropped, Happening, Quarantine, event_fields
from lorabridge.bridge.model import model_folder
from lorabridge.bridge.run_record import RunRecord, resolve_run
from lorabridge.bridge.sections import PolicySection
from lorabridge.bridge.servable import check_targets
from lorabridge.bridge.settings import Settings, load
from lorabridge.bridge.status import Status, answering
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.store.in_use import Residents
from lorabridge.bridge.store.retention import Retention
from lorabridge.bridge.stream.connection import clock_offset_ms, connect, errors, now_ms
from lorabridge.bridge.stream.groups import GroupReader
from lorabridge.bridge.stream.kept import Kept
from lorabridge.bridge.stream.keys import Keys
from lorabridge.bridge.trajectory import Trajectory
from lorabridge.trainer.publisher import Line, Publisher, take_over
from lorabridge.trainer.quorum import Quorum

if TYPE_CHECKING:
    from lorabridge.trainer.source import Consumption

log = logging.getLogger("lorabridge.trainer")

_OTHER_RANKS_S = 2.0


class MainRank:
    """What only the main rank has: the connections, the source and the publisher."""

    def __init__(
        self, settings: Settings, run: RunRecord, line: Line, shapes: Shapes, client: redis.Redis, store: Store,
        config: dict[str, Any],
    ) -> None:  # fmt: skip
        from lorabridge.trainer.export import serialise
        from lorabridge.trainer.source import TrajectorySource

        keys = Keys(run.run)
        self._client, self._keys, self._policy = client, keys, run.policy
        self._kept = Kept(keys)
        self._kept.tend(client)
        self._offset = clock_offset_ms(now_ms(client), time.time())
        batch = settings.trainer.per_device_train_batch_size * settings.trainer.nproc_per_node
        self._reader = GroupReader(
            client, keys, "trainer", self._unreadable, lambda: put_on_record(client, keys, run), self._kept
        )
        self.source = TrajectorySource(
            reader=self._reader,
            ahead=batch,
            per_step=settings.samples_per_step,
            manifest_of=store.manifest,
            epoch=run.epoch,
            lag_max=settings.lag.max,
            on_dropped=self._dropped,
            clock_s=time.time,
        )
        self.publisher = Publisher(
            line=line,
            client=client,
            keys=keys,
            store=store,
            base=run.base,
            shapes=shapes,
            max_rank=settings.slot_rank,
            serialise=lambda tensors: serialise(tensors, config),
            now_ms=self.now_ms,
            kept=self._kept,
            canary_every=settings.canary.every,
            retain=Retention(store, run.policy, settings.store.keep, Residents(client, keys).digests).apply,
        )

        wanted = settings.generators_wanted
        self.quorum = Quorum(client, keys, run.policy, wanted, settings.publish.wait_s) if wanted else None

    def now_ms(self) -> int:
        """The stream's clock."""
        return round(time.time() * 1000) + self._offset

    def consumed(self, consumption: Consumption) -> float:
        """Report what a step trained on; token-weighted seconds from sampled to trained."""
        if told := self._kept.tend(self._client):
            log.warning("the stream server has come back older: it was told again of %d entries that it forgot", told)
            self._reader.look_again()
        now, tokens = self.now_ms(), consumption.lag.tokens
        waited = sum((now - t.times_ms["sampled"]) * t.tokens for t in consumption.trajectories)
        seconds = waited / 1000 / tokens if tokens else 0.0
        self._report(
            Consumed(
                policy=self._policy,
                step=consumption.step,
                trajectories=tuple(t.id for t in consumption.trajectories),
                tokens=tokens,
                lag_total=consumption.lag.total,
                lag_max=consumption.lag.largest,
                lag_s=seconds,
                reward=consumption.reward,
            )
        )
        return seconds

    def _dropped(self, trajectory: Trajectory, reason: str) -> None:
        self._report(Dropped(policy=self._policy, trajectories=(trajectory.id,), reason=reason))

    def _unreadable(self, entry: str, error: CodecError) -> None:
        log.warning("entry %s of the stream is no group: %s", entry, error.diagnostics())
        self._report(Quarantine(subject=f"entry {entry}", reason=error.diagnostics()))

    def _report(self, happening: Happening) -> None:
        self._kept.send(self._client, self._keys.events, event_fields("trainer", self.now_ms(), happening))


def arguments(settings: Settings) -> dict[str, Any]:
    """Arguments of TRL's ``AsyncGRPOConfig``; ``[trainer] extra`` adds to them."""
    import torch

    own = settings.trainer
    return {
        "output_dir": str(settings.run.dir / "trainer"),
        "max_steps": own.max_steps,
        "per_device_train_batch_size": own.per_device_train_batch_size,
        "gradient_accumulation_steps": own.gradient_accumulation_steps,
        "learning_rate": own.learning_rate,
        "num_generations": settings.rollout.num_generations,
        "temperature": settings.rollout.temperature,
        "max_completion_length": settings.rollout.max_completion_length,
        "weight_sync_steps": settings.publish.every,
        "seed": settings.run.seed,
        "report_to": list(own.report_to),
        "bf16": settings.model.dtype == "bfloat16",
        "model_init_kwargs": {"dtype": settings.model.dtype},
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "token_budget": 0,  # a step is a fixed number of samples, and long ones are not dropped
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **own.extra,
    }


def lora_arguments(policy: PolicySection) -> dict[str, Any]:
    """Arguments of PEFT's ``LoraConfig`` that decide what the adapter is."""
    return {"r": policy.rank, "lora_alpha": policy.alpha, "target_modules": list(policy.target_modules)}


def train(settings: Settings) -> None:
    """Train on this rank until ``max_steps``. Raises ``BridgeError``."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from lorabridge.trainer.cpu import stand_in
    from lorabridge.trainer.export import plain_config
    from lorabridge.trainer.trl import BridgeGRPOTrainer

    if settings.trainer.threads:
        # In the environment as well: accelerate sets torch's threads to every core where it finds nothing there.
        os.environ["OMP_NUM_THREADS"] = str(settings.trainer.threads)
        torch.set_num_threads(settings.trainer.threads)
    stand_in()
    folder = model_folder(settings.model.path, settings.model.revision)
    peft = LoraConfig(**lora_arguments(settings.policy), task_type="CAUSAL_LM")
    config = plain_config(peft)
    check_config(config, settings.slot_rank)
    leads, status = int(os.environ.get("RANK", "0")) == 0, Status()
    with answering(settings.trainer.status if leads else "", status):
        main = _main_rank(settings, folder, config) if leads else None
        trainer = BridgeGRPOTrainer(
            model=str(folder),
            args=AsyncGRPOConfig(**arguments(settings)),
            train_dataset=Dataset.from_list([{"prompt": ""}]),  # prompts are the workers' business
            peft_config=peft,
            source=main.source if main else None,
            publisher=main.publisher if main else None,
            on_consumed=main.consumed if main else None,
            quorum=main.quorum if main else None,
        )
        status.ready()
        with errors(settings.redis):
            try:
                trainer.train()
            except BaseException:
                trainer.abandon()
                raise
            trainer.close()


def _main_rank(settings: Settings, folder: Path, config: dict[str, Any]) -> MainRank:
    """Take over the policy, and publish the run, so that workers can join while this rank still loads the model."""
    client = connect(settings.redis)
    run = resolve_run(settings, folder)
    keys = Keys(run.run)
    shapes = base_shapes(folder)
    check_targets(config, shapes)
    store = open_store(settings.store_url, settings.store.max_adapter_bytes)
    with errors(settings.redis):
        # The epoch first: workers then serve nothing of an earlier trainer, whose samples would be dropped here.
        line = take_over(client, keys, store, run.policy, run.run)
        run = msgspec.structs.replace(run, epoch=line.epoch)
        put_on_record(client, keys, run)
        return MainRank(settings, run, line, shapes, client, store, config)


def put_on_record(client: redis.Redis, keys: Keys, run: RunRecord) -> None:
    """Let workers join."""
    client.set(keys.run, codec.encode(run))


def ranks(environ: Mapping[str, str]) -> list[str]:
    """torchrun says how many ranks there are; the configuration may say something else."""
    return [f"trainer.nproc_per_node={environ['WORLD_SIZE']}"] if "WORLD_SIZE" in environ else []


def main() -> int:
    """Entry of ``python -m lorabridge.trainer.grpo``; its exit code."""
    parser = argparse.ArgumentParser(prog="lorabridge.trainer.grpo", description=__doc__)
    parser.add_argument("--config", type=Path, help="the run's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as SIGTERM, also within a collective; see ``launch``
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")  # the server is not TRL's here
    logging.getLogger("vllm").setLevel(logging.WARNING)
    try:
        train(load(given.config, [*given.set, *ranks(os.environ)]))
    except BridgeError as error:
        print(f"lorabridge: {error.diagnostics()}", file=sys.stderr)
        return error.exit_code
    except Exception:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Perhaps only for want of another rank, which has said why it failed: torchrun then ends this one now.
            time.sleep(_OTHER_RANKS_S)
        log.exception("the trainer failed")
        return 1
    return 0


if __name__ == "__main__":
    # Not sys.exit: threads of a trainer that failed must not keep a rank alive, with the others waiting for it.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
