"""What a run is, as the trainer publishes it, and whether a worker or generator may join.

A worker with another template, another temperature or other task code makes samples that look right and train wrong;
it is refused and told which field differs.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import ClassVar

import msgspec

from lorabridge.bridge.errors import ConfigError, RunMismatch
from lorabridge.bridge.fingerprint import Fingerprint, fingerprint
from lorabridge.bridge.model import eos_ids
from lorabridge.bridge.settings import Settings
from lorabridge.bridge.trajectory import Sampling


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved run.

    Attributes:
        run, policy: names.
        base: fingerprint of the base model.
        sampling: of every completion.
        num_generations: completions per group.
        eos_ids: ids that end a completion, sorted.
        environment: digest of the environment's code.
        seed: of the prompts' order.
        rank: largest LoRA rank that will be published.
        epoch: of the trainer that published it (0 until one has).
        groups_ahead: groups that may be started and not yet finished.
    """

    READS_SCHEMAS: ClassVar[tuple[int, ...]] = (1,)

    run: str
    policy: str
    base: Fingerprint
    sampling: Sampling
    num_generations: int
    eos_ids: tuple[int, ...]
    environment: str
    seed: int
    rank: int
    epoch: int
    groups_ahead: int
    schema: int = 1


def resolve_run(settings: Settings, folder: Path) -> RunRecord:
    """The run as this process would have it, from its own configuration and the model in ``folder``."""
    return RunRecord(
        run=settings.run.id,
        policy=settings.policy.name,
        base=fingerprint(folder),
        sampling=settings.rollout.sampling,
        num_generations=settings.rollout.num_generations,
        eos_ids=eos_ids(folder),
        environment=environment_digest(settings.rollout.environment),
        seed=settings.run.seed,
        rank=settings.policy.rank,
        epoch=0,
        groups_ahead=settings.groups_ahead,
    )


def check_joins(run: RunRecord, mine: RunRecord) -> None:
    """Raise ``RunMismatch`` naming the first field in which ``mine`` differs from the trainer's ``run``."""
    for field in ("run", "policy", "sampling", "num_generations", "eos_ids", "environment", "seed"):
        theirs, ours = getattr(run, field), getattr(mine, field)
        if theirs == ours:
            continue
        if isinstance(theirs, Sampling) and isinstance(ours, Sampling):
            part = next(f for f in Sampling.__struct_fields__ if getattr(theirs, f) != getattr(ours, f))
            field, theirs, ours = f"sampling.{part}", getattr(theirs, part), getattr(ours, part)
        raise RunMismatch(
            f"{field} is {ours!r} here and {theirs!r} at the trainer", action="Use the trainer's configuration here"
        )
    check_base(run.base, mine.base, "this worker")


def check_base(expected: Fingerprint, found: Fingerprint, who: str) -> None:
    """Raise ``RunMismatch`` naming the parts of the base model in which ``who`` differs from the trainer, and how."""
    differences = []
    for part in expected.differences(found):
        how = found.how(expected, part)
        differences.append(
            f"the base model's {part} differs: {who} has {getattr(found, part)}, the trainer {getattr(expected, part)}"
            + (f" ({how})" if how else "")
        )
    if differences:
        raise RunMismatch("; ".join(differences), action="Use the same model folder (or revision) everywhere")


def environment_digest(reference: str) -> str:
    """Digest of the source file that ``module:attribute`` names, found without importing it.

    Raises:
        ConfigError: no such module, or it has no source.
    """
    module = reference.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError) as error:
        raise ConfigError(f"[rollout] environment: cannot find {module!r}: {error}", action=_FIND) from error
    if spec is None or spec.origin is None or not spec.has_location:
        raise ConfigError(f"[rollout] environment: no module {module!r} with a source file", action=_FIND)
    return "sha256:" + hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


_FIND = "Give module:attribute, and put its folder on PYTHONPATH"
