"""The live panel: a pure view of a run, what it waits for in words, and where both are shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lorabridge.bridge.run.news import News

Phase = Literal["loading", "running", "stopping", "done", "failed"]

_BARS = "▁▂▃▄▅▆▇█"
_STYLES: dict[Phase, tuple[str, str]] = {
    "loading": ("◌", "yellow"), "running": ("●", "green"), "stopping": ("◌", "yellow"),
    "done": ("✓", "dim"), "failed": ("✗", "red"),
}  # fmt: skip


class ProcessView(msgspec.Struct, frozen=True):
    """A process by name, and how it is."""

    name: str
    phase: Phase


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the panel shows.

    Attributes:
        run: its id.
        elapsed_s: seconds since it began.
        max_steps, groups_per_step: what the configuration asks for.
        processes: in the order they were started.
        stage: what the supervisor itself is doing, or '' while it watches the loop.
        healthy: whether the server has answered.
        trouble: why Redis cannot be read, or ''.
    """

    run: str
    elapsed_s: float
    max_steps: int
    groups_per_step: int
    processes: tuple[ProcessView, ...]
    stage: str
    healthy: bool
    trouble: str
    news: News


def waits_for(view: View) -> str:
    """What the run waits for now, in one line."""
    news = view.news
    if view.stage:
        return view.stage
    if view.trouble:
        return f"Redis, trying again: {view.trouble}"
    if not view.healthy and not news.joined:
        return "the server to load the model, the trainer to import torch"
    if not view.healthy:
        return "the server to load the model"
    if not news.joined:
        return "the trainer to import torch"
    if news.head == 0:
        return "the trainer to publish version 1"
    if not news.serves:
        return f"the worker to have version {news.head} served"
    if news.steps >= view.max_steps:
        return "the trainer to finish"
    if news.counts.delivered < view.groups_per_step:
        return f"rollouts: {news.counts.delivered} of {view.groups_per_step} groups of step {news.steps + 1}"
    return f"the trainer to take step {news.steps + 1}"


def render(view: View) -> RenderableType:
    """The panel."""
    news, rates = view.news, view.news.rates
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    rows.add_column()
    rows.add_row("processes", _processes(view.processes))
    rows.add_row("step", _progress(view))
    rows.add_row("version", f"{news.head} published, {served(news)} served" if news.head else "–")
    rows.add_row("reward", _reward(news.rewards))
    rows.add_row("lag", f"{news.lags[-1]:.1f} steps at the last step, {news.lag_max} at most" if news.lags else "–")
    rows.add_row("speed", f"{rates.samples:,.0f} samples/s, {rates.tokens:,.0f} tokens/s trained" if rates else "–")
    if news.dropped or news.quarantined:
        trouble = f" (last: {news.trouble})" if news.trouble else ""
        rows.add_row("lost", Text(f"{news.dropped} dropped, {news.quarantined} quarantined{trouble}", style="yellow"))
    rows.add_row("waits for", Text(waits_for(view), style="bold"))
    return Panel(
        rows, title=f"lorabridge · {view.run}", title_align="left", subtitle=clock(view.elapsed_s),
        subtitle_align="right", border_style="cyan", width=88, padding=(0, 1),
    )  # fmt: skip


def line(view: View) -> str:
    """The panel in one plain line."""
    news, rates = view.news, view.news.rates
    if view.stage or not news.steps:
        return f"{clock(view.elapsed_s)}  waits for {waits_for(view)}"
    speed = f", {rates.samples:.0f} samples/s" if rates else ""
    return (
        f"{clock(view.elapsed_s)}  step {news.steps}/{view.max_steps}, version {news.head} ({served(news)} served), "
        f"reward {news.rewards[-1]:.3f}, lag {news.lags[-1]:.1f} (at most {news.lag_max}){speed}"
    )


def served(news: News) -> str:
    """The versions that the generators serve: one, a range, or a dash."""
    versions = sorted(set(news.serves.values()))
    return "–".join(str(version) for version in (versions[:1] + versions[1:][-1:])) or "–"


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` as bars, from their least to their greatest; means of neighbours where there are over ``width``."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, ``3:07``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _processes(processes: Sequence[ProcessView]) -> Text:
    text = Text()
    for process in processes:
        sign, style = _STYLES[process.phase]
        word = "" if process.phase == "running" else f" {process.phase}"
        text.append(f"{sign} ", style=style).append(f"{process.name}{word}   ")
    return text


def _progress(view: View) -> RenderableType:
    steps, rates = view.news.steps, view.news.rates
    left = view.max_steps - steps
    after = f", about {clock(left / rates.steps)} to go" if rates and left > 0 else ""
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=view.max_steps, completed=steps, width=32), f"{steps} of {view.max_steps}{after}")
    return row


def _reward(rewards: Sequence[float]) -> str:
    if not rewards:
        return "–"
    return f"{rewards[-1]:.3f}  {sparkline(rewards, 32)}  (first {rewards[0]:.3f})"


class Display:
    """Shows views: a live panel on a terminal; elsewhere a line when something else is waited for, or every 10 s."""

    def __init__(self, console: Console, every_s: float = 10.0) -> None:
        self._console, self._every_s = console, every_s
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._said, self._said_s = "", float("-inf")

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, view: View) -> None:
        """Bring the panel up to date."""
        if self._live:
            self._live.update(render(view), refresh=True)
            return
        # What is waited for within a step, and how far a stage has come, change all the time: that is no news.
        subject = view.stage.partition(":")[0] or (waits_for(view) if not view.news.steps else "steps")
        if subject != self._said or view.elapsed_s >= self._said_s + self._every_s:
            self._said, self._said_s = subject, view.elapsed_s
            self.note(line(view))

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
