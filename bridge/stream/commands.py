"""``lorabridge head`` and ``lorabridge rollback``."""

from __future__ import annotations

from typing import Annotated

import typer

from lorabridge.bridge import options


def head(config: options.Config = None, overrides: options.Overrides = None, json: options.Json = False) -> None:
    """Which version of the policy is the newest, by the store and by Redis, and whether the two agree.

    Examples:

        lorabridge head --config runs/demo/config.toml

        lorabridge head --config runs/demo/config.toml --json
    """
    import msgspec
    from rich.console import Console

    from lorabridge.bridge.codec import encode_json
    from lorabridge.bridge.errors import AnswerNo
    from lorabridge.bridge.settings import load
    from lorabridge.bridge.store import open_store
    from lorabridge.bridge.stream.connection import connect, errors
    from lorabridge.bridge.stream.head import Standing, compare, read_head
    from lorabridge.bridge.stream.keys import Keys

    settings = load(config, overrides or ())
    policy = settings.policy.name
    with errors(settings.redis):
        mirrored = read_head(connect(settings.redis), Keys(settings.run.id), policy)
    stored = open_store(settings.store_url, settings.store.max_adapter_bytes).newest(policy)
    standing = compare(stored, mirrored)
    if json:
        manifest = msgspec.json.decode(encode_json(stored)) if stored else None
        answer = {"policy": policy, "standing": standing.value, "manifest": manifest, "redis": mirrored}
        print(msgspec.json.encode(answer).decode())
    else:
        console = Console(soft_wrap=True)
        if stored:
            console.print(f"{policy} version {stored.version}  {stored.digest}  step {stored.step}")
        else:
            console.print(f"{policy} has no version yet")
        console.print(f"Redis {standing.value}" + (f" (version {mirrored.version})" if mirrored else ""))
    if standing is Standing.CONFLICTS:
        raise AnswerNo("the store and Redis name different heads", action="Is [store] url the one of this run?")


def rollback(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="The policy to roll back.", show_default=False)],
    to: Annotated[int, typer.Option("--to", min=1, metavar="VERSION", help="The version to return to.")],
    config: options.Config = None,
    overrides: options.Overrides = None,
    json: options.Json = False,
) -> None:
    """Serve an older version again: commit its adapter as a new version, move the head, and announce it.

    The line goes forward only, so what was version 12 becomes, say, version 41 as well. It takes the policy over: a
    trainer that still runs ends at its next publish, since it would train on from weights that you just went back from.
    Exits with 4 if there is no such version, or its adapter is gone or damaged.

    Examples:

        lorabridge rollback demo --to 12 --config runs/demo/config.toml

        lorabridge rollback demo --to 12 --config runs/demo/config.toml --json
    """
    import msgspec

    from lorabridge.bridge.settings import load
    from lorabridge.bridge.store import open_store
    from lorabridge.bridge.stream.connection import connect, errors
    from lorabridge.bridge.stream.keys import Keys
    from lorabridge.bridge.stream.rollback import roll_back

    settings = load(config, overrides or ())
    store = open_store(settings.store_url, settings.store.max_adapter_bytes)
    with errors(settings.redis):
        head, moved = roll_back(connect(settings.redis), Keys(settings.run.id), store, policy, to)
    if json:
        answer = {"policy": policy, "restored": to, "moved": moved, "version": head.version, "digest": head.digest}
        print(msgspec.json.encode(answer | {"parent": head.parent, "epoch": head.epoch, "step": head.step}).decode())
    elif moved:
        print(f"{policy} version {head.version} has the adapter of version {to} again  {head.digest}")
    else:
        print(f"{policy} version {head.version} is the head and has the adapter of version {to}: nothing to do")
