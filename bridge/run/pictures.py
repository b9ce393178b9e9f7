"""``reward.png`` and ``lag.png``: how a run went, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorabridge.bridge.events import Consumed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _BLUE, _PALE, _ORANGE = "#333333", "#1f5fa8", "#a9c5e6", "#d9822b"


def draw(steps: Sequence[Consumed], run: str, folder: Path) -> None:
    """Write both pictures into ``folder``. Nothing is drawn of a run without a step."""
    if not steps:
        return
    numbers = [step.step + 1 for step in steps]
    _reward(numbers, [step.reward for step in steps], run, folder / "reward.png")
    means = [step.lag_total / step.tokens if step.tokens else 0.0 for step in steps]
    _lag(numbers, means, [step.lag_max for step in steps], run, folder / "lag.png")


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and up to ``reach`` neighbours on either side."""
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _reward(numbers: Sequence[int], rewards: Sequence[float], run: str, file: Path) -> None:
    figure, axes = _page(f"Reward · {run}", "mean reward of the step's samples")
    axes.plot(numbers, rewards, "o", markersize=3.5, color=_PALE, label="each step")
    reach = max(1, len(rewards) // 15)
    axes.plot(numbers, smoothed(rewards, reach), color=_BLUE, linewidth=2, label=f"mean of {2 * reach + 1} steps")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(file)


def _lag(numbers: Sequence[int], means: Sequence[float], largest: Sequence[int], run: str, file: Path) -> None:
    figure, axes = _page(f"Off-policy lag · {run}", "optimizer steps from sampled to trained")
    axes.fill_between(numbers, means, largest, step="mid", color=_ORANGE, alpha=0.12, linewidth=0)
    axes.step(numbers, largest, where="mid", color=_ORANGE, linewidth=1.2, label="oldest token of the step")
    axes.plot(numbers, means, color=_BLUE, linewidth=2, label="mean over the step's tokens")
    axes.set_ylim(0, max(1, *largest) * 1.2)
    axes.legend(loc="upper right", frameon=False, ncols=2)
    figure.savefig(file)


def _page(title: str, y_label: str) -> tuple[Any, Axes]:
    """An empty figure, drawn without a display and without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold")
    axes.set_xlabel("optimizer step", color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_INK)
    return figure, axes
