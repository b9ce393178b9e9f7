"""A configuration as TOML, for the run that it is the record of. The standard library only reads TOML."""

from __future__ import annotations

import json

from lorabridge.bridge.settings import Settings


def to_toml(settings: Settings) -> str:
    """The resolved configuration as TOML, every key written out (None is left out, as TOML has no null)."""
    lines: list[str] = []
    for section, values in settings.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    # JSON's strings, numbers and booleans are TOML's, but for surrogate pairs and the one control character it leaves.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
