"""What a look at a run says about it. All of it is pure: facts in, findings out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from lorabridge.bridge.errors import BridgeError
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.run_record import RunRecord, check_joins
from lorabridge.bridge.stream.head import Head, Standing, compare
from lorabridge.rollout.join import check_generator
from lorabridge.rollout.wire import GeneratorState

Level = Literal["ok", "note", "problem"]

_CLOCK_MS = 2_000
_LEAST_FREE = 2 * 1024**3
BACKLOG = 1_000
_LOSES = frozenset({"allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru", "volatile-lfu", "volatile-random",
                    "volatile-ttl", "allkeys-lrm", "volatile-lrm"})  # fmt: skip


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        subject: what (``Redis``, ``store``, a generator's URL).
        check: which of its properties.
        level: ``ok``, ``note`` (worth knowing) or ``problem``.
        says: what was seen, in a sentence.
        action: what to do about it, '' if nothing.
    """

    subject: str
    check: str
    level: Level
    says: str
    action: str = ""


def _ok(subject: str, check: str, says: str) -> Finding:
    return Finding(subject=subject, check=check, level="ok", says=says)


def _note(subject: str, check: str, says: str, action: str) -> Finding:
    return Finding(subject=subject, check=check, level="note", says=says, action=action)


def _problem(subject: str, check: str, says: str, action: str) -> Finding:
    return Finding(subject=subject, check=check, level="problem", says=says, action=action)


def failed(subject: str, check: str, error: BridgeError) -> Finding:
    """What could not be looked at: missing evidence is a problem, not a pass."""
    return _problem(subject, check, error.problem, error.action)


def of_redis(info: Mapping[str, Any], offset_ms: int) -> Iterator[Finding]:
    """Redis or Valkey, by what INFO answers, and its clock less this machine's."""
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version") or "?")
    major = version.partition(".")[0]
    if major.isdigit() and int(major) >= 7:
        yield _ok("Redis", "version", f"{name} {version}")
    else:
        yield _problem("Redis", "version", f"{name} {version}", "Use Redis 7.0 or later, or Valkey")
    if info.get("aof_enabled"):
        yield _ok("Redis", "persistence", "the append-only file is on")
    else:
        says = "the append-only file is off: a restart loses groups that nobody has trained on yet"
        yield _note("Redis", "persistence", says, "Set appendonly yes")
    policy, limit = str(info.get("maxmemory_policy", "noeviction")), int(info.get("maxmemory", 0))
    if policy in _LOSES:
        says = f"maxmemory-policy is {policy}: under pressure it would throw away heads, leases and groups"
        yield _problem("Redis", "memory", says, "Set maxmemory-policy noeviction")
    else:
        used = int(info.get("used_memory", 0))
        yield _ok("Redis", "memory", f"{used / 2**20:.0f} MiB used, {'no limit' if not limit else f'of {limit}'}")
    if abs(offset_ms) > _CLOCK_MS:
        yield _note("Redis", "clock", f"this machine's clock is {offset_ms / 1000:+.1f} s off Redis's", "Use NTP")
    else:
        yield _ok("Redis", "clock", f"{offset_ms:+d} ms from this machine's")


def of_streams(waiting: int, archiver: bool, run: RunRecord | None) -> Iterator[Finding]:
    """The run's streams: groups that the ledger does not have yet, and whether an archiver holds the lease."""
    if run is None:
        yield _note("run", "record", "no trainer has published it yet", "Start the trainer")
    else:
        yield _ok("run", "record", f"{run.run}, policy {run.policy}, trainer epoch {run.epoch}")
    if waiting > BACKLOG:
        yield _problem(
            "ledger", "backlog", f"more than {BACKLOG} groups wait to be archived", "Start `lorabridge archiver`"
        )
    else:
        yield _ok("ledger", "backlog", f"{waiting} groups wait to be archived")
    if not archiver:
        yield _note("ledger", "archiver", "none is running", "Start `lorabridge archiver`, or nothing is trimmed")


def of_joining(run: RunRecord, mine: RunRecord | BridgeError) -> Finding:
    """Whether a worker with this configuration, here, would be let into the run.

    Args:
        run: what the trainer published.
        mine: the same by this machine's configuration, model folder and task code, or why it cannot be told.
    """
    if isinstance(mine, BridgeError):
        return failed("configuration", "joins the run", mine)
    try:
        check_joins(run, mine)
    except BridgeError as error:
        return failed("configuration", "joins the run", error)
    return _ok("configuration", "joins the run", "base model, sampling, task code and seed are the trainer's")


