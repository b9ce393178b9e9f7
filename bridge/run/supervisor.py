"""Attends to the processes of a run: starts them, shows how they are, notices one that ends, stops them in order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from lorabridge.bridge.run.feed import Feed
from lorabridge.bridge.run.interrupts import Interrupts
from lorabridge.bridge.run.news import News
from lorabridge.bridge.run.panel import Display, Phase, ProcessView, View
from lorabridge.bridge.run.processes import Child, died, may_restart, stop
from lorabridge.bridge.settings import Settings

STOP_S = 7.5
_TICK_S = 0.2
_ENDS_LATE = ("archiver", "valkey")


class Supervisor:
    """Owns every process of a run; leaving the block stops those that still run, within ``STOP_S`` seconds.

    Attributes:
        settings: of the run; a demo completes them as it goes.
        feed: what the run tells, once there is a Redis.
    """

    def __init__(self, settings: Settings, display: Display, interrupts: Interrupts) -> None:
        self.settings = settings
        self.feed: Feed | None = None
        self._display, self._interrupts = display, interrupts
        self._children: list[Child] = []
        self._began = time.monotonic()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            if any(child.code is None for child in self._children):
                self._display.show(self._view("every process to stop"))
        finally:  # even if the terminal is gone
            stop(stages(self._children), within_s=STOP_S, hurry=self._interrupts.hurry)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def start(self, name: str, module: str, *arguments: str, ends_with: Collection[int] = ()) -> Child:
        """Start ``python -m module arguments``; see ``Child`` for ``ends_with``."""
        child = Child(
            name,
            [sys.executable, "-P", "-m", module, *arguments],
            log=self.settings.run.dir / "logs" / f"{name}.log",
            environment=environment(os.environ),
            ends_with=ends_with,
        )
        self._children.append(child)
        return child

    def attend(self, until: Callable[[], bool], stage: str | Callable[[], str] = "") -> None:
        """Show the run until ``until()``; ``stage`` says what is waited for, if it is not plain from the run itself.

        A process that something killed is started again.

        Raises:
            ProcessDied: a process ended by itself that should not have, or not like that, or is killed all the time.
            KeyboardInterrupt: Ctrl-C.
        """
        while True:
            self._interrupts.check()
            for child in self._children:
                if child.failed:
                    self._replace(child)
            if until():
                return
            self._display.show(self._view(stage if isinstance(stage, str) else stage()))
            time.sleep(_TICK_S)

    def _replace(self, child: Child) -> None:
        """Start a process again that something killed. Raises ``ProcessDied`` if that is no use."""
        code = child.code
        if code is None or not may_restart(code, child.restarts, time.monotonic()):
            raise died(child)
        self.note(f"{child.name} was killed by signal {code - 128}: started again")
        child.restart()

    def finish(self, child: Child, stage: str, within_s: float) -> None:
        """Ask a process to stop and wait for it, ``within_s`` seconds; then kill it.

        Raises:
            ProcessDied: another one ended that should not have.
            KeyboardInterrupt: Ctrl-C.
        """
        deadline = time.monotonic() + within_s
        child.ask_to_stop()
        self.attend(lambda: child.code is not None or time.monotonic() > deadline, stage)
        child.kill()
        child.wait()

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._display.note(text)

    def _view(self, stage: str) -> View:
        settings, feed = self.settings, self.feed
        trainer = settings.trainer
        samples = trainer.nproc_per_node * trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps
        return View(
            run=settings.run.id,
            elapsed_s=self.elapsed_s,
            max_steps=trainer.max_steps,
            groups_per_step=max(1, samples // settings.rollout.num_generations),
            processes=tuple(ProcessView(child.name, phase(child, feed)) for child in self._children),
            stage=stage,
            healthy=feed is not None and feed.healthy,
            trouble=feed.trouble if feed else "",
            news=feed.news if feed else News(policy=settings.policy.name),
        )


def stages(children: Sequence[Child]) -> list[list[Child]]:
    """The order in which processes stop: those that write, then the archiver, then the Redis that both need."""
    late = [[child for child in children if child.name == name] for name in _ENDS_LATE]
    early = [child for child in children if child.name not in _ENDS_LATE]
    return [stage for stage in (early, *late) if stage]


def phase(child: Child, feed: Feed | None) -> Phase:
    """How a process is, in a word."""
    if child.failed:
        return "failed"
    if child.code is not None:
        return "done"
    if child.asked:
        return "stopping"
    if feed and (
        (child.name.startswith("serve") and not feed.healthy) or (child.name == "train" and not feed.news.joined)
    ):
        return "loading"
    return "running"


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """What a process of the run gets: all of ``inherited`` but settings, which the resolved file has already taken in
    and which would win over it."""
    kept = {name: value for name, value in inherited.items() if not _is_setting(name)}
    return kept | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}


def _is_setting(name: str) -> bool:
    section = name.upper().removeprefix("LORABRIDGE_").partition("__")[0].lower()
    return name.upper().startswith("LORABRIDGE_") and section in Settings.model_fields


def with_values(settings: Settings, section: str, **values: object) -> Settings:
    """``settings`` with some values of one section replaced."""
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})
