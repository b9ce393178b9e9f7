"""Law 3: an engine label becomes a fact about a policy, or the sample is quarantined."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge import codec
from lorabridge.bridge.residency import (
    EngineSpan,
    KvMode,
    Residency,
    Served,
    check_tiles,
    epochs_between,
    parse_label,
    resolve,
    without_preemptions,
)
from lorabridge.bridge.trajectory import Span, Unestablished
from tests.factories import digest_of, make_residency, make_span


def records_of(*residencies: Residency) -> dict[str, Residency]:
    return {record.label: record for record in residencies}


FIVE = records_of(*(make_residency(epoch, version=epoch + 10) for epoch in range(1, 6)))


def engine(*spans: tuple[int, int, int]) -> list[EngineSpan]:
    """(epoch, start, end) of each span."""
    return [EngineSpan(f"instance:{epoch}", start, end) for epoch, start, end in spans]


def test_spans_carry_the_version_and_digest_that_each_epoch_served() -> None:
    first, second = resolve("policy", 5, engine((1, 0, 2), (3, 2, 5)), FIVE)
    assert (first.policy, first.version, first.digest, first.epoch) == ("policy", 11, digest_of("adapter 11"), 1)
    assert (first.start, first.end, first.kv) == (0, 2, "fresh")
    assert (second.version, second.digest, second.start, second.end) == (13, digest_of("adapter 13"), 2, 5)


def test_no_tokens_have_no_spans() -> None:
    assert resolve("policy", 0, [], FIVE) == ()


@pytest.mark.parametrize(
    ("spans", "count", "reason"),
    [
        ([], 3, "cover 0 of 3"),
        ([(1, 0, 3)], 0, "cover 3 of 0"),
        ([(1, 0, 2)], 3, "cover 2 of 3"),
        ([(1, 0, 4)], 3, "cover 4 of 3"),
        ([(1, 1, 3)], 3, "does not continue at token 0"),
        ([(1, -1, 3)], 3, "does not continue at token 0"),
        ([(1, 0, 1), (2, 2, 3)], 3, "does not continue at token 1"),
        ([(1, 0, 2), (2, 1, 3)], 3, "does not continue at token 2"),
        ([(1, 0, 2), (2, 2, 2), (3, 2, 3)], 3, "does not continue at token 2"),
        ([(1, 0, 2), (2, 2, 1)], 1, "does not continue at token 2"),
        ([(9, 0, 3)], 3, "no residency record for engine label 'instance:9'"),
        ([(2, 0, 1), (1, 1, 3)], 3, "instance:1 reported after instance:2"),
        ([(1, 0, 1), (1, 1, 3)], 3, "instance:1 reported after instance:1"),
    ],
)
def test_what_cannot_be_established_is_refused_with_its_reason(
    spans: list[tuple[int, int, int]], count: int, reason: str
) -> None:
    with pytest.raises(Unestablished, match=reason):
        resolve("policy", count, engine(*spans), FIVE)


@pytest.mark.parametrize("label", ["", "instance", "instance:01", "1", "instance:1 ", "Instance:1", "default"])
def test_a_label_that_only_looks_known_is_unknown(label: str) -> None:
    with pytest.raises(Unestablished, match="no residency record"):
        resolve("policy", 1, [EngineSpan(label, 0, 1)], FIVE)


def test_an_epoch_that_serves_another_policy_says_nothing_about_this_one() -> None:
    with pytest.raises(Unestablished, match="does not serve other"):
        resolve("other", 3, engine((1, 0, 3)), FIVE)


def test_a_sample_from_two_instances_is_refused_although_both_are_known() -> None:
    records = FIVE | records_of(make_residency(2, 12, instance="restarted"))
    with pytest.raises(Unestablished, match="restarted:2 reported after instance:1"):
        resolve("policy", 2, [EngineSpan("instance:1", 0, 1), EngineSpan("restarted:2", 1, 2)], records)


@pytest.mark.parametrize(
    ("modes", "kv"),
    [
        (["keep"], "kept"),
        (["recompute"], "fresh"),
        (["keep", "keep"], "kept"),
        (["recompute", "keep"], "fresh"),
        (["keep", "recompute"], "fresh"),
        (["keep", "recompute", "keep"], "fresh"),
        (["keep", "keep", "keep"], "kept"),
    ],
)
def test_kv_is_kept_only_if_no_swap_in_between_dropped_it(modes: list[KvMode], kv: str) -> None:
    # The first epoch's own mode says nothing about what came after it.
    for own in ("keep", "recompute"):
        swaps = [make_residency(2 + n, 2 + n, mode) for n, mode in enumerate(modes)]
        last = swaps[-1].epoch
        records = records_of(make_residency(1, 1, own), *swaps)
        first, second = resolve("policy", 4, engine((1, 0, 2), (last, 2, 4)), records)
        assert (first.kv, second.kv) == ("fresh", kv)


def test_each_span_has_its_own_kv() -> None:
    records = records_of(make_residency(1, 1), make_residency(2, 2, "recompute"), make_residency(3, 3))
    spans = resolve("policy", 3, engine((1, 0, 1), (2, 1, 2), (3, 2, 3)), records)
    assert [span.kv for span in spans] == ["fresh", "fresh", "kept"]


def test_a_span_is_cut_where_its_request_was_preempted_and_goes_on_with_fresh_kv() -> None:
    records = records_of(*(make_residency(epoch, epoch, "keep") for epoch in (1, 2, 3)))
    spans = resolve("policy", 9, engine((1, 0, 4), (2, 4, 6), (3, 6, 9)), records, restarts=[2, 4, 8])
    assert [(s.epoch, s.start, s.end, s.kv) for s in spans] == [
        (1, 0, 2, "fresh"), (1, 2, 4, "fresh"), (2, 4, 6, "fresh"), (3, 6, 8, "kept"), (3, 8, 9, "fresh")
    ]  # fmt: skip


def test_labels_that_count_preemptions_are_epochs_all_the_same() -> None:
    reported = [
        EngineSpan("instance:1", 0, 2), EngineSpan("instance:1~4", 2, 3), EngineSpan("instance:2~4", 3, 5),
        EngineSpan("instance:2~5", 5, 6),
    ]  # fmt: skip
    merged, preempted = without_preemptions(reported)
    assert merged == [EngineSpan("instance:1", 0, 3), EngineSpan("instance:2", 3, 6)]
    assert preempted
    assert without_preemptions([EngineSpan("i:1~4", 0, 2), EngineSpan("i:2~4", 2, 3)])[1] is False
    assert without_preemptions([EngineSpan("i:1~4", 0, 2), EngineSpan("i:1~5", 3, 4)])[0] != [EngineSpan("i:1", 0, 4)]


def test_an_epoch_in_between_without_a_record_is_not_guessed_at() -> None:
    records = {label: record for label, record in FIVE.items() if record.epoch != 2}
    with pytest.raises(Unestablished, match="no residency record for epoch 2 of instance"):
        resolve("policy", 2, engine((1, 0, 1), (3, 1, 2)), records)


def test_preempted_twice_at_one_place_is_one_cut() -> None:
    spans = resolve("policy", 4, engine((1, 0, 4)), FIVE, [2, 2])
    assert [(span.start, span.end, span.kv) for span in spans] == [(0, 2, "fresh"), (2, 4, "fresh")]


def test_a_residency_record_names_its_label() -> None:
    assert make_residency(7, 1, instance="abc").label == "abc:7"


@pytest.mark.parametrize(
    ("label", "parsed"),
    [
        ("instance:7", ("instance", 7)),
        ("a:b:7", ("a:b", 7)),
        ("default", None),
        ("", None),
        ("instance:", None),
        ("instance:-1", None),
        ("instance:1.0", None),
        ("instance:²", None),
        ("instance:" + "9" * 5000, None),
    ],
)
def test_a_label_is_ours_if_it_ends_with_an_epoch(label: str, parsed: tuple[str, int] | None) -> None:
    assert parse_label(label) == parsed


def test_the_epochs_between_labels_are_those_of_each_instance() -> None:
    assert epochs_between([]) == []
    assert epochs_between(["a:3", "b:7", "default", "a:1"]) == [("a:1", 1), ("a:2", 2), ("a:3", 3), ("b:7", 7)]


engine_spans = st.lists(
    st.builds(
        EngineSpan,
        st.sampled_from(["instance:1", "instance:2", "instance:3", "instance:5", "restarted:4", "unknown:1", ""]),
        st.integers(-1, 6),
        st.integers(-1, 6),
    ),
    max_size=4,
)
tiling = st.lists(st.integers(1, 4), max_size=5).map(
    lambda lengths: engine(*((n + 1, sum(lengths[:n]), sum(lengths[: n + 1])) for n in range(len(lengths))))
)


@given(engine_spans | tiling, st.integers(0, 12))
def test_spans_tile_exactly_or_nothing_is_established(reported: list[EngineSpan], count: int) -> None:
    records = FIVE | records_of(make_residency(4, 14, instance="restarted"))
    try:
        spans = resolve("policy", count, reported, records)
    except Unestablished as error:
        assert str(error)
        return
    covered = [token for span in spans for token in range(span.start, span.end)]
    assert covered == list(range(count))
    assert [(f"instance:{span.epoch}", span.start, span.end) for span in spans if span.epoch != 4] == [
        (span.version, span.start, span.end) for span in reported if not span.version.endswith(":4")
    ]
    assert all(span.digest == digest_of(f"adapter {span.version}") for span in spans)
    assert all(later.epoch > earlier.epoch for earlier, later in itertools.pairwise(spans))


@given(tiling)
def test_what_tiles_and_is_on_record_is_always_established(reported: list[EngineSpan]) -> None:
    count = reported[-1].end if reported else 0
    assert len(resolve("policy", count, reported, FIVE)) == len(reported)


@given(
    st.lists(st.builds(make_span, st.just(1), st.integers(-1, 8), st.integers(-1, 8)), max_size=4), st.integers(0, 8)
)
def test_tiles_are_checked_token_by_token(spans: list[Span], count: int) -> None:
    covered = [token for span in spans for token in range(span.start, span.end)]
    tiles = covered == list(range(count)) and all(span.end > span.start for span in spans)
    try:
        check_tiles(spans, count)
    except Unestablished:
        assert not tiles
    else:
        assert tiles


def pinned(epoch: int, *versions: int) -> Residency:
    """An epoch in which these versions of ``policy`` are in slots, and new samples get the last."""
    held = tuple(Served(version=v, digest=digest_of(f"adapter {v}")) for v in versions)
    return msgspec.structs.replace(make_residency(epoch, versions[-1]), pinned={"policy": held})


PINNED = records_of(pinned(1, 1), pinned(2, 1, 2), pinned(3, 2, 3))


def test_a_sample_of_a_pinned_policy_is_of_the_version_it_began_with_across_swaps() -> None:
    first, second = resolve("policy", 5, engine((1, 0, 2), (2, 2, 5)), PINNED, began_on=digest_of("adapter 1"))
    assert (first.version, second.version, second.epoch, second.kv) == (1, 1, 2, "kept")
    (only,) = resolve("policy", 3, engine((2, 0, 3)), PINNED, began_on=digest_of("adapter 2"))
    assert (only.version, only.digest) == (2, digest_of("adapter 2"))


@pytest.mark.parametrize(
    ("spans", "began_on", "reason"),
    [
        ([(1, 0, 3)], None, "did not say to which version"),
        ([(1, 0, 1), (3, 1, 3)], "adapter 1", "epoch instance:3 does not hold"),
        ([(1, 0, 3)], "adapter 2", "epoch instance:1 does not hold"),
    ],
)
def test_a_sample_that_cannot_have_stayed_where_it_began_is_refused(
    spans: list[tuple[int, int, int]], began_on: str | None, reason: str
) -> None:
    with pytest.raises(Unestablished, match=reason):
        resolve("policy", 3, engine(*spans), PINNED, began_on=began_on and digest_of(began_on))


def test_a_policy_that_is_not_pinned_has_no_sample_that_began_on_something() -> None:
    with pytest.raises(Unestablished, match="does not hold"):
        resolve("policy", 3, engine((1, 0, 3)), FIVE, began_on=digest_of("adapter 11"))


def test_every_adapter_in_a_slot_is_named() -> None:
    assert pinned(2, 1, 2).digests == {digest_of("adapter 1"), digest_of("adapter 2")}
    assert make_residency(1, 7).digests == {digest_of("adapter 7")}


def test_records_of_the_previous_schema_are_read() -> None:
    old = msgspec.json.decode(codec.encode_json(make_residency(1, 7)))
    del old["pinned"]
    old["schema"] = 1
    assert codec.decode_json(Residency, msgspec.json.encode(old)).pinned == {}
