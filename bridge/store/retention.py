"""Which adapters may leave the store, and their removal (law 7: nothing in use is removed).

``[store] keep = N`` bounds the store: the adapters of a line's newest N versions stay, and older ones go unless
something still uses them. 0, the default, keeps all of them: an adapter of 100 MB at every step is a terabyte after
10,000 steps, but it is the one thing that cannot be made again. Once it is gone, no token that it sampled can be
recomputed (the audit says ``unverifiable``, and that retention removed it), and only the user can say that this is
acceptable. A disk that fills up stops the run with a sentence; evidence that is missing is noticed when it is needed.

So N is an audit window in versions: samples of the newest N can be recomputed, older ones are on record only. Choose it
larger than ``[lag] max``, and by how far you want to look back, or roll back.

What stays, however old: what any line's newest N versions name, what a live generator serves, what the caller protects
(a checkpoint, Redis's head), and what no version of the line names, since its commit may be on its way. Every manifest
stays: the line is the record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from lorabridge.bridge.store import Store


def removable(present: Collection[str], line: Mapping[int, str], keep: int, in_use: Collection[str]) -> set[str]:
    """Digests that may go. Pure.

    Args:
        present: digests in the store.
        line: digests by version. Older ones may be left out; what only they name stays.
        keep: newest versions whose adapters stay; 0 keeps all.
        in_use: digests that stay for another reason.
    """
    if keep < 1:
        return set()
    return (set(present) & set(line.values())) - newest_digests(line, keep) - set(in_use)


def newest_digests(line: Mapping[int, str], keep: int) -> set[str]:
    """What the newest ``keep`` versions of a line name."""
    return {line[version] for version in sorted(line)[-keep:]}


class Retention:
    """Keeps one policy's adapters to their bound.

    It remembers what it has read of the lines: a run uses one, and calls ``apply`` after each commit, in the thread
    that publishes.

    Args:
        store: one that can be listed; not an ``http://`` one.
        policy: whose older versions may go.
        keep: newest versions of each line of the store whose adapters stay; 0 keeps all.
        in_use: digests that must stay whatever their age, asked anew each time
            (``lorabridge.bridge.store.in_use.Residents.digests`` for what generators serve).
    """

    def __init__(self, store: Store, policy: str, keep: int, in_use: Callable[[], Collection[str]]) -> None:
        self._store, self._policy, self._keep, self._in_use = store, policy, keep, in_use
        self._lines: dict[str, dict[int, str]] = {}

    def due(self) -> dict[str, int]:
        """Bytes of every adapter that may go now, by digest."""
        if self._keep < 1:
            return {}
        present, spared = self._store.adapters(), self._spared()
        self._look_back(present.keys() - spared)
        gone = removable(present, self._lines.get(self._policy, {}), self._keep, spared)
        return {digest: present[digest] for digest in sorted(gone)}

    def apply(self) -> list[str]:
        """Remove what may go; the digests that went. Raises ``StoreError``."""
        due = self.due()
        return self._store.remove(due, self._spared) if due else []

    def _spared(self) -> set[str]:
        """Digests that must stay, by what the lines hold now."""
        spared = set(self._in_use())
        for policy in self._store.policies():
            newest = self._store.newest(policy)
            if newest is not None:
                self._lines.setdefault(policy, {})[newest.version] = newest.digest
                for version in range(max(1, newest.version - self._keep + 1), newest.version):
                    self._read(policy, version)
                spared |= newest_digests(self._lines[policy], self._keep)
        return spared

    def _look_back(self, digests: Collection[str]) -> None:
        """Read the policy's line backwards until it has named every digest, or there is nothing older."""
        line = self._lines.get(self._policy, {})
        for version in range(max(line, default=0), 0, -1):
            if set(digests) <= set(line.values()):
                return
            self._read(self._policy, version)

    def _read(self, policy: str, version: int) -> None:
        line = self._lines[policy]
        if version not in line:
            line[version] = self._store.manifest(policy, version).digest
