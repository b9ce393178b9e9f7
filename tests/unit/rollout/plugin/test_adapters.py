"""Law 4 with real files: a path of its own for every load, and copies that stay as long as they may be read."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from lorabridge.bridge import codec
from lorabridge.bridge.errors import DigestMissing, DiskFull
from lorabridge.bridge.residency import Residency
from lorabridge.bridge.store import open_store
from lorabridge.rollout.plugin.adapters import FileLog, LocalAdapters
from tests.factories import digest_of, make_adapter, make_residency


def test_every_link_is_new_and_leads_to_the_verified_adapter(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    digest = store.put(make_adapter(1))
    adapters = LocalAdapters(store, tmp_path / "local")
    links = [adapters.link(digest) for _ in range(3)]
    assert len(set(links)) == 3
    for link in links:
        assert (link / "adapter_model.safetensors").read_bytes() == make_adapter(1).tensors
    with pytest.raises(DigestMissing):
        adapters.link(digest_of("nothing"))


def test_what_is_served_and_the_last_few_stay(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    adapters = LocalAdapters(store, tmp_path / "local")
    digests = [store.put(make_adapter(seed)) for seed in range(8)]
    links = [adapters.link(digest) for digest in digests]
    adapters.keep_only({digests[0]})
    there = [link.exists() for link in links]
    assert there == [True, False, False, False, True, True, True, True]
    assert adapters.link(digests[1]).exists()  # fetched again when it is asked for again


def test_records_are_on_disk_one_per_line_in_order(tmp_path: Path) -> None:
    log = FileLog(tmp_path / "residency" / "i.jsonl")
    records = [make_residency(epoch, 1) for epoch in range(3)]
    for record in records:
        log.append(record)
    lines = (tmp_path / "residency" / "i.jsonl").read_bytes().splitlines()
    assert [codec.decode_json(Residency, line) for line in lines] == records == log.records


def test_a_record_that_did_not_fit_on_the_disk_leaves_no_half_line(tmp_path: Path) -> None:
    file = tmp_path / "residency" / "i.jsonl"
    log = FileLog(file)
    records = [make_residency(epoch, 1) for epoch in range(3)]
    log.append(records[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(DiskFull, match=r"i\.jsonl"):
            log.append(records[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.append(records[2])
    lines = file.read_bytes().splitlines()
    assert [codec.decode_json(Residency, line) for line in lines] == [records[0], records[2]] == log.records
