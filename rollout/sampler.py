"""A group, from its prompt to trajectories with advantages. Knows no Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lorabridge.bridge.codec import canonical_json
from lorabridge.bridge.residency import Residency, epochs_between, resolve
from lorabridge.bridge.run_record import RunRecord
from lorabridge.bridge.stream.groups import Claim
from lorabridge.bridge.trajectory import Group, Trajectory, Turn, Unestablished
from lorabridge.rollout.environment import Environment, Prompts, advantages, score, total
from lorabridge.rollout.generator import Completion, Generator


class Tokenizer(Protocol):
    """What a sampler needs of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: Any, **arguments: Any) -> Any: ...

    def decode(self, token_ids: Any, **arguments: Any) -> str: ...

    def __call__(self, text: str, **arguments: Any) -> Any: ...


class Residencies:
    """Residency records of the generator's running instance, asked for when a label is new."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._records: dict[str, Residency] = {}
        self._lock = asyncio.Lock()

    def add(self, record: Residency) -> None:
        self._records[record.label] = record

    async def of(self, labels: Sequence[str]) -> Mapping[str, Residency]:
        """Every record known. The generator is asked first if one of ``labels``, or of the epochs between them, is not.

        Raises:
            GeneratorError: the generator cannot be asked.
        """
        async with self._lock:
            missing = [epoch for label, epoch in epochs_between(labels) if label not in self._records]
            if missing:
                for record in await self._generator.residencies(min(missing) - 1):
                    self.add(record)
        return self._records


class Sampler:
    """Samples whole groups.

    Args:
        run: what the trainer published.
        facts: ``dtype`` and ``logprobs_mode`` of the generator.
        now_ms: the stream's clock, milliseconds since 1970.
    """

    def __init__(
        self, *, run: RunRecord, environment: Environment, prompts: Prompts, tokenizer: Tokenizer, generator: Generator,
        residencies: Residencies, dtype: str, logprobs_mode: str, now_ms: Callable[[], int],
    ) -> None:  # fmt: skip
        self._run, self._environment, self._prompts, self._tokenizer = run, environment, prompts, tokenizer
        self._generator, self._residencies = generator, residencies
        self._dtype, self._logprobs_mode, self._now_ms = dtype, logprobs_mode, now_ms

    async def group(self, claim: Claim) -> Group:
        """Sample, resolve, reward.

        Raises:
            Unestablished: what sampled a completion cannot be established, or it was aborted.
            GeneratorError: the generator went away or refused.
        """
        row = self._prompts.row(claim.number)
        prompt = self._encode(row["prompt"])
        async with asyncio.TaskGroup() as tasks:
            sampling = [tasks.create_task(self._complete(prompt)) for _ in range(self._run.num_generations)]
        completions = [task.result() for task in sampling]
        sampled_ms = self._now_ms()
        turns = [await self._turn(prompt, completion) for completion in completions]
        instance = self._instance(completions)
        texts = [self._as_message(row["prompt"], completion.token_ids) for completion in completions]
        scored = await score(self._environment.reward_funcs, row, texts, [c.token_ids for c in completions])
        rewards = [total(rewarded) for rewarded in scored]
        times = {"claimed": claim.at_ms, "sampled": sampled_ms, "rewarded": self._now_ms()}
        trajectories = tuple(
            Trajectory(
                run=self._run.run, policy=self._run.policy, group=claim.number, attempt=claim.attempt, index=index,
                environment=self._run.environment, prompt=_digest(list(prompt)), base=self._run.base.digest,
                turns=(turn,), sampling=self._run.sampling, seed=self._run.seed, logprobs_mode=self._logprobs_mode,
                dtype=self._dtype, generator=self._generator.url, instance=instance,
                reward=0.0 if reward is None else reward, rewards=rewarded, advantage=advantage, times_ms=times,
            )
            for index, (turn, reward, rewarded, advantage) in enumerate(
                zip(turns, rewards, scored, advantages(rewards), strict=True)
            )
        )  # fmt: skip
        return Group(group=claim.number, attempt=claim.attempt, worker=claim.worker, trajectories=trajectories)

    async def _complete(self, prompt: Sequence[int]) -> Completion:
        run = self._run
        return await self._generator.sample(run.policy, prompt, run.sampling, run.eos_ids)

    async def _turn(self, prompt: tuple[int, ...], completion: Completion) -> Turn:
        if completion.finish_reason == "abort":
            raise Unestablished("the engine aborted it")
        if not completion.spans:
            raise Unestablished("the engine reported no spans")
        if len(completion.logprobs) != len(completion.token_ids):
            raise Unestablished("the engine reported another number of logprobs than of tokens")
        records = await self._residencies.of([span.version for span in completion.spans])
        return Turn(
            prompt_ids=prompt,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            mask=(1,) * len(completion.token_ids),
            spans=resolve(self._run.policy, len(completion.token_ids), completion.spans, records),
            finish_reason=completion.finish_reason,
        )

    def _instance(self, completions: Sequence[Completion]) -> str:
        instances = {span.version.partition(":")[0] for completion in completions for span in completion.spans or ()}
        if len(instances) != 1:
            raise Unestablished(f"sampled by several instances: {', '.join(sorted(instances))}")
        return instances.pop()

    def _encode(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._tokenizer(prompt)["input_ids"])
        ids = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        return tuple(ids)

    def _as_message(self, prompt: Any, token_ids: Sequence[int]) -> Any:
        """A completion as TRL's reward functions get it: text for a text prompt, messages for messages."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _digest(value: object) -> str:
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def first_of(error: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of an exception group: the reason that the group's other members were cancelled."""
    inner = error.exceptions[0]
    return first_of(inner) if isinstance(inner, BaseExceptionGroup) else inner
