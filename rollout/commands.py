"""``lorabridge serve`` and ``lorabridge worker``."""

from __future__ import annotations

from typing import Annotated

import typer

from lorabridge.bridge import options

_EVERY_S = 1.0

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")]
Print = Annotated[bool, typer.Option("--print", help="Print the whole vLLM command and exit.")]


def serve(config: options.Config = None, overrides: options.Overrides = None, show: Print = False) -> None:
    """Start a vLLM server with the plugin, the flags it needs and a control token.

    It is vLLM's parent: vLLM writes where it writes, and if vLLM ends, it ends with that exit code. At SIGTERM or
    Ctrl-C it refuses new requests, gives those in flight 6 s to finish, and ends with 0; while vLLM starts it ends at
    once. The control token is read from LORABRIDGE_CONTROL_TOKEN or [generators] token_file, which is made if there is
    neither.

    Examples:

        lorabridge serve --config configs/demo.toml

        lorabridge serve --config configs/demo.toml --print

        lorabridge serve --config run.toml --set generators.port=8010 --set generators.kv=recompute
    """
    from lorabridge.bridge.model import model_folder
    from lorabridge.bridge.settings import load
    from lorabridge.bridge.token import control_token, ensure_token
    from lorabridge.rollout.serve import check_doors, is_cpu_build, vllm_command
    from lorabridge.rollout.server import run

    settings = load(config, overrides or ())
    model = model_folder(settings.model.path, settings.model.revision)
    command = vllm_command(settings, model, config, overrides or (), is_cpu_build())
    if show:
        print(command.shell())
        return
    ensure_token(settings)
    token = control_token(settings)
    check_doors(settings.generators)
    raise typer.Exit(run(command, settings.generators, token))


def fleet(
    config: options.Config = None,
    overrides: options.Overrides = None,
    watch: Watch = False,
    json: options.Json = False,
) -> None:
    """Every generator of a run: what it serves, how far behind the head, who controls it, and if it is out, why.

    Exits with 1 if a generator is out, or serves nothing of the run.

    Examples:

        lorabridge fleet --config runs/demo/config.toml

        lorabridge fleet --config runs/demo/config.toml --watch

        lorabridge fleet --config run.toml --json
    """
    import asyncio
    import time

    import msgspec
    from rich.console import Console
    from rich.live import Live

    from lorabridge.bridge.errors import AnswerNo
    from lorabridge.bridge.settings import load
    from lorabridge.bridge.stopping import end_at_once
    from lorabridge.rollout.fleet_view import fleet_view
    from lorabridge.rollout.survey import survey

    settings = load(config, overrides or ())
    seen = asyncio.run(survey(settings))
    if json:
        print(msgspec.json.encode({"generators": seen}).decode())
    elif watch:
        console = Console()
        end_at_once(console.show_cursor)
        with Live(fleet_view(seen), console=console) as live:
            while True:
                time.sleep(_EVERY_S)
                live.update(fleet_view(asyncio.run(survey(settings))), refresh=True)
    else:
        Console().print(fleet_view(seen))
    if out := [each.generator for each in seen if each.health in ("out", "empty")]:
        raise AnswerNo(f"not in: {', '.join(out)}", action="`lorabridge doctor` says what to do")


def doctor(config: options.Config = None, overrides: options.Overrides = None, json: options.Json = False) -> None:
    """Look at everything a run leans on: Redis, the store, the disk, every generator and what sits in its slots.

    Exits with 1 if something is wrong; every finding says what to do.

    Examples:

        lorabridge doctor --config runs/demo/config.toml

        lorabridge doctor --config run.toml --json
    """
    import msgspec
    from rich.console import Console

    from lorabridge.bridge.errors import AnswerNo
    from lorabridge.bridge.settings import load
    from lorabridge.rollout.doctor import examine
    from lorabridge.rollout.fleet_view import findings_view

    found = examine(load(config, overrides or ()))
    problems = [finding for finding in found if finding.level == "problem"]
    if json:
        print(msgspec.json.encode({"problems": len(problems), "findings": found}).decode())
    else:
        Console().print(findings_view(found))
    if problems:
        raise AnswerNo(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", action="What to do stands with each"
        )


def worker(config: options.Config = None, overrides: options.Overrides = None) -> None:
    """Sample groups: follow the head, swap it into the generator, sample, reward, send.

    Ends at SIGTERM or Ctrl-C, with 0: what it has begun goes to another worker at once.

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
