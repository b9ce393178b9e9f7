"""``lorabridge serve`` and ``lorabridge worker``."""

from __future__ import annotations

from typing import Annotated

import typer

from lorabridge.bridge import options

Print = Annotated[bool, typer.Option("--print", help="Print the whole vLLM command and exit.")]


def serve(config: options.Config = None, overrides: options.Overrides = None, show: Print = False) -> None:
    """Start a vLLM server with the plugin, the flags it needs and a control token.

    The process becomes vLLM: signals and the exit code are its own. The control token is read from
    LORABRIDGE_CONTROL_TOKEN or [generators] token_file, which is made if there is neither.

    Examples:

        lorabridge serve --config configs/demo.toml

        lorabridge serve --config configs/demo.toml --print

        lorabridge serve --config run.toml --set generators.port=8010 --set generators.kv=recompute
    """
    import os

    from lorabridge.bridge.model import model_folder
    from lorabridge.bridge.settings import load
    from lorabridge.bridge.token import control_token, ensure_token
    from lorabridge.rollout.serve import check_doors, is_cpu_build, vllm_command, with_environment

    settings = load(config, overrides or ())
    model = model_folder(settings.model.path, settings.model.revision)
    command = vllm_command(settings, model, config, overrides or (), is_cpu_build())
    if show:
        print(command.shell())
        return
    ensure_token(settings)
    control_token(settings)
    check_doors(settings.generators)
    os.execvpe(command.arguments[0], list(command.arguments), with_environment(command, os.environ))


def worker(config: options.Config = None, overrides: options.Overrides = None) -> None:
    """Sample groups: follow the head, swap it into the generator, sample, reward, send. Runs until SIGTERM.

    It waits for the trainer to publish the run and for the generator to come up, and refuses to join if its own
    configuration, model or environment differs from the trainer's.

    Examples:

        lorabridge worker --config configs/demo.toml

        lorabridge worker --config run.toml --set rollout.concurrency=16
    """
    import asyncio
    import logging

    from lorabridge.bridge.settings import load
    from lorabridge.rollout.join import work

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = load(config, overrides or ())
    asyncio.run(work(settings))
