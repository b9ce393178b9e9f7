"""``lorabridge archiver`` and ``lorabridge lag``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorabridge.bridge import options

if TYPE_CHECKING:
    from rich.table import Table

    from lorabridge.bridge.ledger.reader import Ledger
    from lorabridge.bridge.ledger.report import LagReport


class By(StrEnum):
    """What a row of ``lorabridge lag`` is about."""

    step = "step"
    digest = "digest"
    generator = "generator"


def archiver(config: options.Config = None, overrides: options.Overrides = None) -> None:
    """Write the run's ledger: every trajectory, version and event, before Redis may forget it.

    Ends at SIGTERM or Ctrl-C, after a last commit, with 0 if that has everything that was there. One archiver at a
    time; a second one is told so.

    Examples:

        lorabridge archiver --config runs/demo/config.toml
    """
    import logging

    from lorabridge.bridge.ledger.archiver import Archiver
    from lorabridge.bridge.settings import load
    from lorabridge.bridge.status import Status, answering
    from lorabridge.bridge.stopping import ANSWER_S, Drain
    from lorabridge.bridge.stream.connection import connect, errors
    from lorabridge.bridge.stream.keys import Keys

    settings = load(config, overrides or ())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    section, drain, status = settings.ledger, Drain(), Status()
    client = connect(settings.redis, drain.asked, ANSWER_S)
    with drain, answering(section.status, status), errors(settings.redis):
        Archiver(
            client,
            Keys(settings.run.id),
            settings.ledger_dir,
            flush_entries=section.flush_entries,
            flush_s=section.flush_s,
            status=status,
        ).run(drain.asked)


def lag(
    run: options.RunDir,
    by: Annotated[By, typer.Option("--by", help="What a row is about.")] = By.step,
    json: options.Json = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the lag of every step, as PNG.", show_default=False)
    ] = None,
) -> None:
    """How old the trained tokens were, in optimizer steps, by step, by adapter or by generator.

    Lag 0: sampled by the version that was trained from. Means are weighted by tokens.

    Examples:

        lorabridge lag --run runs/demo

        lorabridge lag --run runs/demo --by digest --json

        lorabridge lag --run runs/demo --plot lag.png
    """
    import msgspec
    from rich.console import Console

    from lorabridge.bridge.ledger.reader import Ledger
    from lorabridge.bridge.ledger.report import by_step

    ledger = Ledger(options.settings_of(run).ledger_dir)
    report = _report(ledger, by)
    if plot:
        _draw(by_step(ledger.events()), plot)
    if json:
        print(msgspec.json.encode({"by": by.value, "rows": report.rows, "missing": report.missing}).decode())
        return
    console = Console()
    console.print(_table(report, by))
    if report.missing:
        console.print(f"{report.missing} consumed trajectories are not in the ledger, or their versions are not")


def _report(ledger: Ledger, by: By) -> LagReport:
    from lorabridge.bridge.events import Consumed
    from lorabridge.bridge.ledger.report import by_digest, by_generator, by_step

    events = ledger.events(Consumed)
    if by is By.step:
        return by_step(events)
    steps = {(manifest.policy, manifest.version): manifest.step for manifest in ledger.manifests()}
    rows = by_digest if by is By.digest else by_generator
    return rows(events, ledger.trajectories(), steps)


def _table(report: LagReport, by: By) -> Table:
    from rich.table import Table

    table = Table(by.value, "trajectories", "tokens", "mean lag", "max lag", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        table.add_row(
            row.key, f"{row.trajectories}", f"{row.tokens}", f"{row.mean:.2f}", f"{row.largest}", f"{row.seconds:.1f}"
        )
    return table


def _draw(report: LagReport, file: Path) -> None:
    """Mean and largest lag of every optimizer step."""
    from lorabridge.bridge.errors import ConfigError

    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib", action="pip install 'lorabridge[audit]'") from error
    steps = [int(row.key) for row in report.rows]
    figure = Figure(figsize=(8, 4), layout="constrained")  # without pyplot it draws with Agg and needs no screen
    axes = figure.subplots()
    axes.step(steps, [row.largest for row in report.rows], where="mid", label="largest", alpha=0.5)
    axes.step(steps, [row.mean for row in report.rows], where="mid", label="mean over tokens")
    axes.set(xlabel="optimizer step", ylabel="lag in optimizer steps", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=120, format="png")
