"""What a dead process is quoted with."""

import pytest

from lorabridge.bridge.run.processes import MOST_RESTARTS, last_words, may_restart

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


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(137, 0, True), (139, 5, True), (137, MOST_RESTARTS, False), (1, 0, False), (3, 0, False), (0, 0, False)],
)
def test_only_what_a_signal_ended_is_started_again_and_not_for_ever(code: int, restarts: int, again: bool) -> None:
    assert may_restart(code, restarts) is again
