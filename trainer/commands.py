"""``lorabridge train``."""

from __future__ import annotations

from typing import Annotated

import typer

from lorabridge.bridge import options

Processes = Annotated[
    int | None, typer.Option("--nproc-per-node", min=1, help="Ranks on this machine; default [trainer] nproc_per_node.")
]


def train(config: options.Config = None, overrides: options.Overrides = None, nproc_per_node: Processes = None) -> None:
    """Train a LoRA adapter on what the workers sample, and publish a version every [publish] every steps.

    The same as torchrun -m lorabridge.trainer.grpo --config FILE, which works as well.

    Examples:

        lorabridge train --config configs/demo.toml

        lorabridge train --config run.toml --nproc-per-node 2 --set trainer.max_steps=100
    """
    from lorabridge.bridge.adapter import check_config
    from lorabridge.bridge.model import model_folder
    from lorabridge.bridge.settings import load
    from lorabridge.bridge.stream.connection import connect
    from lorabridge.trainer.grpo import lora_arguments

    changes = list(overrides or ())
    if nproc_per_node is not None:
        changes.append(f"trainer.nproc_per_node={nproc_per_node}")
    settings = load(config, changes)
    # What a rank would find out half a minute later, torch imported.
    check_config(lora_arguments(settings.policy) | {"peft_type": "LORA"}, settings.slot_rank)
    model_folder(settings.model.path, settings.model.revision)
    connect(settings.redis).close()

    from lorabridge.trainer.launch import launch

    arguments = ["--config", str(config)] if config else []
    code = launch(
        settings.trainer.nproc_per_node, arguments + [part for change in changes for part in ("--set", change)]
    )
    raise typer.Exit(code)
