"""Seeded damage to bytes and to values. Nothing here knows what it damages."""

from __future__ import annotations

from random import Random
from typing import Any

_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.5, 1e308, 1e-320, "", "x", "\0", "../..",
    "\u00b2", "\u202e", "x" * 300, "(", "sha256:", [], {}, [None], {"": None}, [[[[]]]], {"schema": 1}, [0] * 300,
)  # fmt: skip
_SPLICES = (
    b"", b"\0", b"\xff" * 8, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\x91" * 5000, b"[" * 5000, b'{"a":' * 5000, b"\xed\xa0\x80", b"1e999", b"9" * 5000, b"\\ud800", b"NaN",
)  # fmt: skip


def bytes_of(body: bytes, random: Random) -> bytes:
    """``body`` after one to three of: flipped bit, cut, insertion, repeated slice, swapped slices, huge length."""
    changed = bytearray(body)
    for _ in range(random.randint(1, 3)):
        at, end = sorted(random.randint(0, len(changed)) for _ in range(2))
        match random.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                del changed[at if random.random() < 0.5 else end :]
            case 2:
                changed[at:at] = random.choice(_SPLICES)
            case 3:
                changed[at:at] = changed[at:end]
            case 4:
                changed[at:] = changed[end:] + changed[at:end]
            case _:
                width = random.choice((1, 2, 4, 8))
                changed[at : at + width] = random.choice((b"\xff", b"\x7f", b"\0")) * width
    return bytes(changed)


def value_of(value: Any, random: Random) -> Any:
    """``value`` (of what JSON holds) with one of its parts, at any depth, missing, swapped, doubled, renamed or odd."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        return _in_table(dict(value), random)
    if isinstance(value, list) and value and random.random() < 0.9:
        items = list(value)
        at = random.randrange(len(items))
        match random.randrange(6):
            case 0:
                del items[at]
            case 1:
                items.append(items[at])
            case _:
                items[at] = value_of(items[at], random)
        return items
    return random.choice(_ODD)


def _in_table(table: dict[str, Any], random: Random) -> dict[str, Any]:
    name, other = random.choice(list(table)), random.choice(list(table))
    match random.randrange(8):
        case 0:
            del table[name]
        case 1:
            table[name], table[other] = table[other], table[name]
        case 2:
            table[random.choice(("", "x", name.upper(), name + "\0"))] = table.pop(name)
        case _:
            table[name] = value_of(table[name], random)
    return table
