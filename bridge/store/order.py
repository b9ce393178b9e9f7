"""May this version be committed, and which is the last? The rules of law 2, without I/O."""

from __future__ import annotations

from collections.abc import Callable

from lorabridge.bridge.errors import StaleTrainer, VersionTaken
from lorabridge.bridge.manifest import Manifest


def check_commit(manifest: Manifest, there: Manifest | None, newest: int, epoch: int) -> bool:
    """Whether ``manifest`` is to be written (True) or stands there already (False).

    Where nothing locks the line, ``epoch`` must have been read after ``newest``. Then epochs never go down along the
    line: whoever sees a version of a later epoch sees that epoch too.

    Args:
        manifest: what a trainer wants to commit.
        there: what stands under its version, if anything.
        newest: highest version of the line, 0 if there is none.
        epoch: newest trainer epoch allocated for the policy.

    Raises:
        StaleTrainer: a trainer with a later epoch, or a rollback, has taken over.
        VersionTaken: the version has other content, or is not the next one.
    """
    if there == manifest:
        return False
    name = f"{manifest.policy} version {manifest.version}"
    if manifest.epoch != epoch:
        raise StaleTrainer(
            f"{name} is from trainer epoch {manifest.epoch}, and epoch {epoch} has taken over the policy",
            action="Another trainer or a rollback took this policy over: start the trainer again to go on from there",
        )
    if there is not None:
        raise VersionTaken(f"{name} exists with digest {there.digest}", action="Continue the line from the newest")
    if manifest.version != newest + 1:
        raise VersionTaken(f"{name} does not follow version {newest}", action="Continue the line from the newest")
    return True


def last(there: Callable[[int], bool], known: int = 0) -> int:
    """The highest number of a line that starts at 1 and has no gaps, 0 if it is empty.

    Asks O(log n) questions, and two where nothing was added since ``known``.

    Args:
        there: whether a number is in the line; it may grow meanwhile.
        known: one that was in it before, 0 if none is known.
    """
    low = known if known and there(known) else 0
    step = 1
    while there(low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if there(middle) else (low, middle)
    return low
