"""Which modules a PEFT configuration means, and what it gives each: PEFT's own rules, on names alone.

The rules are those of ``check_target_module_exists`` (peft/tuners/tuners_utils.py) and ``get_pattern_key``
(peft/utils/other.py). vLLM reads the patterns in the same way (``PEFTHelper.get_rank_and_scaling``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from lorabridge.bridge.errors import AdapterCorrupt, AdapterUnservable

ALL_LINEAR = "all-linear"
_LAYER = r".*?\.[^.]*\.(\d+)\."
_SAVE_AGAIN = "Save the adapter again"


def targeted(config: dict[str, Any], modules: Iterable[str]) -> set[str]:
    """Those of ``modules`` that ``target_modules`` means, less what the configuration excludes.

    Raises:
        AdapterCorrupt: a field of the wrong type, or a pattern that is no regular expression.
    """
    targets: Any = config.get("target_modules")
    excluded = config.get("exclude_modules")
    found = {m for m in modules if _names(targets, m, "target_modules")}
    if excluded:
        found = {m for m in found if not _names(excluded, m, "exclude_modules")}
    layers = config.get("layers_to_transform")
    # By identity with an empty list, as PEFT does: layer 0 is a layer. A regular expression says the layers itself.
    if layers is None or layers == [] or isinstance(targets, str):
        return found
    wanted = _list_of(int, layers, "layers_to_transform")
    parents = _list_of(str, config.get("layers_pattern") or [], "layers_pattern")
    return {m for m in found if m in targets or _layer(m, parents) in wanted}  # a whole name is meant in any layer


def value_for(module: str, config: dict[str, Any], field: Literal["rank_pattern", "alpha_pattern"], usual: Any) -> Any:
    """What a pattern gives a module: the value of the key that matches the end of its name, else ``usual``.

    Raises:
        AdapterUnservable: two keys match and give different values. In PEFT the first one wins; the canonical
            configuration, which is what a digest covers and a server reads, keeps no order.
        AdapterCorrupt: a key that is no regular expression.
    """
    table = config.get(field) or {}
    hits = [key for key in table if _matches(rf"(.*\.)?({key})$", module, field, end=False)]
    if not hits:
        return usual
    for other in hits[1:]:
        if table[other] != table[hits[0]]:
            raise AdapterUnservable(
                f"{field} gives {module} both {table[hits[0]]} (by {hits[0]!r}) and {table[other]} (by {other!r}), and "
                "the order of its keys is not kept",
                action="Write keys of which one alone matches each module",
            )
    return table[hits[0]]


def _names(targets: Any, module: str, field: str) -> bool:
    """A list holds ends of names, a string is a regular expression over the whole name."""
    if isinstance(targets, str):
        return targets.lower() == ALL_LINEAR or _matches(targets, module, field, end=True)
    return any(module == end or module.endswith(f".{end}") for end in _list_of(str, targets, field))


def _layer(module: str, parents: list[str]) -> int | None:
    """The number of the layer that a module is in, by the first numbered part of its name."""
    for pattern in [rf"(?:^|.*?\.){parent}\.(\d+)\." for parent in parents] or [_LAYER]:
        try:
            if found := re.match(pattern, module):
                return int(found[1])
        except re.error as error:
            raise AdapterCorrupt(f"layers_pattern {pattern!r}: {error}", action=_SAVE_AGAIN) from error
    return None


def _matches(pattern: str, module: str, field: str, *, end: bool) -> bool:
    try:
        return (re.fullmatch if end else re.match)(pattern, module) is not None
    except re.error as error:
        raise AdapterCorrupt(f"{field} {pattern!r}: {error}", action=_SAVE_AGAIN) from error


def _list_of(kind: type, value: Any, field: str) -> list[Any]:
    """One value, or several, all of a kind."""
    several = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    for one in several:
        if type(one) is not kind:
            raise AdapterCorrupt(f"{field} holds {one!r}, not {kind.__name__}", action=_SAVE_AGAIN)
    return several
