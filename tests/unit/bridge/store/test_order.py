"""Law 2 without I/O: which manifest may be committed, and which number is the last of a line."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.errors import StaleTrainer, VersionTaken
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store.order import check_commit, last
from tests.factories import make_manifest


def test_the_next_version_of_the_newest_trainer_is_committed() -> None:
    assert check_commit(make_manifest(3, epoch=2), None, newest=2, epoch=2) is True


def test_the_first_version_is_1() -> None:
    assert check_commit(make_manifest(1), None, newest=0, epoch=1) is True
    with pytest.raises(VersionTaken, match="does not follow version 0"):
        check_commit(make_manifest(0), None, newest=0, epoch=1)


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_the_same_manifest_again_is_no_news_even_from_a_trainer_that_was_replaced(epoch: int) -> None:
    assert check_commit(make_manifest(3), make_manifest(3), newest=4, epoch=epoch) is False


@pytest.mark.parametrize("change", [{"digest": "sha256:" + "0" * 64}, {"step": 99}, {"run": "other"}, {"epoch": 2}])
def test_a_version_is_never_given_other_content(change: dict[str, object]) -> None:
    changed = msgspec.structs.replace(make_manifest(3), **change)
    with pytest.raises(VersionTaken, match="version 3 exists"):
        check_commit(changed, make_manifest(3), newest=3, epoch=changed.epoch)


@given(
    st.integers(0, 6), st.integers(0, 6), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["", "same", "other"])
)
def test_what_is_committed_is_always_next_and_from_the_newest_trainer(
    version: int, newest: int, mine: int, epoch: int, standing: str
) -> None:
    manifest = make_manifest(version, epoch=mine)
    there: Manifest | None = None
    if standing:
        there = manifest if standing == "same" else msgspec.structs.replace(manifest, step=-1)
    try:
        write = check_commit(manifest, there, newest, epoch)
    except StaleTrainer as error:
        assert mine != epoch
        assert error.exit_code == 4
    except VersionTaken:
        assert mine == epoch
        assert there is not None or version != newest + 1
    else:
        assert write is (there is None)
        assert there is not None or (version == newest + 1 and mine == epoch)


@given(st.integers(0, 300), st.integers(0, 300), st.lists(st.integers(0, 3), max_size=40))
def test_the_last_is_found_whatever_was_known_and_however_the_line_grows(
    start: int, known: int, growth: list[int]
) -> None:
    end, asked, more = start, [], iter(growth)

    def there(number: int) -> bool:
        nonlocal end
        assert number >= 1
        asked.append(number)
        found = number <= end
        end += next(more, 0)
        return found

    found = last(there, known)
    assert start <= found <= end, "what was there at the beginning is never missed"
    if not growth:
        assert found == start
        assert len(asked) <= 2 * (start + 2).bit_length() + 2
        assert known != start or known == 0 or asked == [known, known + 1]
