"""``lorabridge demo`` and ``lorabridge up``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from lorabridge.bridge import options
from lorabridge.bridge.errors import AnswerNo

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from lorabridge.bridge.run.summary import Summary

Generators = Annotated[int | None, typer.Option("--generators", min=1, help="vLLM servers.", show_default="1")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps.", show_default="60")]


def demo(
    steps: Steps = None,
    generators: Generators = None,
    overrides: options.Overrides = None,
    json: options.Json = False,
) -> None:
    """Everything on this machine, in a few minutes: a small model learns to sort, and every token is audited.

    Starts an embedded Valkey, a vLLM server, a rollout worker, the archiver and the trainer; publishes an adapter
    at each step; ends with an audit. The run is left in runs/demo (runs/demo-2 if that is there). Ctrl-C stops it all.

    Examples:

        lorabridge demo

        lorabridge demo --steps 20

        lorabridge demo --generators 2

        lorabridge demo --set generators.kv=recompute --set run.dir=/tmp/runs/recompute
    """
    wanted = [*(overrides or ()), *([f"trainer.max_steps={steps}"] if steps else ())]
    wanted += [f"generators.count={generators}"] if generators else []

    def run(console: Console) -> tuple[Summary, Path]:
        from lorabridge.bridge.run.demo import demo

        return demo(wanted, console)

    _answer(run, json)


def up(config: options.Config = None, overrides: options.Overrides = None, json: options.Json = False) -> None:
    """One run with your own configuration: starts every process of it here, and stops them when training is done.

    Redis is yours ([redis] url). A vLLM server is started unless [generators] urls names some that run already.
    The run is left in [run] dir, audited, with its summary and pictures. Ctrl-C stops it all.

    Examples:

        lorabridge up --config run.toml

        lorabridge up --config run.toml --set trainer.max_steps=200 --json
    """

    def run(console: Console) -> tuple[Summary, Path]:
        from lorabridge.bridge.run.up import up
        from lorabridge.bridge.settings import load

        return up(load(config, overrides or ()), console)

    _answer(run, json)


def _answer(run: Callable[[Console], tuple[Summary, Path]], json: bool) -> None:
    """Run it, and tell what came of it: words for people, with ``--json`` on stderr, and there a line on stdout."""
    import msgspec
    from rich.console import Console

    from lorabridge.bridge.run.summary import in_words

    console = Console(stderr=json)
    summary, folder = run(console)
    console.print(in_words(summary, folder), markup=False, highlight=False, soft_wrap=True)
    if json:
        print(msgspec.json.encode(summary).decode())
    if summary.tokens_refuted or summary.tokens_unverifiable:
        raise AnswerNo(
            f"the audit refutes {summary.tokens_refuted} tokens and could not verify {summary.tokens_unverifiable}",
            action=f"`lorabridge audit --run {folder}` says which",
        )
