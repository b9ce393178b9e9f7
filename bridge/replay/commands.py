"""``lorabridge replay show``, ``lorabridge replay verify`` and ``lorabridge audit``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorabridge.bridge import options

if TYPE_CHECKING:
    from lorabridge.bridge.ledger.reader import Ledger
    from lorabridge.bridge.replay.audit import Progress, SpanReport
    from lorabridge.bridge.replay.scorer import Scorer
    from lorabridge.bridge.residency import Residency
    from lorabridge.bridge.settings import Settings
    from lorabridge.bridge.store import Store

replay = typer.Typer(
    name="replay",
    help="Look at one trajectory of a run, or recompute it under the adapters that it names. Nothing is written.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of a trajectory: RUN/GROUP.ATTEMPT/INDEX.")]
Sample = Annotated[
    int | None, typer.Option("--sample", min=1, help="Audit this many trajectories, drawn evenly.", show_default="all")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the drawing.")]


@replay.command()
def show(id: Id, run: options.RunDir, json: options.Json = False) -> None:
    """What a trajectory holds: prompt, sampled tokens, and which version sampled which of them.

    Examples:

        lorabridge replay show demo/12.1/3 --run runs/demo

        lorabridge replay show demo/12.1/3 --run runs/demo --json
    """
    import msgspec
    from rich.console import Console

    from lorabridge.bridge.ledger.reader import Ledger
    from lorabridge.bridge.replay.show import decoder, trajectory_view

    settings = options.settings_of(run)
    trajectory = Ledger(settings.ledger_dir).trajectory(id)
    if json:
        print(msgspec.json.encode({"id": trajectory.id, **msgspec.structs.asdict(trajectory)}).decode())
    else:
        Console().print(trajectory_view(trajectory, decoder(_model(settings))))


@replay.command()
def verify(id: Id, run: options.RunDir, json: options.Json = False) -> None:
    """Recompute one trajectory under the adapters that its spans name, and under the versions next to them.

    Exits with 1 if a token is refuted or cannot be verified.

    Examples:

        lorabridge replay verify demo/12.1/3 --run runs/demo

        lorabridge replay verify demo/12.1/3 --run runs/demo --json
    """
    import msgspec
    from rich.console import Console

    from lorabridge.bridge.errors import AnswerNo
    from lorabridge.bridge.ledger.reader import Ledger
    from lorabridge.bridge.replay.audit import verify as verify_all
    from lorabridge.bridge.replay.show import verification_view
    from lorabridge.bridge.replay.verdict import Verdict, worst

    settings = options.settings_of(run)
    ledger = Ledger(settings.ledger_dir)
    trajectory = ledger.trajectory(id)
    store, scorer = _evidence(settings)
    reports = verify_all([trajectory], store, scorer, residencies=_residencies(ledger))
    verdict = worst([report.verdict for report in reports])
    if json:
        answer = {"id": trajectory.id, "verdict": verdict, "spans": [_row(report) for report in reports]}
        print(msgspec.json.encode(answer).decode())
    else:
        console = Console()
        console.print(f"{trajectory.id}: {verdict.value}", markup=False, highlight=False)
        console.print(verification_view(reports))
    if verdict in (Verdict.REFUTED, Verdict.UNVERIFIABLE):
        raise AnswerNo(f"{trajectory.id} is {verdict.value}", action="The reasons stand with its spans")


def audit(run: options.RunDir, sample: Sample = None, seed: Seed = 0, json: options.Json = False) -> None:
    """Recompute every sampled token of a run under the adapter that it names, and judge it.

    Exits with 1 if a token is refuted or cannot be verified, or if there is none. Tokens that could tell neighbouring
    versions apart are counted: without any, an audit says little.

    Examples:

        lorabridge audit --run runs/demo

        lorabridge audit --run runs/demo --sample 200 --json
    """
    import msgspec
    from rich.console import Console

    from lorabridge.bridge.errors import AnswerNo
    from lorabridge.bridge.ledger.reader import Ledger
    from lorabridge.bridge.replay.audit import audit as audit_all
    from lorabridge.bridge.replay.show import audit_view

    settings = options.settings_of(run)
    ledger = Ledger(settings.ledger_dir)
    store, scorer = _evidence(settings)
    with _progress() as on_progress:
        report = audit_all(
            ledger.trajectories(),
            store,
            scorer,
            residencies=_residencies(ledger),
            sample=sample,
            seed=seed,
            on_progress=on_progress,
        )
    if json:
        print(msgspec.json.encode(report.figures()).decode())
    else:
        Console().print(audit_view(report))
    if not report.holds:
        raise AnswerNo(
            f"of {report.tokens} tokens {report.refuted} are refuted and {report.unverifiable} cannot be verified",
            action="`lorabridge replay verify ID` shows the spans of a trajectory",
        )


def _evidence(settings: Settings) -> tuple[Store, Scorer]:
    from lorabridge.bridge.model import model_folder
    from lorabridge.bridge.replay.scorer import Scorer
    from lorabridge.bridge.store import open_store

    store = open_store(settings.store_url, settings.store.max_adapter_bytes)
    return store, Scorer(model_folder(settings.model.path, settings.model.revision, download=False), store)


def _model(settings: Settings) -> Path | None:
    """The base model's folder, None if it is not on this machine."""
    from lorabridge.bridge.errors import ModelError
    from lorabridge.bridge.model import model_folder

    try:
        return model_folder(settings.model.path, settings.model.revision, download=False)
    except ModelError:
        return None


def _residencies(ledger: Ledger) -> dict[str, Residency]:
    """Every residency record of the run, by label."""
    from lorabridge.bridge.events import Resident

    happenings = (event.happening for event in ledger.events(Resident))
    return {each.residency.label: each.residency for each in happenings if isinstance(each, Resident)}


def _row(report: SpanReport) -> dict[str, Any]:
    """A span's report as JSON has it; a finding about a whole turn has no policy, version or digest."""
    span = report.span
    return {
        "turn": report.turn,
        "policy": span.policy if span else None,
        "version": span.version if span else None,
        "digest": span.digest if span else None,
        "kv": span.kv if span else None,
        "start": span.start if span else 0,
        "end": span.end if span else report.tokens,
        "tokens": report.tokens,
        "discriminated": report.discriminated,
        "max_error": report.max_error,
        "verdict": report.verdict,
        "reasons": report.reasons,
    }


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on stderr if that is a terminal, otherwise nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tokens", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
