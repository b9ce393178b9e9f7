"""Is every token what its span says? ``python -m tests.benchmarks.exactness --tokens 1000000``.

Servers of a tiny model, a swap every second on each between two adjacent versions: in flight with KV kept, in flight
with KV dropped, and pinned; half of the prompts go on from an earlier completion. Every sampled token is recomputed
under the adapter that its span names, chained where KV was kept.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.replay.audit import AuditReport, audit
from lorabridge.bridge.replay.scorer import Scorer
from lorabridge.bridge.residency import KvMode, SwapMode
from lorabridge.bridge.sections import GeneratorsSection, ModelSection, PolicySection, RunSection, StoreSection
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.stream.embedded import free_ports
from lorabridge.bridge.trajectory import Turn
from tests.benchmarks.table import Goal, conclude
from tests.e2e.models import RANK, commit, make_adapter, make_base
from tests.e2e.server import Server, running
from tests.e2e.traffic import sample_under_swaps, trajectories_of

_PART = 25_000  # tokens sampled before they are audited, so that memory stays bounded


class Way(NamedTuple):
    """How the servers swap; a policy is swapped in one mode for as long as it is served, so each mode has its own."""

    name: str
    policy: str
    mode: SwapMode
    kv: KvMode | None


_WAYS = (
    Way("in flight, kv keep", "pair", "in_flight", "keep"),
    Way("in flight, kv recompute", "pair", "in_flight", "recompute"),
    Way("pinned", "pinned", "pinned", None),
)


class Tally:
    """What the audits of one mode add up to.

    ``cut`` counts turns that were preempted: where KV is kept, a later span that begins afresh says so. Where a swap
    drops KV every span does, and it cannot be told.
    """

    def __init__(self) -> None:
        self.reports: list[AuditReport] = []
        self.several = self.swaps = self.cut = 0
        self.sampling_s = self.auditing_s = 0.0

    def sum(self, name: str) -> int:
        return int(sum(getattr(report, name) for report in self.reports))


async def sample(
    servers: Sequence[Server], pair: Sequence[Manifest], way: Way, tokens: int
) -> tuple[list[Turn], int]:  # fmt: skip
    """Turns from every server at once, and the swaps of all of them."""
    parts = await asyncio.gather(
        *(sample_under_swaps(each, pair, way.kv, tokens // len(servers), way.mode) for each in servers)
    )
    return [turn for turns, _ in parts for turn in turns], sum(swaps for _, swaps in parts)


def measure(
    servers: Sequence[Server], pairs: Mapping[str, Sequence[Manifest]], base: Path, store: Store, tokens: int
) -> dict[Way, Tally]:  # fmt: skip
    console, scorer, digest = Console(stderr=True), Scorer(base, store), fingerprint(base).digest
    found = {way: Tally() for way in _WAYS}
    while any(tally.sum("tokens") < tokens / len(_WAYS) for tally in found.values()):
        for way, tally in found.items():
            began = time.perf_counter()
            turns, swaps = asyncio.run(sample(servers, pairs[way.policy], way, min(_PART, tokens // len(_WAYS))))
            sampled = time.perf_counter()
            tally.reports.append(audit(trajectories_of(turns, digest), store, scorer))
            tally.sampling_s += sampled - began
            tally.auditing_s += time.perf_counter() - sampled
            tally.swaps += swaps
            tally.several += sum(len(turn.spans) > 1 for turn in turns)
            tally.cut += sum(way.kv == "keep" and any(s.kv == "fresh" for s in turn.spans[1:]) for turn in turns)
            console.print(
                f"{way.name}: {tally.sum('tokens'):,} tokens, {tally.sum('refuted')} refuted", highlight=False
            )
    return found


def rows_of(found: dict[Way, Tally]) -> tuple[list[dict[str, object]], list[Goal]]:
    rows: list[dict[str, object]] = []
    for way, tally in found.items():
        tokens = tally.sum("tokens")
        row: dict[str, object] = {"mode": way.name, "samples": tally.sum("trajectories")}
        row |= {"several spans": tally.several, "preempted": tally.cut, "swaps": tally.swaps, "tokens": tokens}
        row |= {name: tally.sum(name) for name in ("refuted", "unverifiable")}
        row |= {"discriminated": tally.sum("discriminated") / tokens}
        row |= {"max error": f"{max(report.max_error or 0.0 for report in tally.reports):.1e}"}
        rows.append(row | {"sampled/s": tokens / tally.sampling_s, "audited/s": tokens / tally.auditing_s})
    wrong = ("refuted", "unverifiable")
    return rows, [Goal(name=name, value=sum(t.sum(name) for t in found.values()), most=0) for name in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.benchmarks.exactness", description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="in all, a third of them in each way to swap")
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exactness-") as name, ExitStack() as stack:
        folder = Path(name)
        base, port = make_base(folder / "base"), free_ports(2 * given.generators)
        store = open_store(str(folder / "store"))
        adapters = [make_adapter(base, seed) for seed in (1, 2)]
        pairs = {way.policy: commit(store, base, way.policy, adapters) for way in _WAYS[1:]}
        servers = [
            stack.enter_context(running(Settings(
                run=RunSection(id="exactness", dir=folder / f"server-{place}"),
                model=ModelSection(path=str(base)),
                policy=PolicySection(name="pair", rank=RANK),
                store=StoreSection(url=str(folder / "store")),
                generators=GeneratorsSection(
                    port=port + 2 * place, control_port=port + 2 * place + 1, max_model_len=1024, max_num_seqs=32,
                    threads=1, max_loras=4,
                ),
            )))
            for place in range(given.generators)
        ]  # fmt: skip
        rows, goals = rows_of(measure(servers, pairs, base, store, given.tokens))
    return conclude("Every token under a swap a second", rows, goals, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
