"""Laws 1 and 2 where several processes meet; in a folder, where one dies and where the disk is full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.digest import hex_of
from lorabridge.bridge.errors import DiskFull
from lorabridge.bridge.store import local as local_store
from lorabridge.bridge.store import open_store
from tests.factories import make_manifest
from tests.stores import Place, names, publish

# Several processes, and processes that die


def start(script: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


RIVAL = """
import sys
import msgspec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.errors import VersionTaken
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import open_store

url, name = sys.argv[1:]
store = open_store(url)
template = msgspec.json.decode(sys.stdin.readline(), type=Manifest)
digest = store.put(Adapter(config=b"{}", tensors=name.encode()))
print("ready", flush=True)
sys.stdin.readline()
for version in range(1, 13):
    manifest = msgspec.structs.replace(template, version=version, digest=digest)
    try:
        store.commit(manifest)
        print(f"won {version}")
    except VersionTaken:
        pass
print("done", flush=True)
sys.stdin.readline()
print("epoch", store.allocate_epoch("policy"))
"""


def say(processes: list[subprocess.Popen[str]], word: str) -> None:
    """Give every process one line, and only then let anybody read what they answer."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(word + "\n")
        process.stdin.flush()


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    assert process.stdout is not None
    return list(iter(process.stdout.readline, last + "\n"))


def test_of_several_processes_exactly_one_commits_each_version_and_each_gets_its_own_epoch(
    shared_place: Place,
) -> None:
    store = shared_place.open()
    store.allocate_epoch("policy")
    rivals = [start(RIVAL, store.url, f"rival {n}") for n in range(4)]
    try:
        say(rivals, msgspec.json.encode(make_manifest()).decode())
        assert [lines_until(rival, "ready") for rival in rivals] == [[]] * len(rivals)
        say(rivals, "go")
        wins = [(int(line.split()[1]), n) for n, rival in enumerate(rivals) for line in lines_until(rival, "done")]
        say(rivals, "epoch")
        epochs = [rival.communicate()[0] for rival in rivals]
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert sorted(version for version, _ in wins) == list(range(1, 13))
    won = dict(wins)
    for version in range(1, 13):
        expected = Adapter(config=b"{}", tensors=f"rival {won[version]}".encode())
        assert store.read(store.manifest("policy", version).digest) == expected
    assert sorted(epochs) == [f"epoch {epoch}\n" for epoch in (2, 3, 4, 5)]


# Publishes two versions in a fork of its own for every step n of the file system (open, write, sync, rename, link,
# mkdir, remove), each killed at that step, until one comes through. Prints how many there were.
CRASHES = """
import os, signal, sys
from pathlib import Path
import msgspec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import open_store

root = sys.argv[1]
template = msgspec.json.decode(sys.stdin.readline(), type=Manifest)
STEPS = ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir")

def publish(root):
    store = open_store(root)
    store.allocate_epoch("policy")
    for version in (1, 2):
        digest = store.put(Adapter(config=b"{}", tensors=bytes([version]) * 10_000))
        store.commit(msgspec.structs.replace(template, version=version, digest=digest))

def die_at(n, root):
    seen = 0
    def step(event, args=()):
        nonlocal seen
        if event == "sync" or event in STEPS and str(args[0]).startswith(root):
            seen += 1
            if seen > n:
                os.kill(os.getpid(), signal.SIGKILL)
    sync, open_path = os.fsync, Path.open

    def opened(*args, **options):
        stream = open_path(*args, **options)
        step("sync")  # created, and nothing in it yet
        return stream

    os.fsync = lambda handle: (step("sync"), sync(handle))
    Path.open = opened
    sys.addaudithook(step)

publish(os.path.join(root, "warm"))
n = 0
while True:
    place = os.path.join(root, str(n))
    if (child := os.fork()) == 0:
        die_at(n, place)
        publish(place)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.waitstatus_to_exitcode(status) == 0:
        break
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    n += 1
print(n)
"""


def test_a_process_killed_at_any_step_leaves_only_whole_things_and_publishing_goes_on(tmp_path: Path) -> None:
    process = start(CRASHES, str(tmp_path))
    crashes = int(process.communicate(msgspec.json.encode(make_manifest()).decode() + "\n")[0])
    assert process.returncode == 0
    assert crashes > 30
    for n in range(crashes + 1):
        store = open_store(str(tmp_path / str(n)))
        for name in names(tmp_path / str(n) / "adapters" / "sha256"):
            if not name.startswith("."):
                store.read(f"sha256:{name}")
        newest = store.newest("policy")
        for version in range(1, newest.version + 1 if newest else 1):
            store.read(store.manifest("policy", version).digest)
        if n == crashes:
            assert newest is not None
            assert newest.version == 2
        version, epoch = newest.version + 1 if newest else 1, store.allocate_epoch("policy")
        assert publish(store, version, epoch) == store.newest("policy")


# A disk that is full


FULL = """
import json, resource, sys
from pathlib import Path
import msgspec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.errors import DiskFull
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.store import open_store

root, cache, limit, filler = sys.argv[1:]
template = msgspec.json.decode(sys.stdin.readline(), type=Manifest)
store = open_store(root)
store.allocate_epoch("policy")
digest = store.put(Adapter(config=b"{}", tensors=b"1" * 10_000))
if filler:
    with open(filler, "wb", buffering=0) as stream:
        try:
            while stream.write(b"0" * 4096): pass
        except OSError: pass
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
outcomes = {}
for name, call in {
    "put": lambda: store.put(Adapter(config=b"{}", tensors=b"2" * 10_000)),
    "fetch": lambda: store.fetch(digest, Path(cache)),
    "commit": lambda: store.commit(msgspec.structs.replace(template, digest=digest)),
}.items():
    try:
        call()
        outcomes[name] = "done"
    except DiskFull as error:
        outcomes[name] = error.problem
print(json.dumps(outcomes))
"""


@pytest.fixture(params=["file size limit", "full tmpfs"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder where little can be written, and a file to fill it with ('' where a limit does it)."""
    if request.param == "file size limit":
        yield tmp_path, ""
        return
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run([mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a small file system here")
    try:
        yield disk, str(disk / "filler")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_said_so_and_leaves_nothing_half_written(full_disk: tuple[Path, str]) -> None:
    disk, filler = full_disk
    root, cache = disk / "store", disk / "cache"
    process = start(FULL, str(root), str(cache), "300", filler)
    answer = process.communicate(msgspec.json.encode(make_manifest()).decode() + "\n")[0]
    assert process.returncode == 0
    outcomes = json.loads(answer)
    for name in ("put", "fetch", "commit"):
        assert outcomes[name].startswith("no room left to write"), name
    store, kept = open_store(str(root)), Adapter(config=b"{}", tensors=b"1" * 10_000)
    assert names(root / "adapters" / "sha256") == [hex_of(kept.digest)]
    assert store.read(kept.digest) == kept
    assert store.newest("policy") is None
    assert names(root / "policies" / "policy") == ["epochs", "lock"]
    assert names(cache) == []


def test_a_disk_that_has_room_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, body: bytes) -> None:
        raise OSError(28, "No space left on device")

    store = open_store(str(tmp_path))
    store.allocate_epoch("policy")
    with monkeypatch.context() as patch:
        patch.setattr(local_store, "write_synced", full)
        with pytest.raises(DiskFull, match="no room left to write adapter sha256:"):
            publish(store)
    assert publish(store) == store.newest("policy")
