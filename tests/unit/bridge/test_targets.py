"""The modules that a configuration means, and their ranks and alphas, are those that PEFT itself means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from lorabridge.bridge.targets import targeted, value_for
from tests.factories import make_config

NAMES = ("q_proj", "k_proj", "gate_proj")
MODULES = [f"model.layers.{layer}.{part}.{name}" for layer in (0, 1, 11) for part in ("attn", "mlp") for name in NAMES]
ENDS = ["q_proj", "proj", "attn.q_proj", "1.mlp.gate_proj", "model.layers.0.attn.k_proj", "layers.1", "nothing", ""]
PATTERNS = [r".*q_proj", r".*\.(0|11)\.mlp\..*", "q_proj", r"model\.layers\.1\..*", ".*"]
some = st.lists(st.sampled_from(ENDS), min_size=1, max_size=3)


@given(
    targets=some | st.sampled_from(PATTERNS),
    excluded=st.none() | some | st.sampled_from(PATTERNS),
    layers=st.none() | st.sampled_from([0, 1, [], [0, 11], [7]]),
    parents=st.none() | st.sampled_from(["layers", "h", ["h", "layers"], []]),
)
def test_what_is_meant_is_what_peft_means(targets: Any, excluded: Any, layers: Any, parents: Any) -> None:
    changes = {"target_modules": targets, "exclude_modules": excluded}
    if not isinstance(targets, str):  # PEFT's own constructor refuses the two together
        changes |= {"layers_to_transform": layers}
        if layers is not None:
            changes |= {"layers_pattern": parents}
    theirs = LoraConfig(r=8, **changes)
    meant = {m for m in MODULES if (found := check_target_module_exists(theirs, m)) and bool(found)}
    assert targeted(make_config(**changes), MODULES) == meant


def test_all_linear_means_all_of_them() -> None:
    assert targeted(make_config(target_modules="all-linear"), MODULES) == set(MODULES)
    assert targeted(make_config(target_modules="All-Linear", exclude_modules=["q_proj"]), MODULES) == {
        m for m in MODULES if not m.endswith("q_proj")
    }


@given(st.sampled_from(MODULES), st.sampled_from([*ENDS, *PATTERNS, "^model.layers.0.attn.q_proj"]))
def test_a_pattern_gives_what_peft_gives(module: str, key: str) -> None:
    pattern = {key: 4}
    theirs = pattern.get(get_pattern_key(list(pattern), module), 8)
    assert value_for(module, {"rank_pattern": pattern}, "rank_pattern", 8) == theirs


@pytest.mark.parametrize("pattern", [{}, None, {"v_proj": 4}])
def test_without_a_key_that_matches_the_usual_value_counts(pattern: Any) -> None:
    assert value_for(MODULES[0], {"alpha_pattern": pattern}, "alpha_pattern", 16) == 16
