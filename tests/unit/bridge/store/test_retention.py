"""Law 7 without I/O: which digests may go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.store.retention import newest_digests, removable

DIGESTS = st.sampled_from("abcdefgh")
LINES = st.lists(DIGESTS, max_size=12).map(lambda digests: dict(enumerate(digests, 1)))


@given(LINES, st.sets(DIGESTS), st.integers(0, 14), st.sets(DIGESTS))
def test_what_goes_is_old_there_named_and_not_in_use(
    line: dict[int, str], present: set[str], keep: int, in_use: set[str]
) -> None:
    gone = removable(present, line, keep, in_use)
    newest = [line[version] for version in range(len(line) - keep + 1, len(line) + 1) if version in line]
    assert gone <= present
    assert gone <= set(line.values())
    assert gone.isdisjoint(in_use)
    assert keep > 0 or not gone
    assert gone.isdisjoint(newest)
    if keep:
        kept = present - gone
        assert kept <= set(newest) | in_use | (present - set(line.values())), "and everything else that is old goes"


@given(LINES, st.sets(DIGESTS), st.integers(1, 6), st.sets(DIGESTS), st.integers(0, 8))
def test_what_was_not_read_of_a_line_stays(
    line: dict[int, str], present: set[str], keep: int, in_use: set[str], unread: int
) -> None:
    """A line is read backwards from its newest, so that what is known of it is its end."""
    end = {version: digest for version, digest in line.items() if version > min(unread, len(line) - keep)}
    assert removable(present, end, keep, in_use) <= removable(present, line, keep, in_use)


@given(LINES, st.integers(1, 6), st.integers(0, 6))
def test_keeping_more_never_removes_more(line: dict[int, str], keep: int, more: int) -> None:
    everything = set("abcdefgh")
    assert removable(everything, line, keep + more, ()) <= removable(everything, line, keep, ())


def test_the_newest_are_by_number_not_by_the_order_they_were_read_in() -> None:
    assert newest_digests({3: "c", 10: "j", 2: "b"}, 2) == {"c", "j"}
    assert newest_digests({}, 2) == set()
