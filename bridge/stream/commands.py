"""``lorabridge head``."""

from __future__ import annotations

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
