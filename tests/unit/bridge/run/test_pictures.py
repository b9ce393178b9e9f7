"""The pictures exist and are pictures; what they look like was looked at."""

from pathlib import Path

import pytest

from lorabridge.bridge.events import Consumed
from lorabridge.bridge.run.pictures import draw, smoothed


def step(number: int) -> Consumed:
    return Consumed(
        policy="sort", step=number, trajectories=("a",), tokens=10, lag_total=20, lag_max=3, lag_s=1, reward=0.5
    )


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_both_pictures(tmp_path: Path, steps: int) -> None:
    pytest.importorskip("matplotlib")
    draw([step(number) for number in range(steps)], "demo", tmp_path)
    for name in ("reward.png", "lag.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_no_step_no_picture(tmp_path: Path) -> None:
    draw([], "demo", tmp_path)
    assert not list(tmp_path.iterdir())


def test_smoothing_takes_fewer_neighbours_at_the_ends() -> None:
    assert smoothed([1.0, 2.0, 3.0, 4.0], 1) == [1.5, 2.0, 3.0, 3.5]
    assert smoothed([0.0, 3.0, 0.0], 5) == [1.0, 1.0, 1.0]
