"""The panel's words and pictures, from views made by hand."""

import io

import msgspec
import pytest
from rich.console import Console

from lorabridge.bridge.run.news import Counts, News
from lorabridge.bridge.run.panel import Display, ProcessView, View, clock, line, render, served, sparkline, waits_for

NEWS = News(policy="sort")
STARTED = View(
    run="demo", elapsed_s=5, max_steps=60, groups_per_step=8, stage="", healthy=False, trouble="", news=NEWS,
    processes=(ProcessView("serve", "loading"), ProcessView("train", "running")),
)  # fmt: skip
GOING = msgspec.structs.replace(
    STARTED,
    elapsed_s=85,
    healthy=True,
    news=News(
        policy="sort", joined=True, head=35, serves={"a": 34}, steps=34, rewards=(0.5, 0.75), lags=(0.0, 2.25),
        lag_max=6, recent=((0, 64, 1000), (1000, 64, 1500)), counts=Counts(leased=26, delivered=2),
    ),
)  # fmt: skip


def with_news(view: View, **values: object) -> View:
    return msgspec.structs.replace(view, news=msgspec.structs.replace(view.news, **values))


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (STARTED, "the server to load the model, the trainer to import torch"),
        (with_news(STARTED, joined=True), "the server to load the model"),
        (msgspec.structs.replace(STARTED, healthy=True), "the trainer to import torch"),
        (with_news(GOING, head=0), "the trainer to publish version 1"),
        (with_news(GOING, head=1, serves={}), "the worker to have version 1 served"),
        (GOING, "rollouts: 2 of 8 groups of step 35"),
        (with_news(GOING, counts=Counts(leased=10, delivered=18)), "the trainer to take step 35"),
        (with_news(GOING, steps=60), "the trainer to finish"),
        (msgspec.structs.replace(GOING, trouble="gone"), "Redis, trying again: gone"),
        (msgspec.structs.replace(GOING, stage="the audit"), "the audit"),
    ],
)
def test_one_line_says_what_it_waits_for(view: View, words: str) -> None:
    assert waits_for(view) == words


def text(view: View) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_panel_shows_the_loop() -> None:
    shown = text(GOING)
    for part in (
        "◌ serve loading", "● train ", "34 of 60", "about 0:26 to go", "35 published, 34 served", "0.750",
        "2.2 steps at the last step",
        "6 at most", "64 samples/s, 1,500 tokens/s", "rollouts: 2 of 8 groups of step 35", "1:25",
    ):  # fmt: skip
        assert part in shown
    assert "dropped" not in shown


def test_the_panel_shows_what_was_lost() -> None:
    assert "3 dropped, 1 quarantined (last: no record)" in text(
        with_news(GOING, dropped=3, quarantined=1, trouble="no record")
    )


def test_the_panel_of_a_run_that_just_began_has_dashes() -> None:
    assert text(STARTED).count("–") >= 4


def test_markup_in_what_others_wrote_is_shown_as_it_is() -> None:
    assert "Redis, trying again: [/red] lost" in text(msgspec.structs.replace(GOING, trouble="[/red] lost"))


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([0.5], "▁"),
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0], "▁█▁█"),
    ],
)
def test_a_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values, 4) == bars


def test_versions_served_by_several_generators_are_a_range() -> None:
    assert served(msgspec.structs.replace(NEWS, serves={"a": 4, "b": 7, "c": 5})) == "4–7"
    assert served(msgspec.structs.replace(NEWS, serves={"a": 4, "b": 4})) == "4"
    assert served(NEWS) == "–"


def test_a_line_for_where_there_is_no_terminal() -> None:
    assert line(GOING) == ("1:25  step 34/60, version 35 (34 served), reward 0.750, lag 2.2 (at most 6), 64 samples/s")
    assert line(msgspec.structs.replace(GOING, stage="the audit")) == "1:25  waits for the audit"


def test_a_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.9, 60, 3725)] == ["0:00", "0:59", "1:00", "62:05"]


def test_without_a_terminal_only_news_is_printed() -> None:
    console = Console(file=io.StringIO())
    with Display(console, every_s=10) as display:
        display.show(STARTED)
        display.show(msgspec.structs.replace(STARTED, elapsed_s=6))
        display.show(with_news(STARTED, joined=True))
        display.show(GOING)
        display.show(with_news(msgspec.structs.replace(GOING, elapsed_s=88), steps=35))
        display.show(with_news(msgspec.structs.replace(GOING, elapsed_s=95), steps=36))
        display.show(msgspec.structs.replace(GOING, elapsed_s=96, stage="the audit"))
        display.note("[/b] stays")
    assert isinstance(console.file, io.StringIO)
    assert [said.split(",")[0] for said in console.file.getvalue().splitlines()] == [
        "0:05  waits for the server to load the model",
        "0:05  waits for the server to load the model",
        "1:25  step 34/60",
        "1:35  step 36/60",
        "1:36  waits for the audit",
        "[/b] stays",
    ]


def test_on_a_terminal_there_is_one_panel() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={})
    with Display(console) as display:
        display.show(STARTED)
        display.show(GOING)
    assert isinstance(console.file, io.StringIO)
    assert "34 of 60" in console.file.getvalue()
