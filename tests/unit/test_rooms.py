"""trainer -> bridge <- rollout, light commands, short files. What is checked here holds for files yet to be written."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorabridge.bridge import settings

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("bridge", "trainer", "rollout")
SOURCES = sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
HEAVY = ("torch", "vllm", "transformers", "trl", "peft")


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and under TYPE_CHECKING as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide which room is meant"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("room", "closed"), [("bridge", ("trainer", "rollout")), ("trainer", ("rollout",)), ("rollout", ("trainer",))]
)
def test_a_room_does_not_import_what_is_closed_to_it(room: str, closed: tuple[str, ...]) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in SOURCES
        if file.is_relative_to(ROOT / room)
        for name in imports(file)
        for other in closed
        if name == f"lorabridge.{other}" or name.startswith(f"lorabridge.{other}.")
    ]
    assert not wrong


def test_no_room_is_imported_by_its_folder_name() -> None:
    wrong = [(str(file), name) for file in SOURCES for name in imports(file) if name.split(".")[0] in ROOMS]
    assert not wrong


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after ``code``."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_no_module_of_the_bridge_loads_a_heavy_package_when_it_is_imported() -> None:
    modules = []
    for file in SOURCES:
        if file.is_relative_to(ROOT / "bridge"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            modules.append(".".join(("lorabridge", *parts)).removesuffix(".__init__"))
    assert "lorabridge.bridge.store.local" in modules
    loaded = loaded_by("\n".join(f"import {module}" for module in modules if not module.endswith("__main__")))
    assert "msgspec" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_help_loads_no_heavy_package() -> None:
    loaded = loaded_by("from lorabridge.bridge.cli import run\nassert run(['--help']) == 0")
    assert "typer" in loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_are_short(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than 60 lines"


def test_every_configuration_in_the_repository_is_readable() -> None:
    for file in sorted((ROOT / "configs").glob("**/*.toml")):
        settings.load(file)
