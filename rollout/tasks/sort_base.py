"""Makes the demo's base model: a tiny Qwen2 that knows how to sort, and slips.

    python -m lorabridge.rollout.tasks.sort_base OUT

It is trained on answers in which vowels are missing and characters are wrong at random. What the model takes from that
is the order, to overlook a vowel now and then, and never to be quite sure: taking the likeliest token at each step is
right, sampling at temperature 1 is right for about half of an answer. That gap is what reinforcement learning closes in
the demo; because most of it is about a few characters, a few dozen steps are enough. That it is never quite sure is
what lets the audit tell two versions apart: a token that is certain under both says nothing about either. Training is
bounded by steps rather than by time, and nothing is downloaded.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from lorabridge.rollout.tasks import sort

STEPS, BATCH = 350, 16
LEARNING_RATE = 3e-3
WARMUP = 30
SLIPPERY, SLIP = "05aeiou", 0.2
"""Which characters a training answer may miss, and the chance that it does; sampling learns to skip as often."""

WRONG = 0.012
"""The chance that a character of a training answer is another one."""

PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "?"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}:{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
REPORT_EVERY_S = 10.0

Report = Callable[[int, float], None]
"""Told after each step how many are done, and the loss in nats per token."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Questions with their answers, padded on the right; each field is an int64 tensor of (samples, tokens)."""

    ids: torch.Tensor
    labels: torch.Tensor
    attention: torch.Tensor


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per character.

    White space is not among the characters: a tokenizer like this one loses it when it is saved and loaded again.
    """
    symbols = [PAD, START, END, UNKNOWN, ":", *sort.ALPHABET]
    characters = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        padding_side="left",
        model_max_length=256,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return an untrained model of about 0.6 million parameters, in fp32."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def slip(rng: random.Random, answer: str) -> str:
    """Return ``answer`` with ``SLIPPERY`` characters left out, and others in the place of some, at random."""
    kept = [character for character in answer if character not in SLIPPERY or rng.random() >= SLIP]
    return "".join(rng.choice(sort.ALPHABET) if rng.random() < WRONG else character for character in kept)


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, samples: int) -> Batch:
    """Draw a batch of fresh questions with slipped answers; only answers and their ends are learned from."""
    pairs = []
    for _ in range(samples):
        question, answer = sort.example(rng)
        messages = [{"role": "user", "content": question}]
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        pairs.append((_encode(tokenizer, text), _encode(tokenizer, slip(rng, answer) + END)))
    shape = (samples, max(len(asked) + len(given) for asked, given in pairs))
    ids = torch.full(shape, tokenizer.convert_tokens_to_ids(PAD))
    labels = torch.full(shape, -100)
    attention = torch.zeros(shape, dtype=torch.long)
    for row, (asked, given) in enumerate(pairs):
        end = len(asked) + len(given)
        ids[row, :end] = torch.tensor(asked + given)
        labels[row, len(asked) : end] = torch.tensor(given)
        attention[row, :end] = 1
    return Batch(ids=ids, labels=labels, attention=attention)


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int, report: Report
) -> None:
    """Train ``model`` in place for ``steps`` batches of ``BATCH`` questions drawn from ``seed``."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * max(0.02, 1 - step / steps)
        batch = make_batch(tokenizer, rng, BATCH)
        loss = model(input_ids=batch.ids, labels=batch.labels, attention_mask=batch.attention).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(step + 1, loss.item())
    model.eval()


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write model and tokenizer as the folder ``out``, whole or not at all.

    Raises:
        OSError: ``out`` is there and is not an empty folder, or cannot be written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        beside.chmod(0o755)  # mkdtemp's folder is its owner's alone; a server may run as somebody else
        beside.replace(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def make(out: Path, *, steps: int = STEPS, seed: int = 0, console: Console | None = None) -> None:
    """Make the base model in the folder ``out``: progress goes to ``console`` (stderr unless given)."""
    console = console or Console(stderr=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    if console.is_terminal:
        columns = (TextColumn("training the base"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            bar = progress.add_task("base", total=steps, loss=float("nan"))
            train(
                model,
                tokenizer,
                steps=steps,
                seed=seed,
                report=lambda done, loss: progress.update(bar, completed=done, loss=loss),
            )
    else:
        train(model, tokenizer, steps=steps, seed=seed, report=_lines(console, steps))
    save(model, tokenizer, out)


def _lines(console: Console, steps: int) -> Report:
    """Return a report for where no progress bar can be drawn: a line every ``REPORT_EVERY_S`` seconds."""
    started = said = time.monotonic()

    def report(done: int, loss: float) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= REPORT_EVERY_S or done == steps:
            said = now
            console.print(f"step {done}/{steps}, loss {loss:.3f}, {now - started:.0f} s", highlight=False)

    return report


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m lorabridge.rollout.tasks.sort_base",
        description="Make the demo's base model: a tiny Qwen2 that sorts characters, and slips.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make; it must not be there yet")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and questions (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads; more than are idle make it slower (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    if asked.steps < 1 or asked.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if asked.out.exists() and not (asked.out.is_dir() and not any(asked.out.iterdir())):
        print(f"{asked.out} is there already: remove it, or name another folder", file=sys.stderr)
        return 1
    torch.set_num_threads(asked.threads)
    disable_progress_bar()  # transformers' own, which would draw over ours
    make(asked.out, steps=asked.steps, seed=asked.seed)
    print(f"wrote {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
