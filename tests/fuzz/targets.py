"""What is damaged, and who must stand it: each target reads damaged bytes, and says whether it took or refused them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from lorabridge.bridge import codec
from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.base_shapes import Shapes
from lorabridge.bridge.digest import parse_config, semantic_config
from lorabridge.bridge.errors import BridgeError
from lorabridge.bridge.events import Event, Resident
from lorabridge.bridge.ledger import tables
from lorabridge.bridge.ledger.archiver import write_file
from lorabridge.bridge.ledger.commits import Commit, Stretch, append, name_of, read_log
from lorabridge.bridge.ledger.reader import Ledger
from lorabridge.bridge.servable import check_adapter
from lorabridge.bridge.settings import load
from lorabridge.bridge.stream.keys import BODY
from lorabridge.rollout.plugin.control import Control
from lorabridge.rollout.plugin.doors import PublicDoor, control_app
from lorabridge.rollout.wire import GENERATE, EngineFacts, SwapReply, SwapRequest
from tests import factories
from tests.fuzz.mutate import bytes_of, value_of

Target = Callable[[Random], str]
TAKEN, REFUSED = "taken", "refused"
_HEADERS = {"Authorization": "Bearer token"}
_TOML = (
    b'[run]\nid = "a"\nseed = 3\n[policy]\nrank = 8\ntarget_modules = ["q_proj"]\n[publish]\nwait = "all"\n'
    b'[store]\nurl = "s3://bucket/prefix"\n[generators]\nurls = ["http://h:80"]\ncontrol = ["unix:/s"]\n'
    b"[trainer]\nextra = {beta = 0.5}\n[lag]\nmax = 4\n"
)


def refusing(read: Callable[[bytes], None], body: bytes) -> str:
    """Any error but ours passes through."""
    try:
        read(body)
    except BridgeError:
        return REFUSED
    return TAKEN


def _record(valid: Any, dump: Callable[[Any], bytes], form: Any, decode: Callable[[Any, bytes], Any]) -> Target:
    kind, whole = type(valid), dump(valid)

    def read(body: bytes) -> None:
        again = dump(decode(kind, body))
        assert dump(decode(kind, again)) == again

    def run(random: Random) -> str:
        if random.random() < 0.5:
            return refusing(read, bytes_of(whole, random))
        return refusing(read, form.encode(value_of(form.decode(whole), random)))

    return run


def _adapter(random: Random) -> str:
    shapes = Shapes(linear={factories.MODULE.removeprefix("base_model.model."): (factories.WIDTH,) * 2}, closed={})
    tensors = factories.make_tensors()
    config = json.dumps(factories.make_config()).encode()
    if random.random() < 0.5:
        config = json.dumps(value_of(json.loads(config), random)).encode()
    elif random.random() < 0.5:
        config = bytes_of(config, random)
    elif random.random() < 0.5:
        tensors = bytes_of(tensors, random)
    else:
        length = int.from_bytes(tensors[:8], "little")
        header = json.dumps(value_of(json.loads(tensors[8 : 8 + length]), random)).encode()
        tensors = len(header).to_bytes(8, "little") + header + tensors[8 + length :]

    def read(_: bytes) -> None:
        check_adapter(Adapter(config=semantic_config(parse_config(config)), tensors=tensors), 8, shapes)

    return refusing(read, b"")


class _Swapper:
    quarantine = None
    residency = factories.make_residency(3, 1)

    def __init__(self) -> None:
        self.instance = self

    def begin(self, policy: str) -> str:
        return policy

    def end(self, name: str) -> None: ...

    async def swap(self, request: SwapRequest) -> SwapReply:
        return SwapReply(residency=self.residency, phases_ms={})


async def _restarts(ids: list[str]) -> list[list[int] | None]:
    return [[len(one)] for one in ids]


def _door(client: TestClient, path: str, valid: Any) -> Target:
    whole = msgspec.json.encode(valid)

    def run(random: Random) -> str:
        damaged = bytes_of(whole, random) if random.random() < 0.5 else json.dumps(value_of(valid, random)).encode()
        status = client.post(path, content=damaged, headers=_HEADERS).status_code
        assert status == 200 or 400 <= status < 500, status
        return TAKEN if status == 200 else REFUSED

    return run


def _settings(folder: Path) -> Target:
    file = folder / "settings.toml"

    def read(body: bytes) -> None:
        file.write_bytes(body)
        load(file)

    return lambda random: refusing(read, bytes_of(_TOML, random))


def _write_ledger(folder: Path) -> list[Path]:
    """One commit of a group and a manifest; its files."""
    streams: dict[str, codec.Record] = {"trajectories": factories.make_group(), "announce": factories.make_manifest()}
    files = []
    for stream, record in streams.items():
        for table, rows in tables.build(stream, [("1-0", {BODY: codec.encode(record)})]).items():
            (folder / table).mkdir(parents=True, exist_ok=True)
            files.append(write_file(folder, f"{table}/00000001-1.parquet", table, rows))
    commit = Commit(
        sequence=1, previous=None, files=tuple(files), fence=1, created_ms=1,
        streams={stream: Stretch(first="1-0", last="1-0", entries=1) for stream in streams},
    )  # fmt: skip
    assert append(folder, read_log(folder), commit)
    return [folder / name_of(1), *(folder / file.path for file in files)]


def _ledger(folder: Path) -> Target:
    """Whatever is damaged, a ledger says what it held or refuses: it is never read as something else."""
    files = {file: file.read_bytes() for file in _write_ledger(folder)}

    def rows() -> tuple[Any, ...]:
        ledger = Ledger(folder)
        return list(ledger.trajectories()), ledger.manifests(), list(ledger.events())

    held = rows()

    def run(random: Random) -> str:
        file = random.choice(list(files))
        try:
            file.write_bytes(bytes_of(files[file], random))
            assert rows() == held
            return TAKEN
        except BridgeError:
            return REFUSED
        finally:
            file.write_bytes(files[file])

    return run


@contextmanager
def targets(folder: Path) -> Iterator[dict[str, Target]]:
    """Every target by name; ``folder`` is theirs to write in."""
    facts = EngineFacts(
        base=factories.BASE, dtype="float32", logprobs_mode="processed_logprobs", max_lora_rank=8, max_loras=2,
        max_model_len=64,
    )  # fmt: skip
    fake: Any = _Swapper()
    control = Control(fake, fake, facts, running=lambda: 0, restarts=_restarts)
    inner = Starlette()
    inner.add_route(GENERATE, lambda request: PlainTextResponse("ok"), methods=["POST"])
    event = Event(source="s", at_ms=1, happening=Resident(residency=_Swapper.residency, swap_ms={"load": 1.0}))
    swap = {"policy": "p", "version": 1, "digest": factories.digest_of("a"), "instance": "i", "epoch": 0, "kv": "keep"}
    packed: dict[str, codec.Record] = {
        "group": factories.make_group(), "event": event, "announced manifest": factories.make_manifest(),
        "run record": factories.make_run_record(),
    }  # fmt: skip
    found = {name: _record(one, codec.encode, msgspec.msgpack, codec.decode) for name, one in packed.items()}
    with (
        TestClient(control_app(control, "token")) as private,
        TestClient(PublicDoor(inner, State({"lorabridge": control}))) as public,
    ):
        yield found | {
            "manifest": _record(factories.make_manifest(), codec.encode_json, msgspec.json, codec.decode_json),
            "adapter": _adapter,
            "swap": _door(private, "/swap", swap),
            "restarts": _door(private, "/restarts", ["a", "b"]),
            "generate": _door(public, GENERATE, {"model": "policy", "token_ids": [1, 2], "sampling_params": {}}),
            "settings": _settings(folder),
            "ledger": _ledger(folder / "ledger"),
        }
