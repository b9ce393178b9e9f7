"""Several actors on one object store, one request at a time, in an order that a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lorabridge.bridge.store.bucket import Bucket
from lorabridge.bridge.store.objects import ObjectStore
from tests.stores import LIMIT

REQUESTS = ("cat_file", "open", "pipe_file", "rm_file", "find", "ls")


class Killed(BaseException):
    """What a process that dies in the middle of a request does not catch."""


class Requests:
    """An fsspec filesystem that calls ``before`` ahead of every request."""

    def __init__(self, fs: Any, before: Callable[[], None]) -> None:
        self._fs, self._before = fs, before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._fs, name)
        if name not in REQUESTS:
            return value

        def request(*args: Any, **options: Any) -> Any:
            self._before()
            return value(*args, **options)

        return request


def object_store(fs: Any, root: str, before: Callable[[], None]) -> ObjectStore:
    """A store whose requests a test sees coming."""
    return ObjectStore(Bucket(Requests(fs, before), root, f"test://{root}"), LIMIT)


class Actor:
    """A thread that stops ahead of every request until it is told to go on."""

    def __init__(self, act: Callable[[Callable[[], None]], Any]) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._act, self.done = act, False
        self.result: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._stopped.acquire()

    def _run(self) -> None:
        self._pause()
        try:
            self.result = self._act(self._pause)
        except Exception as error:
            self.error = error
        self.done = True
        self._stopped.release()

    def _pause(self) -> None:
        self._stopped.release()
        self._go.acquire()

    def step(self) -> None:
        """Let it make one request, and what it does until the next."""
        if not self.done:
            self._go.release()
            self._stopped.acquire()


def play(acts: Sequence[Callable[[Callable[[], None]], Any]], order: Sequence[int]) -> list[Actor]:
    """Let the actors take their steps in ``order``, and then in turns until all have ended."""
    actors = [Actor(act) for act in acts]
    for number in order:
        actors[number % len(actors)].step()
    while not all(actor.done for actor in actors):
        for actor in actors:
            actor.step()
    return actors
