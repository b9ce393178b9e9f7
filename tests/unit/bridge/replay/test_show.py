"""What stands on the terminal."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from lorabridge.bridge.replay.audit import audit, verify
from lorabridge.bridge.replay.show import audit_view, decoder, trajectory_view, verification_view, visible

if TYPE_CHECKING:
    from tests.unit.bridge.replay.conftest import Case


def rendered(view: RenderableType) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


@given(st.text())
def test_no_control_character_reaches_the_terminal(text: str) -> None:
    assert all(c == "\n" or c.isprintable() for c in visible(text))


def test_text_that_can_be_seen_is_left_alone() -> None:
    assert visible("a ü 字 🙂\nb") == "a ü 字 🙂\nb"
    assert visible("\x1b[31m\x07") == "\\x1b[31m\\x07"


def test_a_trajectory_shows_its_spans(case: Case, tmp_path: Path) -> None:
    trajectory = case.trajectory(case.turn((2, 2, "fresh"), (3, 1, "kept")))
    text = rendered(trajectory_view(trajectory, decoder(tmp_path)))
    assert "[7][8][1][2][3]" in text
    assert f"policy 3 {case.digests[2][7:19]} tokens 2–3, kept KV" in text
    assert "run/3.1/0" in text
    hostile = case.trajectory(case.turn((2, 1, "fresh")))
    assert "\x1b" not in rendered(trajectory_view(hostile, lambda ids: "\x1b]0;owned\x07"))


def test_a_verification_shows_every_span_with_its_verdict(case: Case) -> None:
    shutil.rmtree(case.store.root / "adapters" / "sha256" / case.digests[3][7:])
    trajectory = case.trajectory(case.turn((2, 2, "fresh"), (4, 1, "kept")))
    text = rendered(verification_view(verify([trajectory], case.store, case.scorer)))
    assert "confirmed" in text
    assert "unverifiable" in text
    assert f"{case.digests[3]} is not in" in text


def test_an_audit_says_its_figures_and_whether_it_has_power(case: Case) -> None:
    text = rendered(audit_view(audit([case.trajectory(case.turn((2, 4, "fresh")))], case.store, case.scorer)))
    assert "1 trajectory, 4 sampled tokens" in text
    assert "4 tokens (100.0%) could tell versions apart; largest error 0.0e+00 nats" in text
    assert "no power" not in text
    for version in (1, 3):
        shutil.rmtree(case.store.root / "adapters" / "sha256" / case.digests[version - 1][7:])
    blind = audit([case.trajectory(case.turn((2, 4, "fresh")))], case.store, case.scorer)
    assert "no power" in rendered(audit_view(blind))
    assert "0 sampled tokens" in rendered(audit_view(audit([], case.store, case.scorer)))
