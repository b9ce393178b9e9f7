"""So many mutations of every target, each from a seed of its own, so that any one can be done again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.targets import targets


def campaign(folder: Path, count: int, seed: int) -> dict[str, Counter[str]]:
    """By target: how many were ``taken`` and ``refused``, and what else was raised, with one seed that does it."""
    results: dict[str, Counter[str]] = {}
    with targets(folder) as every:
        for place, (name, target) in enumerate(every.items()):
            results[name] = counts = Counter[str]()
            first: dict[str, str] = {}
            for number in range(count // len(every) + (place < count % len(every))):
                try:
                    counts[target(Random(f"{seed}/{name}/{number}"))] += 1
                except Exception as error:
                    kind = type(error).__name__
                    counts[first.setdefault(kind, f"{kind} at {seed}/{name}/{number}: {error!s:.200}")] += 1
    return results