def of_line(stored: Manifest | None, mirrored: Head | None, verified: BridgeError | None) -> Iterator[Finding]:
    """The policy's newest version: by the store, by Redis, and whether its bytes are those of its digest."""
    standing = compare(stored, mirrored)
    if standing is Standing.AGREES:
        yield _ok("head", "line", f"version {stored.version} in store and Redis" if stored else "no version yet")
    elif standing is Standing.BEHIND:
        yield _problem("head", "line", "Redis is behind the store", "A worker or trainer repairs it within 10 s")
    else:
        action = "Is [store] url the one of this run? If the store was lost, start a new run"
        yield _problem("head", "line", "Redis names a version that the store does not have", action)
    if verified is not None:
        yield failed("store", "bytes", verified)
    elif stored is not None:
        yield _ok("store", "bytes", f"{stored.digest[:19]} is whole")


def of_disk(place: str, free: int) -> Finding:
    """Room for what a process writes under ``place``, in bytes."""
    says = f"{free / 2**30:.1f} GiB free at {place}"
    return _ok("disk", place, says) if free >= _LEAST_FREE else _problem("disk", place, says, "Make room")


def of_generator(
    url: str, state: GeneratorState | BridgeError, attested: Mapping[str, str | None] | BridgeError,
    run: RunRecord | None, head: Manifest | None, dtype: str, kv: str, controller: str,
) -> Iterator[Finding]:  # fmt: skip
    """One generator.

    Args:
        url: of its public door.
        state: its answer.
        attested: what it says of its slots, by policy.
        run: what the trainer published.
        head: the run's newest version.
        dtype, kv: what the configuration says.
        controller: worker that holds its lease.
    """
    if isinstance(state, BridgeError):
        yield failed(url, "plugin", state)
        return
    facts = state.facts
    says = f"instance {state.residency.instance}, {state.running} requests in flight"
    room = f", KV for {facts.kv_tokens:,} tokens" if facts.kv_tokens else ""
    yield _ok(url, "plugin", says + room)
    if run is not None:
        try:
            check_generator(run, state, url, dtype)
            says = f"{facts.dtype}, {facts.logprobs_mode}, rank {facts.max_lora_rank}, {facts.max_loras} slots"
            yield _ok(url, "fits the run", says)
        except BridgeError as error:
            yield failed(url, "fits the run", error)
    if state.quarantine is not None:
        since = time.strftime("%H:%M:%S UTC", time.gmtime((state.quarantined_ms or 0) / 1000))
        says = f"since {since}: {state.quarantine}"
        yield _problem(url, "quarantine", says, "A worker tries again; else restart this generator")
    if isinstance(attested, BridgeError):
        yield failed(url, "slots", attested)
    else:
        wrong = [f"{policy}: {seen}" for policy, seen in attested.items() if seen is not None]
        if wrong:
            yield _problem(url, "slots", "; ".join(wrong), "What it sampled since the last swap is not to be trusted")
        else:
            yield _ok(url, "slots", f"{len(attested)} adapters are what they were proven to be")
    if state.canary is not None:
        canary = state.canary
        says = (
            f"{canary.verdict} at version {canary.version}: off by {canary.error:.1e} nats, {canary.floor:.1e} without "
            f"adapter; the adapter makes {canary.effect:.1e}, and {canary.smallest:.1e} could be seen"
        )
        if canary.verdict == "mismatch":
            yield _problem(url, "canary", says, "Are its base model, dtype and vLLM those of the run?")
        else:
            yield _ok(url, "canary", says)
    yield from _against_head(url, state, head, controller)
    if state.residency.kv != kv and state.residency.epoch:
        yield _note(url, "kv", f"its last swap was {state.residency.kv}, and [generators] kv is {kv}", "")


def _against_head(url: str, state: GeneratorState, head: Manifest | None, controller: str) -> Iterator[Finding]:
    if head is None:
        return
    served = state.residency.serves.get(head.policy)
    who = f"its controller is {controller}" if controller else "no worker controls it"
    if served is None:
        why = f"; its last swap failed: {state.failed}" if state.failed else ""
        yield _problem(url, "head", f"it does not serve {head.policy}; {who}{why}", "Start a worker, and see its log")
    elif served.digest != head.digest:
        behind = head.version - served.version
        why = f"; its last swap failed: {state.failed}" if state.failed else ""
        says = f"it serves version {served.version}, {behind} behind the head; {who}{why}"
        yield _problem(url, "head", says, "Start a worker, or see its log and the server's")
    else:
        yield _ok(url, "head", f"version {served.version}; {who}")
