"""A group, from its prompt to trajectories with advantages. Knows no Redis."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lorabridge.bridge.codec import canonical_json
from lorabridge.bridge.errors import Quarantined, RequestRefused
from lorabridge.bridge.residency import resolve, without_preemptions
from lorabridge.bridge.run_record import RunRecord
from lorabridge.bridge.stream.groups import Claim
from lorabridge.bridge.trajectory import Group, Trajectory, Turn, Unestablished
from lorabridge.rollout.environment import Environment, Prompts, advantages, score, total
from lorabridge.rollout.generator import Completion, Generator
from lorabridge.rollout.residencies import Residencies
from lorabridge.rollout.wire import EngineFacts


class Tokenizer(Protocol):
    """What a sampler needs of a Hugging Face tokenizer."""

    def apply_chat_template(self, conversation: Any, **arguments: Any) -> Any: ...

    def decode(self, token_ids: Any, **arguments: Any) -> str: ...

    def __call__(self, text: str, **arguments: Any) -> Any: ...


class Source(Protocol):
    """A generator that a group is sampled from (``lorabridge.rollout.member.Member``)."""

    generator: Generator
    residencies: Residencies
    facts: EngineFacts


class Sampler:
    """Samples whole groups.

    Args:
        run: what the trainer published.
        now_ms: the stream's clock, milliseconds since 1970.
    """

    def __init__(
        self, *, run: RunRecord, environment: Environment, prompts: Prompts, tokenizer: Tokenizer,
        now_ms: Callable[[], int],
    ) -> None:  # fmt: skip
        self._run, self._environment, self._prompts, self._tokenizer = run, environment, prompts, tokenizer
        self._now_ms = now_ms

    async def group(self, claim: Claim, source: Source) -> Group:
        """Sample, resolve, reward.

        Raises:
            Unestablished: what sampled a completion cannot be established.
            Quarantined: the generator ended a completion, since it could not prove the slot that it came from.
            RequestRefused: the prompt leaves no room for an answer.
            GeneratorError: the generator went away or refused.
        """
        row = self._prompts.row(claim.number)
        prompt = self._encode(row["prompt"])
        if len(prompt) >= source.facts.max_model_len:
            raise RequestRefused(
                f"the prompt has {len(prompt)} tokens, and {source.generator.url} takes {source.facts.max_model_len}",
                action="Shorten the prompts, or raise [generators] max_model_len",
            )
        async with asyncio.TaskGroup() as tasks:
            sampling = [tasks.create_task(self._complete(prompt, source)) for _ in range(self._run.num_generations)]
        completions = [task.result() for task in sampling]
        sampled_ms = self._now_ms()
        turns = [await self._turn(prompt, completion, source) for completion in completions]
        instance = self._instance(completions)
        texts = [self._as_message(row["prompt"], completion.token_ids) for completion in completions]
        scored = await score(self._environment.reward_funcs, row, texts, [c.token_ids for c in completions])
        rewards = [total(rewarded) for rewarded in scored]
        times = {"claimed": claim.at_ms, "sampled": sampled_ms, "rewarded": self._now_ms()}
        trajectories = tuple(
            Trajectory(
                run=self._run.run, policy=self._run.policy, group=claim.number, attempt=claim.attempt, index=index,
                environment=self._run.environment, prompt=_digest(list(prompt)), base=self._run.base.digest,
                turns=(turn,), sampling=self._run.sampling, seed=self._run.seed,
                logprobs_mode=source.facts.logprobs_mode, dtype=source.facts.dtype, generator=source.generator.name,
                instance=instance, reward=0.0 if reward is None else reward, rewards=rewarded, advantage=advantage,
                times_ms=times,
            )
            for index, (turn, reward, rewarded, advantage) in enumerate(
                zip(turns, rewards, scored, advantages(rewards), strict=True)
            )
        )  # fmt: skip
        return Group(group=claim.number, attempt=claim.attempt, worker=claim.worker, trajectories=trajectories)

    async def _complete(self, prompt: Sequence[int], source: Source) -> Completion:
        run = self._run
        return await source.generator.sample(run.policy, prompt, run.sampling, run.eos_ids)

    async def _turn(self, prompt: tuple[int, ...], completion: Completion, source: Source) -> Turn:
        if completion.finish_reason == "abort":
            raise Quarantined(
                f"{source.generator.url} ended a sample before its time",
                action="It could not prove a slot; see its log",
            )
        if not completion.spans:
            raise Unestablished("the engine reported no spans")
        if len(completion.logprobs) != len(completion.token_ids):
            raise Unestablished("the engine reported another number of logprobs than of tokens")
        spans, preempted = without_preemptions(completion.spans)
        restarts = await source.generator.restarts(completion.request_id) if preempted else []
        records = await source.residencies.of([span.version for span in spans])
        return Turn(
            prompt_ids=prompt,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            mask=(1,) * len(completion.token_ids),
            spans=resolve(self._run.policy, len(completion.token_ids), spans, records, restarts, completion.began_on),
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
