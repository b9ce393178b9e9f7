"""``lorabridge``: finds every room's commands by entry point, and turns our errors into a sentence and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from lorabridge.bridge.errors import BridgeError, ConfigError
from lorabridge.bridge.stopping import end_at_once

if TYPE_CHECKING:
    import typer

_EPILOG = (
    "Exit codes: 0 yes or done, 1 no, 2 usage or configuration, 3 Redis, 4 adapter store, 5 generator, 6 adapter or "
    "model, 7 ledger, 8 differs from the run, 9 machine, 10 unreadable bytes, 130 interrupted, 137 vLLM was killed, "
    "143 ended by SIGTERM."
)

_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def build() -> typer.Typer:
    """The program, with every installed command."""
    import typer

    app = typer.Typer(
        name="lorabridge",
        help="Versioned LoRA adapters from a TRL trainer to vLLM, and proof of which weights sampled every token.",
        epilog=_EPILOG,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    for entry in sorted(entry_points(group="lorabridge.commands"), key=lambda entry: entry.name):
        try:
            command: Any = entry.load()
        except ImportError as error:
            app.command(entry.name, context_settings=_ANYTHING)(_unavailable(entry.name, error))
            continue
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)
    return app


def _unavailable(name: str, error: ImportError) -> Callable[[], None]:
    """A command whose room cannot be imported says so when it is called; the others go on working."""

    def unavailable() -> None:
        raise ConfigError(f"`{name}` cannot be loaded: {error}", action="Install what it needs: see Install in README")

    unavailable.__doc__ = f"Not available here: {error}."
    return unavailable


def main(args: list[str] | None = None) -> None:
    """Run the program and exit with a documented code; a traceback is shown only with ``LORABRIDGE_DEBUG=1``.

    Until a command has something to give back, a signal ends it at once (``lorabridge.bridge.stopping``); so nothing
    large is imported before that is said.
    """
    end_at_once()
    sys.exit(run(args))


def run(args: list[str] | None = None) -> int:
    """Run the program; its exit code."""
    import typer

    # click's ClickException: typer carries its own copy of click from 0.2x on, and used click itself before.
    usage: Any = typer.BadParameter.__mro__[2]
    try:
        code = build()(args=args, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BridgeError as error:
        return _fail(error.diagnostics(), error.exit_code)
    except usage as error:
        error.show()
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except typer.Exit as error:
        return error.exit_code
    except BrokenPipeError:
        return 0
    except Exception as error:
        return _fail(f"unexpected: {type(error).__name__}: {error}. Run it with LORABRIDGE_DEBUG=1 and report it", 1)


def _fail(sentence: str, code: int) -> int:
    if os.environ.get("LORABRIDGE_DEBUG") == "1":
        traceback.print_exc()
    print(f"lorabridge: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
