"""Events folded into what the panel and its readers know."""

from lorabridge.bridge.events import Consumed, Dropped, Event, Happening, Published, Quarantine, Resident
from lorabridge.bridge.residency import Residency, Served
from lorabridge.bridge.run.news import News, Rates


def heard(*happenings: Happening, policy: str = "sort") -> News:
    news = News(policy=policy)
    for second, happening in enumerate(happenings):
        news = news.after(Event(source="test", at_ms=1000 * second, happening=happening))
    return news


def step(number: int, *, policy: str = "sort", reward: float = 0.5, samples: int = 4, lag: int = 20) -> Consumed:
    names = tuple(f"r/{number}.1/{i}" for i in range(samples))
    return Consumed(
        policy=policy, step=number, trajectories=names, tokens=10, lag_total=lag, lag_max=lag // 5, lag_s=1.0,
        reward=reward,
    )  # fmt: skip


def resident(generator: str, version: int, policy: str = "sort") -> Resident:
    residency = Residency(
        generator=generator, instance="i", epoch=version, kv="keep",
        serves={policy: Served(version=version, digest="sha256:" + "0" * 64)}, at_ms=0,
    )  # fmt: skip
    return Resident(residency=residency, swap_ms={})


def test_steps_rewards_and_lags_come_from_what_was_consumed() -> None:
    news = heard(step(0, reward=0.25), step(1, reward=0.75, lag=40))
    assert news.steps == 2
    assert news.rewards == (0.25, 0.75)
    assert news.lags == (2.0, 4.0)
    assert news.lag_max == 8


def test_a_rate_needs_two_steps_and_leaves_out_the_first() -> None:
    assert heard(step(0)).rates is None
    assert heard(step(0, samples=100), step(1), step(2)).rates == Rates(steps=1.0, samples=4.0, tokens=10.0)


def test_each_generator_serves_what_it_said_last() -> None:
    assert heard(resident("a", 1), resident("b", 1), resident("a", 2)).serves == {"a": 2, "b": 1}


def test_what_was_lost_is_counted() -> None:
    news = heard(
        Dropped(policy="sort", trajectories=("r/1.1/0", "r/1.1/1"), reason="lag"),
        Quarantine(subject="r/2.1/0", reason="no record of i:4"),
    )
    assert (news.dropped, news.quarantined, news.trouble) == (2, 1, "no record of i:4")


def test_another_policy_is_no_news() -> None:
    others = (
        step(0, policy="other"),
        resident("a", 1, policy="other"),
        Dropped(policy="other", trajectories=("x",), reason="lag"),
        Published(policy="other", version=3, digest="sha256:" + "0" * 64, step=2, phases_ms={}),
    )
    assert heard(*others) == News(policy="sort")
