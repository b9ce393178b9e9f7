"""What vLLM would refuse, or serve wrong without a word, is refused before it is published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from lorabridge.bridge.adapter import Adapter, read_header
from lorabridge.bridge.base_shapes import Shapes
from lorabridge.bridge.errors import AdapterCorrupt, AdapterUnservable
from lorabridge.bridge.servable import check_adapter, check_targets
from tests.factories import MODULE, SHAPES, WIDTH, make_adapter, make_arrays, make_config, make_tensors

OTHER = MODULE.replace("q_proj", "v_proj")
GOOD = make_tensors()
BOTH = ["q_proj", "v_proj"]


def test_a_good_adapter_passes_and_its_header_comes_back() -> None:
    assert check_adapter(make_adapter(), max_rank=8, shapes=SHAPES) == read_header(GOOD)


A, B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({}, "empty"),
        ({A: make_arrays()[A]}, "has no lora_B"),
        ({B: make_arrays()[B]}, "has no lora_A"),
        (make_arrays() | {A: make_arrays(rank=4)[A]}, "rank 8 on the base's 16 x 16 makes"),
        (make_arrays(rank=4), "rank 8 on the base's 16 x 16 makes"),
        (make_arrays() | {f"{MODULE}.lora_magnitude_vector": np.ones(16, np.float32)}, "is not base_model"),
        (make_arrays() | {f"{MODULE}.lora_embedding_A": np.ones((8, 16), np.float32)}, "is not base_model"),
        (make_arrays() | {f"{MODULE}.lora_B.bias": np.ones(16, np.float32)}, "is not base_model"),
        (make_arrays() | {f"{A}.again": make_arrays()[A], f"{B}.again": make_arrays()[B]}, "is not base_model"),
        (make_arrays() | {"base_model.model.score.weight": np.ones((8, 8), np.float32)}, "is not base_model"),
        ({name.replace("weight", "default.weight"): a for name, a in make_arrays().items()}, "is not base_model"),
        (make_arrays(modules=("base_model.model.lm_head",)), "lm_head is the output head"),
        (make_arrays(modules=("base_model.model.model.norm",)), "model.norm is no linear layer"),
        ({A: np.ones((8, 16, 1), np.float32), B: make_arrays()[B]}, "has shape"),
        ({A: np.ones(8, np.float32), B: make_arrays()[B]}, "has shape"),
        ({A: np.array(1, np.float32), B: make_arrays()[B]}, "has shape"),
        (make_arrays(modules=(MODULE, OTHER)), "v_proj.lora_A.weight is for a module that target_modules does not"),
    ],
)
def test_tensors_that_vllm_would_serve_wrong_are_refused(arrays: dict[str, Any], named: str) -> None:
    with pytest.raises(AdapterUnservable, match=named):
        check_adapter(Adapter.of(make_config(), make_tensors(arrays)), max_rank=64, shapes=SHAPES)


def test_each_module_has_the_rank_that_its_pattern_gives_it_and_no_other() -> None:
    arrays = make_arrays(rank=8, modules=(MODULE,)) | make_arrays(rank=16, modules=(OTHER,))
    right, swapped = ({"target_modules": BOTH, "rank_pattern": {name: 16}} for name in ("v_proj", "q_proj"))
    check_adapter(Adapter.of(make_config(**right), make_tensors(arrays)), max_rank=16, shapes=SHAPES)
    with pytest.raises(AdapterUnservable, match="rank 16 on"):
        check_adapter(Adapter.of(make_config(**swapped), make_tensors(arrays)), max_rank=16, shapes=SHAPES)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_keys_that_give_one_module_two_values_are_refused_since_their_order_is_not_kept(field: str) -> None:
    two: dict[str, Any] = {field: {"q_proj": 8, "layers.0.self_attn.q_proj": 4}}
    with pytest.raises(AdapterUnservable, match=f"{field} gives model.layers.0.self_attn.q_proj both 4 .* and 8"):
        check_adapter(make_adapter(**two), max_rank=8, shapes=SHAPES)
    one: dict[str, Any] = {field: {"q_proj": 8, ".*q_proj": 8, "v_proj": 4}}
    check_adapter(make_adapter(**one), max_rank=8, shapes=SHAPES)


def test_corrupt_tensors_are_corrupt_not_unservable() -> None:
    with pytest.raises(AdapterCorrupt):
        check_adapter(Adapter.of(make_config(), GOOD[:-1]), max_rank=8, shapes=SHAPES)


def test_an_adapter_that_fits_the_base_passes() -> None:
    check_adapter(make_adapter(), max_rank=8, shapes=SHAPES)


@pytest.mark.parametrize(
    "module",
    [
        "base_model.model.model.layers.9.self_attn.q_proj",
        "base_model.model.language_model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        "base_model.model.base_model.model.model.layers.0.self_attn.q_proj",
    ],
)
def test_a_name_that_no_module_of_the_base_has_is_refused(module: str) -> None:
    with pytest.raises(AdapterUnservable, match=r"which would answer for it|is not base_model"):
        check_adapter(Adapter.of(make_config(), make_tensors(make_arrays(modules=(module,)))), 8, SHAPES)


@pytest.mark.parametrize(
    ("name", "shape"), [(A, (8, WIDTH - 1)), (A, (8, WIDTH + 1)), (B, (WIDTH - 1, 8)), (B, (WIDTH + 1, 8))]
)
def test_a_matrix_that_does_not_fit_the_bases_is_refused(name: str, shape: tuple[int, int]) -> None:
    arrays = make_arrays() | {name: np.ones(shape, np.float32)}
    with pytest.raises(AdapterUnservable, match=rf"{name} has shape \[{shape[0]}, {shape[1]}\]; rank 8"):
        check_adapter(Adapter.of(make_config(), make_tensors(arrays)), 8, SHAPES)


@pytest.mark.parametrize("targets", [BOTH, ".*_proj", "all-linear"])
def test_a_module_that_is_meant_and_has_no_tensor_is_refused(targets: list[str] | str) -> None:
    with pytest.raises(AdapterUnservable, match=r"means model.layers.0.self_attn.v_proj .* no tensor is for it"):
        check_adapter(make_adapter(target_modules=targets), 8, SHAPES)


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["q_proj", "v_prog"], "'v_prog': no linear layer of the base model is meant"),
        (["q_proj", "norm"], "'norm': model.norm is no linear layer"),
        ("model.layers.7.*", "no linear layer of the base model is meant"),
    ],
)
def test_a_target_that_is_nowhere_in_the_base_is_refused_before_training(targets: list[str] | str, named: str) -> None:
    with pytest.raises(AdapterUnservable, match=named):
        check_targets(make_config(target_modules=targets), SHAPES)
    with pytest.raises(AdapterUnservable, match=named):
        check_adapter(make_adapter(target_modules=targets), 8, SHAPES)


@pytest.mark.parametrize("targets", [BOTH, "all-linear", r".*\.[qv]_proj"])
def test_targets_that_the_base_has_pass(targets: list[str] | str) -> None:
    check_targets(make_config(target_modules=targets), SHAPES)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@given(place=st.integers(0, 8 * WIDTH - 1))
def test_one_value_that_is_no_finite_number_is_refused_wherever_it_is(bad: float, dtype: str, place: int) -> None:
    arrays = {A: torch.zeros(8, WIDTH), B: torch.ones(WIDTH, 8)}
    good = {name: array.to(getattr(torch, dtype)) for name, array in arrays.items()}
    check_adapter(Adapter.of(make_config(), save(good)), 8, SHAPES)
    good[A].view(-1)[place] = bad
    with pytest.raises(AdapterUnservable, match=f"lora_A.weight holds .* no finite number, at {place}$"):
        check_adapter(Adapter.of(make_config(), save(good)), 8, SHAPES)


def test_a_value_behind_the_first_block_is_found_and_a_header_of_any_length_does_not_hide_it() -> None:
    shapes = Shapes(linear={"q_proj": (70_000, 16)}, closed={})
    a, b = "base_model.model.q_proj.lora_A.weight", "base_model.model.q_proj.lora_B.weight"
    arrays = {a: torch.ones(8, 16, dtype=torch.bfloat16), b: torch.ones(70_000, 8, dtype=torch.bfloat16)}
    largest = torch.finfo(torch.bfloat16).max
    arrays[b].view(-1)[-2:] = torch.tensor([largest, -largest])
    body = save(arrays)
    length = int.from_bytes(body[:8], "little")
    body = (length + 1).to_bytes(8, "little") + body[8 : 8 + length] + b" " + body[8 + length :]
    check_adapter(Adapter.of(make_config(), body), 8, shapes)
    with pytest.raises(AdapterUnservable, match=r"lora_B.weight holds .* at 559999$"):
        check_adapter(Adapter.of(make_config(), body[:-2] + b"\x80\xff"), 8, shapes)
