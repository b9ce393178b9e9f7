"""The digest covers what decides the outputs, and nothing else."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabridge.bridge.adapter import Adapter
from lorabridge.bridge.digest import (
    CONFIG_FILE,
    TENSORS_FILE,
    adapter_digest,
    check_digest,
    folder_digest,
    hex_of,
    parse_config,
    semantic_config,
)
from lorabridge.bridge.errors import AdapterCorrupt, ConfigError, DigestMissing
from tests.factories import digest_of, make_config, make_tensors

SEMANTIC: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "o_proj"],
    "use_rslora": True,
    "use_dora": True,
    "fan_in_fan_out": True,
    "bias": "all",
    "modules_to_save": ["classifier"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "layers_to_transform": 0,
    "exclude_modules": ["k_proj"],
    "peft_type": "LOHA",
    "init_lora_weights": "pissa_niter_16",
    "a_field_of_a_later_release": 1,
}
NOT_SEMANTIC: dict[str, Any] = {
    "base_model_name_or_path": "elsewhere",
    "peft_version": "9.9.9",
    "revision": "main",
    "inference_mode": False,
    "lora_dropout": 0.5,
    "task_type": None,
    "auto_mapping": {"base_model_class": "Model"},
    "init_lora_weights": "gaussian",
    "megatron_core": "megatron.core",
}


@pytest.mark.parametrize("field", SEMANTIC)
def test_a_field_that_decides_outputs_changes_the_digest(field: str) -> None:
    assert semantic_config(make_config(**{field: SEMANTIC[field]})) != semantic_config(make_config())


@pytest.mark.parametrize("field", NOT_SEMANTIC)
def test_a_field_that_decides_nothing_leaves_the_digest(field: str) -> None:
    assert semantic_config(make_config(**{field: NOT_SEMANTIC[field]})) == semantic_config(make_config())


@pytest.mark.parametrize("zero", [0, 0.0])
def test_zero_says_something_although_it_equals_false(zero: float) -> None:
    without = {name: value for name, value in make_config().items() if name != "lora_alpha"}
    assert semantic_config(make_config(lora_alpha=zero)) != semantic_config(without)


def test_a_release_that_adds_fields_which_say_nothing_gives_the_same_digest() -> None:
    later = {"peft_version": "9.0", "new_flag": False, "new_option": None, "new_table": {}, "new_list": [], "new": ""}
    assert semantic_config(make_config(**later)) == semantic_config(make_config())


def test_the_type_a_script_used_for_a_number_or_a_list_decides_nothing() -> None:
    one = make_config(lora_alpha=16.0, target_modules={"v_proj", "q_proj"}, alpha_pattern={"q_proj": 4.0})
    other = make_config(lora_alpha=16, target_modules=("q_proj", "v_proj"), alpha_pattern={"q_proj": 4})
    assert semantic_config(one) == semantic_config(other)


def test_the_configuration_survives_its_own_canonical_form() -> None:
    config = semantic_config(make_config(rank_pattern={"b": 2, "a": 1}, lora_alpha=0.1))
    assert semantic_config(parse_config(config)) == config


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
configs = st.dictionaries(st.sampled_from([*make_config(), "other", "new"]), json_values, max_size=8)


@given(configs, st.randoms(use_true_random=False))
def test_order_never_matters_and_the_canonical_form_is_stable(config: dict[str, Any], order: random.Random) -> None:
    names = list(config)
    order.shuffle(names)
    canonical = semantic_config(config)
    assert semantic_config({name: config[name] for name in names}) == canonical
    assert semantic_config(parse_config(canonical)) == canonical


@given(st.binary(max_size=200), st.integers(1, 50))
def test_how_the_bytes_are_cut_does_not_matter(body: bytes, block: int) -> None:
    blocks = [body[at : at + block] for at in range(0, len(body), block)]
    assert adapter_digest(b"{}", blocks) == adapter_digest(b"{}", [body])


def test_bytes_cannot_move_from_the_configuration_to_the_tensors() -> None:
    assert adapter_digest(b"ab", [b"c"]) != adapter_digest(b"a", [b"bc"])


def test_a_folder_as_peft_saves_it_has_the_digest_of_the_adapter_in_memory(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps(make_config(), indent=2))
    (tmp_path / TENSORS_FILE).write_bytes(make_tensors())
    assert folder_digest(tmp_path) == Adapter.of(make_config(), make_tensors()).digest


def test_a_folder_without_a_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / TENSORS_FILE).write_bytes(make_tensors())
    with pytest.raises(DigestMissing, match=CONFIG_FILE):
        folder_digest(tmp_path)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'{"r": NaN}', b'{"\xff": 1}', b'{"r":' + b"[" * 100_000])
def test_a_configuration_that_is_no_json_object_is_corrupt(body: bytes) -> None:
    with pytest.raises(AdapterCorrupt, match=CONFIG_FILE):
        parse_config(body)


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "g" * 64, "sha256:" + "A" * 64, "a" * 64, "md5:" + "a" * 64,
             "sha256:" + "a" * 63, "sha256:" + "a" * 65, "sha256:" + "a" * 64 + "\n", "sha256:../../" + "a" * 58],
)  # fmt: skip
def test_what_is_not_a_digest_never_becomes_a_path(text: str) -> None:
    with pytest.raises(ConfigError, match="not a digest"):
        hex_of(text)


def test_a_digest_is_a_digest() -> None:
    assert check_digest(digest_of("x")) == digest_of("x")
    assert "sha256:" + hex_of(digest_of("x")) == digest_of("x")
