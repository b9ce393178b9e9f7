"""What a run has told so far, folded from its events and counters. All of it is pure."""

from __future__ import annotations

import msgspec

from lorabridge.bridge.events import Consumed, Dropped, Event, Published, Quarantine, Resident

_WINDOW = 16


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by where they are: being sampled; on the stream, where the trainer has them or can have them."""

    leased: int = 0
    delivered: int = 0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Trained per second, over the last steps."""

    steps: float
    samples: float
    tokens: float


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a policy's run.

    Attributes:
        joined: whether the trainer has put the run on record, so that workers may join.
        head: newest version by Redis, 0 if none.
        serves: version that each generator serves.
        published: newest version that a Published event told of, 0 if none.
        steps: optimizer steps taken.
        rewards, lags: means per step, in order; lags in optimizer steps.
        lag_max: largest lag of any token.
        recent: (at_ms, trajectories, tokens) of the last steps.
        dropped, quarantined: how many, so far.
        trouble: why the last one was quarantined, or ''.
    """

    policy: str
    joined: bool = False
    head: int = 0
    serves: dict[str, int] = {}
    published: int = 0
    steps: int = 0
    rewards: tuple[float, ...] = ()
    lags: tuple[float, ...] = ()
    lag_max: int = 0
    recent: tuple[tuple[int, int, int], ...] = ()
    dropped: int = 0
    quarantined: int = 0
    trouble: str = ""
    counts: Counts = Counts()

    def after(self, event: Event) -> News:
        """This, and one more event."""
        match event.happening:
            case Consumed(policy=self.policy) as consumed:
                return self._trained(event.at_ms, consumed)
            case Resident(residency=residency) if self.policy in residency.serves:
                served = {residency.generator: residency.serves[self.policy].version}
                return msgspec.structs.replace(self, serves=self.serves | served)
            case Published(policy=self.policy, version=version):
                return msgspec.structs.replace(self, published=max(self.published, version))
            case Dropped(policy=self.policy, trajectories=trajectories):
                return msgspec.structs.replace(self, dropped=self.dropped + len(trajectories))
            case Quarantine(reason=reason):
                return msgspec.structs.replace(self, quarantined=self.quarantined + 1, trouble=reason)
            case _:
                return self

    def _trained(self, at_ms: int, step: Consumed) -> News:
        return msgspec.structs.replace(
            self,
            steps=max(self.steps, step.step + 1),
            rewards=(*self.rewards, step.reward),
            lags=(*self.lags, step.lag_total / step.tokens if step.tokens else 0.0),
            lag_max=max(self.lag_max, step.lag_max),
            recent=(*self.recent, (at_ms, len(step.trajectories), step.tokens))[-_WINDOW:],
        )

    @property
    def rates(self) -> Rates | None:
        """None until two steps have been taken."""
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return None
        seconds = (self.recent[-1][0] - self.recent[0][0]) / 1000
        _, samples, tokens = (sum(column) for column in zip(*self.recent[1:], strict=True))
        steps = len(self.recent) - 1
        return Rates(steps=steps / seconds, samples=samples / seconds, tokens=tokens / seconds)
