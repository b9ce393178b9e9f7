"""Damaged input by the thousand: ``python -m tests.fuzz --count 100000 --seed 0``. Exits with 1 if any was not."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz.campaign import campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = campaign(Path(folder), asked.count, asked.seed)
    for name, counts in results.items():
        print(f"{name:20}", dict(sorted(counts.items())))
    total = sum(results.values(), Counter[str]())
    print(f"{'all':20}", dict(sorted(total.items())))
    return 1 if total.keys() - {"taken", "refused"} else 0


if __name__ == "__main__":
    sys.exit(main())
