"""Laws 1, 2 and 7 on an object store, where nothing locks: trainers and retention in every order of their requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import fsspec
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorabridge.bridge.errors import BridgeError, DigestMissing, StaleTrainer, VersionTaken
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import objects
from lorabridge.bridge.store.bucket import Bucket
from lorabridge.bridge.store.line import commit_next
from lorabridge.bridge.store.retention import Retention
from tests.factories import make_adapter, make_manifest
from tests.steps import Killed, object_store, play
from tests.stores import publish

Act = Callable[[Callable[[], None]], list[Manifest]]
# Which actor goes on, and for how many requests; then the next.
ORDERS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 24)), min_size=4, max_size=16).map(
    lambda turns: [actor for actor, requests in turns for _ in range(requests)]
)


def nothing() -> None:
    pass


def trainer(root: str, name: int, versions: int) -> Act:
    """Takes the policy over and publishes, as long as it may; what it committed."""

    def act(pause: Callable[[], None]) -> list[Manifest]:
        store, committed = object_store(fsspec.filesystem("memory"), root, pause), []
        epoch = store.allocate_epoch("policy")
        for version in range(versions):
            digest = store.put(make_adapter(100 * name + version))

            def on(newest: Manifest | None, digest: str = digest) -> Manifest:
                return make_manifest(newest.version + 1 if newest else 1, digest, epoch=epoch, run=f"trainer-{name}")

            try:
                committed.append(commit_next(store, "policy", on))
            except StaleTrainer:
                break
        return committed

    return act


@settings(max_examples=150)
@given(ORDERS)
def test_trainers_that_overtake_each_other_make_one_line(order: list[int]) -> None:
    fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    actors = play([trainer(root, name, 2) for name in range(3)], order)
    assert [actor.error for actor in actors] == [None] * 3
    store = object_store(fs, root, nothing)
    newest = store.newest("policy")
    assert newest is not None
    line = [store.manifest("policy", version) for version in range(1, newest.version + 1)]
    for manifest in line:
        store.read(manifest.digest)
    epochs = [manifest.epoch for manifest in line]
    assert epochs == sorted(epochs), "an older trainer committed on top of a newer one"
    for actor in actors:
        assert all(manifest in line for manifest in actor.result), "a version that was committed is not in the line"
    assert len(line) == sum(len(actor.result) for actor in actors)
    assert max(epochs) == 3
    assert epochs.count(3) == 2, "the newest trainer always gets through"


def test_a_commit_that_began_before_it_was_overtaken_gets_in_once_and_below() -> None:
    """The race that is left without a lock, and why it does no harm."""
    fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    older, newer = (object_store(fs, root, nothing) for _ in range(2))
    assert older.allocate_epoch("policy") == 1
    digest = older.put(make_adapter())

    def overtake(name: str, body: bytes, *, create: bool = False) -> None:
        """Between the older trainer's look at the epochs and its version."""
        if name.endswith("/1.json"):
            assert newer.allocate_epoch("policy") == 2
            assert newer.newest("policy") is None
        Bucket.write(older._shelf, name, body, create=create)

    older._shelf.write = overtake  # type: ignore[method-assign]
    late = make_manifest(1, digest, epoch=1)
    older.commit(late)
    with pytest.raises(VersionTaken):
        newer.commit(make_manifest(1, digest, epoch=2))
    second = commit_next(newer, "policy", lambda newest: make_manifest(newest.version + 1, digest, epoch=2))  # type: ignore[union-attr]
    assert (newer.manifest("policy", 1), second.version) == (late, 2)
    with pytest.raises(StaleTrainer):
        older.commit(make_manifest(3, digest, epoch=1))


@pytest.mark.parametrize("moment", range(11))
def test_nobody_goes_on_from_a_version_of_a_later_trainer(moment: int) -> None:
    """Even who guesses which version comes next, wherever in its commit the other takes over and publishes."""
    fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    newer, requests = object_store(fs, root, nothing), 0

    def overtake() -> None:
        nonlocal requests
        if requests == moment:
            requests += 1
            publish(newer, 1, newer.allocate_epoch("policy"))
        requests += 1

    digest = newer.put(make_adapter())
    assert newer.allocate_epoch("policy") == 1
    with pytest.raises((StaleTrainer, VersionTaken)):
        object_store(fs, root, overtake).commit(make_manifest(2, digest, epoch=1))
    newest = newer.newest("policy")
    assert newest is None or newest.epoch == 2


# Retention against a commit of the same adapter


