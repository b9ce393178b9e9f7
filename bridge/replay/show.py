"""Trajectories and verdicts on a terminal. Whatever a model sampled is printed as text, never as control codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lorabridge.bridge.replay.audit import LISTED, AuditReport, SpanReport
from lorabridge.bridge.replay.verdict import TOLERANCES, Verdict
from lorabridge.bridge.trajectory import Trajectory, Turn

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""

_VERSION_STYLES = ("cyan", "magenta", "yellow", "blue", "green", "bright_red")
_VERDICT_STYLES = {
    Verdict.CONFIRMED: "green",
    Verdict.INDISTINCT: "yellow",
    Verdict.REFUTED: "bold red",
    Verdict.UNVERIFIABLE: "red",
}
_MEANINGS = {
    Verdict.CONFIRMED: "the adapter that the token names explains it, and no neighbouring version does",
    Verdict.INDISTINCT: "a neighbouring version explains it as well, or there is none",
    Verdict.REFUTED: "the adapter that the token names does not explain it",
    Verdict.UNVERIFIABLE: "it could not be recomputed",
}


def decoder(folder: Path | None) -> Decode:
    """How to read token ids: with the tokenizer in ``folder``, or as numbers if there is none that can be read."""
    if folder is None:
        return _numbers
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return _numbers
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _numbers
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def visible(text: str) -> str:
    """``text`` with every control character but a newline spelled out, so that a terminal obeys none of them."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def trajectory_view(trajectory: Trajectory, decode: Decode) -> RenderableType:
    """Everything about a trajectory: what is known of it, then each turn with its spans coloured by version."""
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(trajectory):
        facts.add_row(Text(name, style="dim"), Text(visible(value)))
    turns = [part for number, turn in enumerate(trajectory.turns) for part in _turn(number, turn, decode)]
    return Stack(facts, *turns)


def verification_view(reports: Sequence[SpanReport]) -> RenderableType:
    """One row per span: who it says sampled it, and what the audit says."""
    table = Table(box=None, pad_edge=False)
    for name in ("turn", "tokens", "version", "digest", "KV", "error", "told apart", "verdict"):
        table.add_column(name, justify="right" if name in ("turn", "error") else "left", no_wrap=True)
    reasons: dict[str, int] = {}
    for report in reports:
        span = report.span
        table.add_row(
            str(report.turn),
            f"{span.start}–{span.end}" if span else f"all {report.tokens}",
            f"{span.policy} {span.version}" if span else "",
            short(span.digest) if span else "",
            span.kv if span else "",
            _error(report.max_error),
            f"{report.discriminated} of {report.tokens}",
            Text(report.verdict.value, style=_VERDICT_STYLES[report.verdict]),
        )
        for reason, count in report.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return Stack(table, *_reasons(reasons))


def audit_view(report: AuditReport) -> RenderableType:
    """The audit in words."""
    noun = "trajectory" if report.trajectories == 1 else "trajectories"
    head = Text(f"{report.trajectories:,} {noun}, {report.tokens:,} sampled tokens")
    table = Table.grid(padding=(0, 2))
    for column in range(3):
        table.add_column(justify="right" if column in (1, 2) else "left")
    table.add_column()
    for verdict, meaning in _MEANINGS.items():
        count: int = getattr(report, verdict.value)
        style = _VERDICT_STYLES[verdict] if count else "dim"
        table.add_row(Text(verdict.value, style=style), f"{count:,}", _share(count, report.tokens), meaning)
    told = f"{report.discriminated:,} tokens ({_share(report.discriminated, report.tokens)}) could tell versions apart"
    allowed = " or ".join(f"{tolerance:.0e} for {dtype}" for dtype, tolerance in TOLERANCES.items())
    error = f"largest error {_error(report.max_error)} nats (allowed: {allowed})"
    parts: list[RenderableType] = [head, table, Text(f"{told}; {error}"), *_reasons(report.reasons)]
    if report.tokens and not report.discriminated:
        parts.append(Text("This audit has no power: it would have passed wrong labels too.", style="yellow"))
    if report.refuted_trajectories:
        parts.append(Text("Refuted: " + visible(", ".join(report.refuted_trajectories)), style="red"))
    return Stack(*parts)


def short(digest: str) -> str:
    """A digest as people compare it: its first twelve hexadecimal digits."""
    return visible(digest.removeprefix("sha256:")[:12])


def _facts(t: Trajectory) -> list[tuple[str, str]]:
    rewards = ", ".join(f"{name} {'none' if value is None else f'{value:.4g}'}" for name, value in t.rewards.items())
    return [
        ("trajectory", t.id),
        ("policy", f"{t.policy}, for {'training' if t.purpose == 'train' else 'evaluation'}"),
        ("reward", f"{t.reward:.4g} ({rewards}), advantage {t.advantage:.4g}"),
        ("generator", f"{t.generator}, instance {t.instance}, {t.dtype}, {t.logprobs_mode}"),
        ("sampling", f"temperature {t.sampling.temperature:g}, seed {t.seed}, {t.tokens} tokens"),
    ]


def _turn(number: int, turn: Turn, decode: Decode) -> list[RenderableType]:
    text = Text(visible(decode(turn.prompt_ids)), style="dim")
    legend = Text(f"\nturn {number} ({turn.finish_reason})")
    for span in turn.spans:
        style = _VERSION_STYLES[span.version % len(_VERSION_STYLES)]
        text.append(visible(decode(turn.token_ids[span.start : span.end])), style=f"not dim {style}")
        legend.append(f"  {visible(span.policy)} {span.version} {short(span.digest)}", style=style)
        legend.append(f" tokens {span.start}–{span.end}, {span.kv} KV")
    return [legend, text]


def _reasons(reasons: dict[str, int]) -> list[Text]:
    lines = [f"{count:,} tokens: {visible(reason)}" for reason, count in reasons.items()]
    if len(lines) > LISTED:
        lines[LISTED:] = [f"and {len(lines) - LISTED} reasons more"]
    return [Text(f"  {line}", style="dim") for line in lines]


def _share(count: int, of: int) -> str:
    return f"{100 * count / of:.1f}%" if of else "–"


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:.1e}"


def _numbers(ids: Sequence[int]) -> str:
    return "".join(f"[{each}]" for each in ids)
