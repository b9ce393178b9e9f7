"""What happens in a run besides trajectories: one record per event, on the stream ``events``."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from redis.typing import EncodableT, FieldT

from lorabridge.bridge import codec
from lorabridge.bridge.canary import Judgement
from lorabridge.bridge.residency import Residency


class Resident(msgspec.Struct, frozen=True, kw_only=True, tag="resident"):
    """A generator began an epoch. ``swap_ms`` are the phases of its swap, by name, in milliseconds."""

    residency: Residency
    swap_ms: dict[str, float]


class Consumed(msgspec.Struct, frozen=True, kw_only=True, tag="consumed"):
    """An optimizer step trained on these trajectories.

    ``step`` counts the optimizer steps taken before it; ``lag_*`` are token-weighted optimizer steps, ``lag_s`` seconds
    from sampled to trained, ``reward`` the mean over the trajectories.
    """

    policy: str
    step: int
    trajectories: tuple[str, ...]
    tokens: int
    lag_total: int
    lag_max: int
    lag_s: float
    reward: float


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """Trajectories that were not trained on, and why."""

    policy: str
    trajectories: tuple[str, ...]
    reason: str


class Quarantine(msgspec.Struct, frozen=True, kw_only=True, tag="quarantine"):
    """A sample whose origin could not be established, or a generator that could not prove what it serves."""

    subject: str
    reason: str


class Published(msgspec.Struct, frozen=True, kw_only=True, tag="published"):
    """Phases of one publish, in milliseconds; ``blocked`` is how long the training thread was held."""

    policy: str
    version: int
    digest: str
    step: int
    phases_ms: dict[str, float]


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag="judged"):
    """What a canary said of a generator in an epoch (``label``)."""

    generator: str
    label: str
    judgement: Judgement


Happening = Resident | Consumed | Dropped | Quarantine | Published | Judged


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A happening with who reports it and when (milliseconds since 1970, the stream's clock)."""

    READS_SCHEMAS: ClassVar[tuple[int, ...]] = (1,)

    source: str
    at_ms: int
    happening: Happening
    schema: int = 1


def event_fields(source: str, at_ms: int, happening: Happening) -> dict[FieldT, EncodableT]:
    """The fields of an entry on the stream ``events``."""
    return {"body": codec.encode(Event(source=source, at_ms=at_ms, happening=happening))}