@settings(max_examples=150)
@given(ORDERS, st.sampled_from([(1, 1), (1, 2), (2, 1)]))
def test_no_committed_version_of_the_kept_ones_loses_its_adapter(order: list[int], crowd: tuple[int, int]) -> None:
    """An old adapter is put and committed again, by one or two, while one or two remove it."""
    fs, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    first = object_store(fs, root, nothing)
    first.allocate_epoch("policy")
    for version in range(1, 5):
        publish(first, version)
    old = make_adapter(1)

    def again(pause: Callable[[], None]) -> list[Manifest]:
        store = object_store(fs, root, pause)
        manifest = make_manifest(5, store.put(old))
        store.commit(manifest)
        return [manifest]

    def collect(pause: Callable[[], None]) -> list[str]:
        return Retention(object_store(fs, root, pause), "policy", 2, set).apply()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_PAUSE_S", 0)
        actors = play([again] * crowd[0] + [collect] * crowd[1], order)
    committers, collectors = actors[: crowd[0]], actors[crowd[0] :]
    assert [actor.error for actor in collectors] == [None] * len(collectors)
    assert all(actor.error is None or isinstance(actor.error, DigestMissing) for actor in committers)
    store = object_store(fs, root, nothing)
    if any(actor.error is None for actor in committers):
        assert store.read(old.digest) == old
    else:  # they were told: what that asks for works
        manifest = make_manifest(5, store.put(old))
        store.commit(manifest)
        assert (store.newest("policy"), store.read(old.digest)) == (manifest, old)
    for version in (4, 5):
        store.read(store.manifest("policy", version).digest)
    assert store.adapters().keys() <= {make_adapter(version).digest for version in (1, 3, 4)}


# Killed at any request


def survive(act: Callable[[objects.ObjectStore], None], root: str) -> int:
    """Run ``act`` again and again in one store, killed one request later each time, until it comes through."""
    fs, allowed = fsspec.filesystem("memory"), 0
    while True:
        left = allowed

        def count() -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1

        try:
            act(object_store(fs, root, count))
            return allowed
        except Killed:
            allowed += 1
            check(object_store(fs, root, nothing))


def check(store: objects.ObjectStore) -> None:
    """Only whole things, and a line without gaps."""
    for digest in store.adapters():
        store.read(digest)
    newest = store.newest("policy")
    for version in range(1, newest.version + 1 if newest else 1):
        store.manifest("policy", version)


def test_a_trainer_killed_at_any_request_leaves_only_whole_things_and_publishing_goes_on() -> None:
    root = f"/{uuid.uuid4().hex}"

    def act(store: objects.ObjectStore) -> None:
        epoch = store.allocate_epoch("policy")
        digest = store.put(make_adapter())
        for _ in range(2):
            commit_next(
                store, "policy", lambda newest: make_manifest(newest.version + 1 if newest else 1, digest, epoch=epoch)
            )

    assert survive(act, root) > 20


def test_retention_killed_at_any_request_is_finished_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"/{uuid.uuid4().hex}"
    store = object_store(fsspec.filesystem("memory"), root, nothing)
    store.allocate_epoch("policy")
    kept = [publish(store, version).digest for version in range(1, 6)][-2:]
    monkeypatch.setattr(objects, "_DEAD_S", -1)

    def act(store: objects.ObjectStore) -> None:
        Retention(store, "policy", 2, set).apply()
        store.remove([], lambda: kept)

    assert survive(act, root) > 20
    assert store.adapters().keys() == set(kept)
    left = fsspec.filesystem("memory").find(f"{root}/")
    assert not [path for path in left if "leaving" in path]
    assert len([path for path in left if "adapters" in path]) == 4
    with pytest.raises(DigestMissing, match=r"removed from .* by retention"):
        store.read(make_adapter(1).digest)


def test_a_removal_that_another_is_at_is_left_to_it_until_that_is_long_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"/{uuid.uuid4().hex}"
    fs = fsspec.filesystem("memory")
    store = object_store(fs, root, nothing)
    digest = store.put(make_adapter())
    mark = objects._mark_name(digest)
    store._shelf.write(mark, msgspec.json.encode({"owner": "another", "at_s": time.time()}))
    assert store.remove([digest], set) == []
    monkeypatch.setattr(objects, "_SETTLE_S", 0)
    monkeypatch.setattr(objects, "_PAUSE_S", 0)
    with pytest.raises(BridgeError, match="is being removed"):
        store.put(make_adapter())
    monkeypatch.setattr(objects, "_DEAD_S", 0)
    assert store.remove([], lambda: [digest]) == []  # something names it by now
    assert store.put(make_adapter()) == digest
    assert store.remove([digest], set) == [digest]
