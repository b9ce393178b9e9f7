"""What a dead process is quoted with."""

import pytest

from lorabridge.bridge.run.processes import MOST_RESTARTS, RESTARTS_WITHIN_S, last_words, may_restart

OWN = "lorabridge: run: seed is 1 here and 0 at the trainer. Use the trainer's configuration here"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", ""),
        ("loading\n\nstill loading\n   \n", "still loading"),
        (f"warming up\n{OWN}\nresource tracker: bye\n", OWN.removeprefix("lorabridge: ")),
        ('Traceback:\n  File "a.py"\nValueError: no such rank\nbye\n', "ValueError: no such rank"),
        ("\x1b[31mtorch.OutOfMemoryError: no memory\x1b[0m\n", "torch.OutOfMemoryError: no memory"),
        (
            "(EngineCore pid=7) ERROR 10:12 KeyError: 'x'\nnoise\nRuntimeError: Engine core failed. See root cause\n",
            "(EngineCore pid=7) ERROR 10:12 KeyError: 'x' / RuntimeError: Engine core failed. See root cause",
        ),
        ("OSError: once\nOSError: once\n", "OSError: once"),
        ("ValueError: " + "x" * 1000, "ValueError: " + "x" * 288),
    ],
)
def test_the_lines_that_say_why(output: str, words: str) -> None:
    assert last_words(output) == words


def test_what_is_killed_time_after_time_is_given_up_and_what_is_killed_now_and_then_is_not() -> None:
    often = [float(at) for at in range(MOST_RESTARTS)]
    assert not may_restart(137, often, now=20.0)
    assert may_restart(137, often[1:], now=20.0)
    assert may_restart(137, often, now=RESTARTS_WITHIN_S)  # the first has been forgotten by then
    assert may_restart(137, [at * 60 for at in often] * 4, now=600.0 + RESTARTS_WITHIN_S)


def test_what_ended_by_itself_is_not_started_again() -> None:
    assert [code for code in (0, 1, 3, 128, 129, 137, 143) if may_restart(code, [], now=0.0)] == [129, 137, 143]
