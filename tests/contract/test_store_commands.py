"""``lorabridge store``: what is there, what goes, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from lorabridge.bridge import cli
from lorabridge.bridge.events import Resident, event_fields
from lorabridge.bridge.sections import RedisSection
from lorabridge.bridge.store import Store, open_store
from lorabridge.bridge.store.in_use import Residents
from lorabridge.bridge.stream.embedded import free_port
from lorabridge.bridge.stream.head import move_head
from lorabridge.bridge.stream.keys import BODY, Keys
from lorabridge.bridge.trajectory import Group
from tests.archives import drain, make_archiver, send
from tests.factories import make_residency, make_span, make_trajectory, make_turn
from tests.stores import publish

VERSIONS = 6


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "run" / "store"))
    store.allocate_epoch("policy")
    for version in range(1, VERSIONS + 1):
        publish(store, version)
    return store


def digest(store: Store, version: int) -> str:
    return store.manifest("policy", version).digest


def serves(store: Store, version: int, generator: str, instance: str = "instance") -> Resident:
    residency = make_residency(version, version, instance=instance)
    served = {"policy": msgspec.structs.replace(residency.serves["policy"], digest=digest(store, version))}
    return Resident(residency=msgspec.structs.replace(residency, generator=generator, serves=served), swap_ms={})


def happened(client: redis.Redis, keys: Keys, happening: Resident) -> None:
    client.xadd(keys.events, event_fields("worker", 1, happening))


def write_config(folder: Path, section: RedisSection, run_id: str, **more: str) -> Path:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    password = f"password_file = '{section.password_file}'\n" if section.password_file else ""
    (run / "config.toml").write_text(
        f"[run]\nid = '{run_id}'\ndir = '{run}'\n[policy]\nname = 'policy'\n"
        f"[redis]\nurl = '{section.url}'\nconnect_s = 0.5\n{password}"
        + "".join(f"[{name}]\n{body}\n" for name, body in more.items())
    )
    return run


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    def ask(*arguments: object) -> tuple[int, Any]:
        code = cli.run(["store", *map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else err

    return ask


Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(redis_section: RedisSection, keys: Keys, store: Store, tmp_path: Path) -> Path:
    return write_config(tmp_path, redis_section, keys.run_id)


# ls


def test_ls_shows_the_line_and_what_is_gone(
    run: Path, store: Store, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    store.remove([digest(store, 1)], set)
    code, answer = ask("ls", "--run", run)
    assert code == 0
    assert [(row["version"], row["there"]) for row in answer["versions"]] == [
        (version, version > 1) for version in range(1, VERSIONS + 1)
    ]
    assert answer["versions"][0]["digest"] == digest(store, 1)
    assert (answer["newest"], answer["adapters"]) == (VERSIONS, VERSIONS - 1)
    assert answer["bytes"] == sum(store.adapters().values())
    assert [row["version"] for row in ask("ls", "--run", run, "--last", 2)[1]["versions"]] == [5, 6]
    assert len(ask("ls", "--config", run / "config.toml", "--last", 0)[1]["versions"]) == VERSIONS
    assert cli.run(["store", "ls", "--run", str(run)]) == 0
    out = capsys.readouterr().out
    assert "gone" in out
    assert f"policy: {VERSIONS} versions" in out


def test_ls_of_a_policy_without_a_version(run: Path, ask: Ask) -> None:
    code, answer = ask("ls", "--run", run, "--set", "policy.name=none")
    assert (code, answer["versions"], answer["newest"]) == (0, [], 0)


# gc


def test_gc_keeps_the_newest_and_says_first_what_would_go(run: Path, store: Store, ask: Ask) -> None:
    old = sorted(digest(store, version) for version in range(1, 5))
    sizes = store.adapters()
    code, answer = ask("gc", "--run", run, "--keep", 2, "--dry-run")
    assert (code, answer["removed"], answer["dry_run"], answer["redis"]) == (0, old, True, True)
    assert (answer["bytes"], answer["trajectories"]) == (sum(sizes[each] for each in old), None)
    assert store.adapters() == sizes
    code, after = ask("gc", "--run", run, "--keep", 2)
    assert (code, after) == (0, answer | {"dry_run": False})
    assert store.adapters().keys() == {digest(store, 5), digest(store, 6)}
    assert ask("gc", "--run", run, "--keep", 2)[1]["removed"] == []


def test_gc_takes_keep_from_the_configuration_and_refuses_without(
    redis_section: RedisSection, keys: Keys, store: Store, tmp_path: Path, ask: Ask
) -> None:
    run = write_config(tmp_path, redis_section, keys.run_id)
    code, message = ask("gc", "--run", run)
    assert code == 2
    assert "keep is 0" in message
    run = write_config(tmp_path, redis_section, keys.run_id, store="keep = 5")
    assert ask("gc", "--run", run)[1]["removed"] == [digest(store, 1)]


def test_gc_spares_what_live_servers_serve_and_what_redis_names(
    run: Path, client: redis.Redis, keys: Keys, store: Store, ask: Ask
) -> None:
    for version in (1, 2):
        happened(client, keys, serves(store, version, "http://a"))
    happened(client, keys, serves(store, 3, "http://b"))
    client.xadd(keys.events, {BODY: b"not an event"})
    move_head(client, keys, store.manifest("policy", 4))
    _, answer = ask("gc", "--run", run, "--keep", 1)
    assert answer["removed"] == sorted([digest(store, 1), digest(store, 5)])
    happened(client, keys, serves(store, 6, "http://a", "restarted"))
    assert ask("gc", "--run", run, "--keep", 1)[1]["removed"] == [digest(store, 2)]


def test_gc_says_which_trajectories_can_no_longer_be_recomputed(
    run: Path, client: redis.Redis, keys: Keys, store: Store, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    for group, versions in enumerate([(1, 2), (2, 5), (5, 6)]):
        spans = tuple(
            msgspec.structs.replace(make_span(version, 2 * n, 2 * n + 2), digest=digest(store, version))
            for n, version in enumerate(versions)
        )
        trajectory = make_trajectory(group, turns=(make_turn(spans), make_turn(spans)))
        send(client, keys.trajectories, Group(group=group, attempt=1, worker="w", trajectories=(trajectory,)))
    drain(make_archiver(client, keys, run / "ledger"))
    waiting = ask("gc", "--run", run, "--keep", 2, "--dry-run")[1]
    assert waiting["removed"] == sorted([digest(store, 3), digest(store, 4)]), "nobody has trained on the others yet"
    assert waiting["trajectories"] == 0
    client.delete(keys.trajectories)  # somebody has, and the archiver has trimmed them
    assert ask("gc", "--run", run, "--keep", 2, "--dry-run")[1]["trajectories"] == 2
    assert cli.run(["store", "gc", "--run", str(run), "--keep", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 adapters, ")
    assert "2 trajectories in the ledger can no longer be recomputed" in out


def test_gc_of_a_run_whose_redis_is_gone_goes_by_its_ledger(
    redis_section: RedisSection, client: redis.Redis, keys: Keys, store: Store, tmp_path: Path, ask: Ask,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    happened(client, keys, serves(store, 2, "http://a"))
    gone = RedisSection(url=f"redis://127.0.0.1:{free_port()}/0")
    run = write_config(tmp_path, gone, keys.run_id)
    code, message = ask("gc", "--run", run, "--keep", 1)
    assert code == 3, "without either nothing says what is in use"
    assert "does not answer" in message
    assert len(store.adapters()) == VERSIONS
    drain(make_archiver(client, keys, run / "ledger"))
    _, answer = ask("gc", "--run", run, "--keep", 1)
    assert answer["redis"] is False
    assert answer["removed"] == sorted(digest(store, version) for version in (1, 3, 4, 5))
    assert cli.run(["store", "gc", "--run", str(run), "--keep", "1"]) == 0
    assert "Redis does not answer" in capsys.readouterr().out


def test_a_run_and_a_configuration_are_not_given_both(run: Path, ask: Ask, tmp_path: Path) -> None:
    code, message = ask("gc", "--run", run, "--config", run / "config.toml", "--keep", 1)
    assert code == 2
    assert "Give one of them" in message
    code, message = ask("ls", "--run", tmp_path / "elsewhere")
    assert code == 2
    assert "not the folder of a run" in message


# What is in use


def test_residents_are_followed_as_they_change(client: redis.Redis, keys: Keys, store: Store) -> None:
    known = serves(store, 1, "http://old").residency
    residents = Residents(client, keys, [known, serves(store, 2, "http://a").residency])
    assert residents.digests() == {digest(store, 1), digest(store, 2)}
    happened(client, keys, serves(store, 3, "http://a"))
    happened(client, keys, serves(store, 4, "http://b"))
    assert residents.digests() == {digest(store, version) for version in (1, 3, 4)}
    client.xtrim(keys.events, maxlen=0)  # as the archiver does
    assert residents.digests() == {digest(store, version) for version in (1, 3, 4)}
    for version in (4, 5, 6) * 500:
        happened(client, keys, serves(store, version, "http://a"))
    assert residents.digests() == {digest(store, version) for version in (1, 4, 6)}
