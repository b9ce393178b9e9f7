"""The fleet, and what a doctor finds, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lorabridge.rollout.findings import Finding, Level
from lorabridge.rollout.survey import Health, Seen

_SIGNS: dict[Level, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("•", "yellow"), "problem": ("✗", "bold red")}
_STYLES: dict[Health, str] = {"in": "green", "behind": "yellow", "empty": "yellow", "out": "bold red"}


def fleet_view(fleet: Sequence[Seen]) -> RenderableType:
    """One row per generator, and below them why those are out that are."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("generator", "health", "serves", "epoch", "in flight", "canary", "controller"):
        table.add_column(column, overflow="fold")
    for seen in fleet:
        table.add_row(
            Text(seen.generator),
            Text(seen.health, style=_STYLES[seen.health]),
            _serves(seen),
            Text(f"{seen.instance}:{seen.epoch} {seen.kv}" if seen.instance else "–"),
            Text(str(seen.running) if seen.instance else "–"),
            Text(seen.canary or "–"),
            Text(seen.controller or "nobody"),
        )
    return Stack(table, *(Text(f"✗ {seen.generator}: {seen.why}", style="red") for seen in fleet if seen.why))


def findings_view(findings: Sequence[Finding]) -> RenderableType:
    """One line per finding, and under it what to do, if it asks for something."""
    lines: list[Text] = []
    for finding in findings:
        sign, style = _SIGNS[finding.level]
        lines.append(
            Text.assemble((f"{sign} ", style), (f"{finding.subject} · {finding.check}  ", "bold"), finding.says)
        )
        if finding.action:
            lines.append(Text(f"  → {finding.action}", style=style))
    return Stack(*lines)


def _serves(seen: Seen) -> Text:
    text = Text()
    for number, (policy, serving) in enumerate(sorted(seen.serves.items())):
        late = f", {serving.behind} behind" if serving.behind else ""
        text.append("\n" if number else "").append(f"{policy} {serving.version}{late} ")
        text.append(serving.digest.removeprefix("sha256:")[:12], style="dim")
    return text or Text("–")
