"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorabridge.bridge.errors import ConfigError
from lorabridge.bridge.settings import Settings, load

Config = Annotated[Path | None, typer.Option("--config", "-c", help="The run's TOML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override one key of the file. Repeatable.", show_default=False
    ),
]
RunDir = Annotated[Path, typer.Option("--run", help="Folder of the run, such as runs/demo.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on the last line, for programs.")]


def settings_of(run: Path, overrides: list[str] | None = None) -> Settings:
    """The resolved configuration that a run left in its folder.

    Raises:
        ConfigError: not the folder of a run.
    """
    file = run / "config.toml"
    if not file.is_file():
        raise ConfigError(
            f"{run} is not the folder of a run (no config.toml)", action="Give the run's folder, such as runs/demo"
        )
    return load(file, overrides or ())
