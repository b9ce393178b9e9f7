"""Only adapters that vLLM can serve get through, and only ``AdapterError`` comes out of bad bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.adapter import (
    SERVABLE_RANKS,
    Adapter,
    check_config,
    largest_rank,
    module_names,
    read_header,
    slot_rank,
)
from lorabridge.bridge.errors import AdapterCorrupt, AdapterError, AdapterUnservable
from lorabridge.bridge.servable import check_adapter
from tests.factories import SHAPES, make_adapter, make_arrays, make_config, make_tensors

GOOD = make_tensors()


def file_of(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with this header, which need not be JSON."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_header_is_read_as_safetensors_wrote_it() -> None:
    header = read_header(GOOD)
    assert {name: list(found.shape) for name, found in header.items()} == {
        name: list(array.shape) for name, array in make_arrays().items()
    }
    assert {found.dtype for found in header.values()} == {"F32"}
    assert module_names(header) == ("q_proj",)


def test_metadata_is_not_a_tensor() -> None:
    assert read_header(file_of({"__metadata__": {"format": "pt"}})) == {}


@pytest.mark.parametrize(
    "tensors",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        (2**63).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{}",
        file_of(b""),
        file_of(b"[]"),
        file_of(b"null"),
        file_of(b"{\xff}"),
        file_of(b'{"a":' + b"[" * 100_000),
        file_of(b'{"a":{"dtype":"F32","shape":' + b"[" * 100_000),
        file_of({"a": 1}),
        file_of({"a": {"dtype": "F32", "shape": [1]}}, b"\0" * 4),
        file_of({"a": tensor([1], 0, 4)}),
        file_of({"a": tensor([1], 0, 4)}, b"\0" * 5),
        file_of({"a": tensor([2], 0, 4)}, b"\0" * 4),
        file_of({"a": tensor([1], 4, 8)}, b"\0" * 8),
        file_of({"a": tensor([1], 4, 0)}, b"\0" * 4),
        file_of({"a": tensor([1], 0, 4), "b": tensor([1], 0, 4)}, b"\0" * 4),
        file_of({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, b"\0" * 12),
        file_of({"a": tensor([-2, -2], 0, 16)}, b"\0" * 16),
        file_of({"a": tensor([-1], 0, -4)}),
        file_of({"a": tensor([1] * 9, 0, 4)}, b"\0" * 4),
        file_of({"a": tensor([0], 0, 0, "I64")}),
        file_of({"a": tensor([1], 0, 8, "I64")}, b"\0" * 8),
        file_of({"a": tensor([1.5], 0, 4)}, b"\0" * 4),  # type: ignore[list-item]
        b"\x80\x04\x95pickle",
        b"PK\x03\x04" + b"\0" * 100,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    ],
)
def test_bytes_that_are_no_adapter_are_corrupt(tensors: bytes) -> None:
    with pytest.raises(AdapterCorrupt):
        read_header(tensors)


def test_a_file_cut_short_anywhere_is_corrupt() -> None:
    for length in range(len(GOOD)):
        with pytest.raises(AdapterCorrupt):
            read_header(GOOD[:length])


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_read_or_corrupt_and_nothing_else(changes: list[tuple[int, int]]) -> None:
    body = bytearray(GOOD)
    for at, byte in changes:
        body[at % 300 if at % 2 else at] = byte  # half of them in the header, where it matters
    try:
        read_header(bytes(body))
    except AdapterCorrupt:
        pass


@given(st.binary(max_size=300))
def test_any_header_is_read_or_corrupt_and_nothing_else(header: bytes) -> None:
    try:
        read_header(file_of(header))
    except AdapterCorrupt:
        pass


UNSERVABLE: dict[str, dict[str, Any]] = {
    "peft_type": {"peft_type": "LOHA"},
    "use_dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "target_parameters": {"target_parameters": ["experts.w1"]},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "layer_replication": {"layer_replication": [[0, 4]]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1]},
    "use_qalora": {"use_qalora": True},
    "use_bdlora": {"use_bdlora": {"nblocks": 2}},
    "arrow_config": {"arrow_config": {"top_k": 3}},
    "kasa_config": {"kasa_config": {"beta": 1}},
    "init_lora_weights": {"init_lora_weights": "PiSSA_niter_16"},
    "init_lora_weights 'olora'": {"init_lora_weights": "olora"},
    "init_lora_weights 'loftq'": {"init_lora_weights": "loftq"},
    "init_lora_weights 'corda'": {"init_lora_weights": "corda"},
    "init_lora_weights 'lora_ga'": {"init_lora_weights": "lora_ga"},
    "a_kind_of_a_later_release": {"a_kind_of_a_later_release": 1},
    "monteclora_config": {"monteclora_config": {"samples": 2}},
    "target_modules is missing": {"target_modules": None},
    "target_modules is missing, and": {"target_modules": []},
    "lora_alpha is 0": {"lora_alpha": 0},
    "q_proj is 0": {"alpha_pattern": {"q_proj": 0}},
    "init_lora_weights 'of a later release'": {"init_lora_weights": "of a later release"},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "embed_tokens": {"target_modules": "model.embed_tokens"},
    "rank 16 is above the 8": {"r": 16},
    "rank 32 is above the 8": {"rank_pattern": {"q_proj": 32}},
}


@pytest.mark.parametrize("named", UNSERVABLE)
def test_a_configuration_that_vllm_cannot_serve_is_refused_and_the_field_named(named: str) -> None:
    with pytest.raises(AdapterUnservable, match=named):
        check_config(make_config(**UNSERVABLE[named]), max_rank=8)
    with pytest.raises(AdapterUnservable, match=named):
        check_adapter(make_adapter(**UNSERVABLE[named]), max_rank=8, shapes=SHAPES)


@pytest.mark.parametrize(
    "config",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"use_rslora": True},
        {"target_modules": "all-linear"},
        {"alpha_pattern": {"q_proj": 4}},
        {"layers_to_transform": [0, 1]},
        {"init_lora_weights": "mica", "qalora_group_size": 16, "megatron_core": "megatron.core"},
        {"a_kind_of_a_later_release": None, "another": False, "a_third": {}},
        {"lora_alpha": -0.5},
        {"r": 1},
    ],
)
def test_a_configuration_that_vllm_serves_passes(config: dict[str, Any]) -> None:
    check_config(make_config(**config), max_rank=8)


@pytest.mark.parametrize(
    "config",
    [
        {"r": 0},
        {"r": -8},
        {"r": None},
        {"r": "8"},
        {"r": 8.0},
        {"r": True},
        {"rank_pattern": [8]},
        {"rank_pattern": {"q_proj": "8"}},
        {"rank_pattern": {"r": 0}},
        {"target_modules": [1]},
        {"target_modules": 5},
        {"target_modules": [None, "q_proj"]},
        {"rank_pattern": {"(": 8}},
        {"lora_alpha": None},
        {"lora_alpha": "16"},
        {"lora_alpha": True},
        {"alpha_pattern": [8]},
        {"alpha_pattern": {"q_proj": "8"}},
        {"alpha_pattern": {"(": 8}},
        {"target_modules": "("},
        {"exclude_modules": [1]},
        {"exclude_modules": "("},
        {"layers_to_transform": ["0"]},
        {"layers_to_transform": [True]},
        {"layers_to_transform": 0, "layers_pattern": 1},
        {"layers_to_transform": 0, "layers_pattern": "("},
    ],
)
def test_a_configuration_of_the_wrong_types_is_corrupt(config: dict[str, Any]) -> None:
    body = json.dumps(make_config(**config)).encode()
    with pytest.raises(AdapterCorrupt):
        check_adapter(Adapter(config=body, tensors=GOOD), max_rank=64, shapes=SHAPES)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


FIELDS = [*make_config(), "exclude_modules", "layers_to_transform", "layers_pattern"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3))
def test_any_json_as_a_field_is_served_or_refused_by_name(changes: dict[str, Any]) -> None:
    body = json.dumps(make_config(**changes)).encode()
    try:
        check_adapter(Adapter(config=body, tensors=GOOD), max_rank=64, shapes=SHAPES)
    except AdapterError as error:
        assert error.action


def test_the_largest_rank_is_that_of_any_module() -> None:
    assert largest_rank(make_config()) == 8
    assert largest_rank(make_config(rank_pattern={"q_proj": 32, "k_proj": 4})) == 32


@given(st.integers(1, 512))
def test_a_slot_is_the_smallest_that_takes_the_rank(rank: int) -> None:
    slot = slot_rank(rank)
    assert slot in SERVABLE_RANKS
    assert slot >= rank
    assert not any(rank <= smaller < slot for smaller in SERVABLE_RANKS)


def test_a_rank_above_vllms_largest_is_unservable() -> None:
    with pytest.raises(AdapterUnservable, match="513"):
        slot_rank(513)
