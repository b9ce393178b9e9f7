"""``lorabridge store ls`` and ``lorabridge store gc``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorabridge.bridge import options

if TYPE_CHECKING:
    from lorabridge.bridge.ledger.reader import Ledger
    from lorabridge.bridge.settings import Settings
    from lorabridge.bridge.store import Store

store = typer.Typer(
    name="store",
    help="The adapters and versions of a run's store.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Run = Annotated[Path | None, typer.Option("--run", help="Folder of the run, such as runs/demo.", show_default=False)]


@store.command()
def ls(
    run: Run = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    last: Annotated[int, typer.Option("--last", min=0, help="Newest versions to show; 0: all.")] = 20,
    json: options.Json = False,
) -> None:
    """The policy's versions, newest last, and whether their adapters are still in the store.

    Examples:

        lorabridge store ls --run runs/demo

        lorabridge store ls --config first.toml --last 0 --json
    """
    import msgspec
    from rich.console import Console
    from rich.table import Table

    settings = _settings(run, config, overrides)
    policy, shelf = settings.policy.name, _open(settings)
    sizes, newest = shelf.adapters(), shelf.newest(policy)
    end = newest.version if newest else 0
    manifests = [shelf.manifest(policy, n) for n in range(max(1, end - last + 1) if last else 1, end + 1)]
    if json:
        rows = [{**msgspec.to_builtins(each), "there": each.digest in sizes} for each in manifests]
        answer = {"policy": policy, "newest": end, "versions": rows, "adapters": len(sizes)}
        print(msgspec.json.encode({**answer, "bytes": sum(sizes.values()), "url": shelf.url}).decode())
        return
    table = Table("version", "digest", "step", "epoch", "adapter")
    for each in manifests:
        size = f"{each.size / 1e6:,.1f} MB" if each.digest in sizes else "gone"
        table.add_row(f"{each.version}", each.digest[:19], f"{each.step}", f"{each.epoch}", size)
    console = Console()
    console.print(table)
    console.print(f"{policy}: {end} versions. {shelf.url}: {len(sizes)} adapters, {sum(sizes.values()) / 1e6:,.1f} MB")


@store.command()
def gc(
    run: Run = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=1, help="Newest versions whose adapters stay.", show_default="[store] keep"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: options.Json = False,
) -> None:
    """Remove the adapters of old versions, except those that something still uses. The versions stay on record.

    Tokens that a removed adapter sampled can never be recomputed (the audit says `unverifiable`): it says of how many
    trajectories in the ledger that is true. What servers serve is asked of Redis and the ledger, what waits to be
    trained on or archived of Redis; if Redis does not answer, the ledger alone must know.

    Examples:

        lorabridge store gc --run runs/demo --keep 100 --dry-run

        lorabridge store gc --config first.toml --json
    """
    import msgspec

    from lorabridge.bridge.errors import ConfigError
    from lorabridge.bridge.store.retention import Retention
    from lorabridge.bridge.stream.connection import errors

    settings = _settings(run, config, overrides)
    keep = settings.store.keep if keep is None else keep
    if keep < 1:
        raise ConfigError("[store] keep is 0, so that every adapter stays", action="Say how many: --keep N")
    ledger = _ledger(settings)
    with errors(settings.redis):
        in_use, asked_redis = _in_use(settings, ledger)
        retention = Retention(_open(settings), settings.policy.name, keep, in_use)
        due = retention.due()
        gone = list(due) if dry_run else retention.apply()
    freed, trajectories = sum(due.get(digest, 0) for digest in gone), _sampled_by(ledger, gone)
    if json:
        answer: dict[str, Any] = {"policy": settings.policy.name, "keep": keep, "dry_run": dry_run, "removed": gone}
        answer |= {"bytes": freed, "trajectories": trajectories, "redis": asked_redis}
        print(msgspec.json.encode(answer).decode())
        return
    print(f"{len(gone)} adapters, {freed / 1e6:,.1f} MB, {'would go' if dry_run else 'removed'}")
    if trajectories:
        print(
            f"{trajectories} trajectories in the ledger {'could' if dry_run else 'can'} no longer be recomputed whole"
        )
    if not asked_redis:
        print("Redis does not answer: what servers serve is what the ledger last heard; what waits there is not known")


def _settings(run: Path | None, config: Path | None, overrides: list[str] | None) -> Settings:
    from lorabridge.bridge.errors import ConfigError
    from lorabridge.bridge.settings import load

    if run is not None and config is not None:
        raise ConfigError("--run and --config name two configurations", action="Give one of them")
    return options.settings_of(run, overrides) if run is not None else load(config, overrides or ())


def _open(settings: Settings) -> Store:
    from lorabridge.bridge.store import open_store

    return open_store(settings.store_url, settings.store.max_adapter_bytes)


def _ledger(settings: Settings) -> Ledger | None:
    """The run's ledger, None if it has none here."""
    from lorabridge.bridge.ledger.commits import COMMITS
    from lorabridge.bridge.ledger.reader import Ledger

    return Ledger(settings.ledger_dir) if any((settings.ledger_dir / COMMITS).glob("*")) else None


def _in_use(settings: Settings, ledger: Ledger | None) -> tuple[Callable[[], set[str]], bool]:
    """What servers serve, what waiting trajectories and Redis's head name, as a question; and whether Redis answers.

    Raises:
        StreamUnreachable: Redis does not answer, and there is no ledger to go by.
    """
    from lorabridge.bridge.errors import StreamUnreachable
    from lorabridge.bridge.events import Resident
    from lorabridge.bridge.store.in_use import Residents, Waiting, digests_of
    from lorabridge.bridge.stream.connection import connect
    from lorabridge.bridge.stream.head import read_head
    from lorabridge.bridge.stream.keys import Keys

    happenings = (event.happening for event in ledger.events(Resident)) if ledger else ()
    known = {each.residency.generator: each.residency for each in happenings if isinstance(each, Resident)}
    try:
        client = connect(settings.redis)
    except StreamUnreachable:
        if ledger is None:
            raise
        return lambda: digests_of(known.values()), False
    keys = Keys(settings.run.id)
    residents, waiting = Residents(client, keys, known.values()), Waiting(client, keys)

    def ask() -> set[str]:
        head = read_head(client, keys, settings.policy.name)
        return residents.digests() | waiting.digests() | ({head.digest} if head else set())

    return ask, True


def _sampled_by(ledger: Ledger | None, digests: Collection[str]) -> int | None:
    """Trajectories of the ledger with a token that one of the adapters sampled, None without a ledger."""
    if ledger is None:
        return None
    found = ledger.connection().execute(_SAMPLED_BY, [list(digests)]).fetchone()
    return int(found[0]) if found else 0


_SAMPLED_BY = """
SELECT count(DISTINCT id) FROM (
  SELECT id, unnest(turn.spans).digest AS digest FROM (SELECT id, unnest(turns) AS turn FROM trajectories)
) WHERE digest IN (SELECT unnest(?::VARCHAR[]))
"""
