"""May this version be committed? The rule of law 2, without I/O."""

from __future__ import annotations

from lorabridge.bridge.errors import StaleTrainer, VersionTaken
from lorabridge.bridge.manifest import Manifest


def check_commit(manifest: Manifest, there: Manifest | None, newest: int, epoch: int) -> bool:
    """Whether ``manifest`` is to be written (True) or stands there already (False).

    Args:
        manifest: what a trainer wants to commit.
        there: what stands under its version, if anything.
        newest: highest version of the line, 0 if there is none.
        epoch: newest trainer epoch allocated for the policy.

    Raises:
        StaleTrainer: a trainer with a later epoch has taken over.
        VersionTaken: the version has other content, or is not the next one.
    """
    if there == manifest:
        return False
    name = f"{manifest.policy} version {manifest.version}"
    if manifest.epoch != epoch:
        raise StaleTrainer(
            f"{name} is from trainer epoch {manifest.epoch}, and epoch {epoch} has taken over the policy",
            action="Another trainer runs for this policy: stop this one, or give it a policy of its own",
        )
    if there is not None:
        raise VersionTaken(f"{name} exists with digest {there.digest}", action="Continue the line from the newest")
    if manifest.version != newest + 1:
        raise VersionTaken(f"{name} does not follow version {newest}", action="Continue the line from the newest")
    return True
