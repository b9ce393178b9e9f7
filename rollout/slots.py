"""Which adapter sits in which slot of an engine, and what may leave. Pure: a value, and what can be asked of it.

Nothing with a request in flight leaves, nothing that is told to stay leaves, and of what may leave the least recently
used goes first. A victim leaves only after its successor is in, so a slot stays free for the next one to come: `spare`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Refusal = Literal["busy", "pinned"]
"""Why there is no room: every adapter that could leave has requests in flight, or every one is told to stay."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter in the engine.

    Attributes:
        name: what the engine calls it.
        digest: of its bytes.
        policies: that are served from it now; none once all of them have moved on, and then it leaves when it is idle.
        in_flight: requests that began on it and have not ended.
        pinned: it stays, idle or not, for as long as a policy is served from it.
    """

    name: str
    digest: str
    policies: frozenset[str] = frozenset()
    in_flight: int = 0
    pinned: bool = True

    @property
    def idle(self) -> bool:
        return self.in_flight == 0

    @property
    def superseded(self) -> bool:
        return not self.policies


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters of one engine, least recently used first.

    Args:
        capacity: how many the engine holds.
        spare: slots to be kept free by having what is not pinned leave.
    """

    capacity: int
    held: tuple[Slot, ...] = ()
    spare: int = 0

    def find(self, name: str) -> Slot | None:
        return next((slot for slot in self.held if slot.name == name), None)

    @property
    def digests(self) -> set[str]:
        return {slot.digest for slot in self.held}

    def without_superseded(self, but: str) -> Slots:
        """As if those had left, requests in flight or not; ``but`` stays."""
        return self._with(tuple(slot for slot in self.held if slot.name == but or not slot.superseded))

    def refusal(self, name: str) -> Refusal | None:
        """Why no adapter can be put in under ``name`` now; None if there is room, or it is in already."""
        if self.find(name) or len(self.held) < self.capacity:
            return None
        stays = all(slot.pinned and not slot.superseded for slot in self.held)
        return "pinned" if stays else "busy"

    def put(self, name: str, digest: str, *, pinned: bool = True) -> Slots:
        """With these bytes under ``name``; what was under it before keeps its policies and its requests.

        Raises:
            ValueError: there is no room; ask ``refusal`` first.
        """
        if self.refusal(name):
            raise ValueError(f"all {self.capacity} slots are taken")
        found = self.find(name)
        slot = msgspec.structs.replace(found, digest=digest) if found else Slot(name=name, digest=digest, pinned=pinned)
        return self._with((*self._but(name), slot))

    def serve(self, policy: str, name: str) -> Slots:
        """``policy`` is served from ``name`` from now on, and from no other slot."""

        def move(slot: Slot) -> Slot:
            others = slot.policies - {policy}
            return msgspec.structs.replace(slot, policies=others | {policy} if slot.name == name else others)

        return self._with(tuple(map(move, self.held)))

    def begin(self, name: str) -> Slots:
        """A request begins on it, and it is the most recently used."""
        return self._use(name, lambda slot: msgspec.structs.replace(slot, in_flight=slot.in_flight + 1), newest=True)

    def end(self, name: str) -> Slots:
        """A request of its has ended. One whose slot was taken out meanwhile has nothing to be taken from."""
        return self._use(
            name, lambda slot: msgspec.structs.replace(slot, in_flight=max(0, slot.in_flight - 1)), newest=False
        )

    def remove(self, name: str) -> Slots:
        return self._with(self._but(name))

    @property
    def leaving(self) -> tuple[Slot, ...]:
        """What is to leave now: every superseded one that is idle, and as many others as the spare slots need."""
        done = [slot for slot in self.held if slot.superseded and slot.idle]
        needed = len(self.held) - len(done) - (self.capacity - self.spare)
        may = [slot for slot in self.held if slot.idle and not slot.superseded and not slot.pinned]
        return (*done, *may[: max(0, needed)])

    def _use(self, name: str, change: Callable[[Slot], Slot], *, newest: bool) -> Slots:
        slot = self.find(name)
        if slot is None:
            return self
        if newest:
            return self._with((*self._but(name), change(slot)))
        return self._with(tuple(change(each) if each.name == name else each for each in self.held))

    def _but(self, name: str) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.held if slot.name != name)

    def _with(self, held: tuple[Slot, ...]) -> Slots:
        return msgspec.structs.replace(self, held=held)
