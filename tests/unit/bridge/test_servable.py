"""What vLLM would refuse, or serve wrong without a word, is refused before it is published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from lorabridge.bridge.adapter import (
    Adapter,
    read_header,
)
from lorabridge.bridge.errors import AdapterCorrupt, AdapterUnservable
from lorabridge.bridge.servable import check_adapter
from tests.factories import MODULE, WIDTH, make_adapter, make_arrays, make_config, make_tensors

OTHER = MODULE.replace("q_proj", "v_proj")
GOOD = make_tensors()
SHAPES = {"model.layers.0.self_attn.q_proj": (WIDTH, WIDTH), "model.layers.0.self_attn.v_proj": (WIDTH, WIDTH)}


def test_a_good_adapter_passes_and_its_header_comes_back() -> None:
    assert check_adapter(make_adapter(), max_rank=8, shapes=None) == read_header(GOOD)


A, B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({}, "empty"),
        ({A: make_arrays()[A]}, "has no lora_B"),
        ({B: make_arrays()[B]}, "has no lora_A"),
        (make_arrays(modules=(MODULE, OTHER)) | {A: make_arrays(rank=4)[A]}, "says rank 8"),
        (make_arrays(rank=4), "says rank 8"),
        (make_arrays() | {f"{MODULE}.lora_magnitude_vector": np.ones(16, np.float32)}, "neither lora_A nor lora_B"),
        (make_arrays() | {f"{MODULE}.lora_embedding_A": np.ones((8, 16), np.float32)}, "neither lora_A nor lora_B"),
        (make_arrays() | {"base_model.model.score.weight": np.ones((8, 8), np.float32)}, "neither lora_A nor lora_B"),
        (make_arrays(modules=("base_model.model.lm_head",)), "lm_head"),
        (make_arrays(modules=("base_model.model.model.embed_tokens",)), "embed_tokens"),
        ({A: np.ones((8, 16, 1), np.float32), B: make_arrays()[B]}, "has shape"),
        ({A: np.ones(8, np.float32), B: make_arrays()[B]}, "has shape"),
        ({A: np.array(1, np.float32), B: make_arrays()[B]}, "has shape"),
    ],
)
def test_tensors_that_vllm_would_serve_wrong_are_refused(arrays: dict[str, Any], named: str) -> None:
    with pytest.raises(AdapterUnservable, match=named):
        check_adapter(Adapter.of(make_config(), make_tensors(arrays)), max_rank=64, shapes=None)


def test_each_module_has_the_rank_that_its_pattern_gives_it_and_no_other() -> None:
    arrays = make_arrays(rank=8, modules=(MODULE,)) | make_arrays(rank=16, modules=(OTHER,))
    right, swapped = {"v_proj": 16}, {"q_proj": 16}
    check_adapter(Adapter.of(make_config(rank_pattern=right), make_tensors(arrays)), max_rank=16, shapes=None)
    with pytest.raises(AdapterUnservable, match="says rank 16"):
        check_adapter(Adapter.of(make_config(rank_pattern=swapped), make_tensors(arrays)), max_rank=16, shapes=None)


def test_patterns_match_as_in_peft_by_the_end_of_the_name_the_first_winning() -> None:
    arrays = make_arrays(rank=4)
    patterns = {"proj": 2, "layers.0.self_attn.q_proj": 4, "q_proj": 16}
    check_adapter(Adapter.of(make_config(rank_pattern=patterns), make_tensors(arrays)), max_rank=16, shapes=None)
    anchored = {"^model.layers.0.self_attn.q_proj": 4}
    check_adapter(Adapter.of(make_config(rank_pattern=anchored), make_tensors(arrays)), max_rank=16, shapes=None)


def test_corrupt_tensors_are_corrupt_not_unservable() -> None:
    with pytest.raises(AdapterCorrupt):
        check_adapter(Adapter.of(make_config(), GOOD[:-1]), max_rank=8, shapes=None)


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
    with pytest.raises(AdapterUnservable, match="the base would answer for it"):
        check_adapter(Adapter.of(make_config(), make_tensors(make_arrays(modules=(module,)))), 8, SHAPES)


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [(A, (8, WIDTH - 1), "15 inputs where"), (A, (8, WIDTH + 1), "17 inputs"), (B, (WIDTH - 1, 8), "15 outputs")],
)
def test_a_matrix_that_does_not_fit_the_bases_is_refused(name: str, shape: tuple[int, int], named: str) -> None:
    arrays = make_arrays() | {name: np.ones(shape, np.float32)}
    with pytest.raises(AdapterUnservable, match=named):
        check_adapter(Adapter.of(make_config(), make_tensors(arrays)), 8, SHAPES)


def test_a_target_that_no_tensor_is_for_is_refused() -> None:
    with pytest.raises(AdapterUnservable, match="names 'v_proj', and no tensor is for it"):
        check_adapter(make_adapter(target_modules=["q_proj", "v_proj"]), 8, SHAPES)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@given(place=st.integers(0, 8 * WIDTH - 1))
def test_one_value_that_is_no_finite_number_is_refused_wherever_it_is(bad: float, dtype: str, place: int) -> None:
    arrays = {A: torch.zeros(8, WIDTH), B: torch.ones(WIDTH, 8)}
    good = {name: array.to(getattr(torch, dtype)) for name, array in arrays.items()}
    check_adapter(Adapter.of(make_config(), save(good)), 8, SHAPES)
    good[A].view(-1)[place] = bad
    with pytest.raises(AdapterUnservable, match=f"no finite number, at {place}$"):
        check_adapter(Adapter.of(make_config(), save(good)), 8, SHAPES)
