"""What every benchmark ends with: a table with its goals, JSON with ``--json``, and 1 if a goal is missed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A ratio or count, and what it should be at least or at most."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def wanted(self) -> str:
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"


def conclude(
    title: str, measured: Sequence[Mapping[str, object]], goals: Sequence[Goal], *, as_json: bool
) -> int:  # fmt: skip
    """Print everything; the exit code.

    Args:
        title: what was measured.
        measured: a column of the table each, with the same keys; the first of them names the column.
        goals: what is demanded of it.
        as_json: the last line of stdout is one JSON object, and the table goes to stderr.
    """
    machine = {"cores": os.cpu_count(), "architecture": platform.machine()}
    console = Console(stderr=as_json, highlight=False)
    console.print(f"{title} ({machine['cores']} cores, {machine['architecture']})")
    table = Table()
    first, *others = measured[0]
    table.add_column(first)
    for column in measured:
        table.add_column(str(column[first]), justify="right")
    for name in others:
        table.add_row(name, *(_shown(column[name]) for column in measured))
    console.print(table)
    for goal in goals:
        console.print(f"{'✓' if goal.met else '✗'} {goal.name}: {goal.value:.3f}, {goal.wanted}")
    if as_json:
        facts = {
            "measured": [dict(column) for column in measured],
            "goals": [asdict(g) | {"met": g.met} for g in goals],
        }
        print(json.dumps({"machine": machine, **facts}))
    return 0 if all(goal.met for goal in goals) else 1


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
