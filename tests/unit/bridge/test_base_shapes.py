"""The base's modules, from the headers of its files: which take an adapter, of which shape, and why others do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from lorabridge.bridge.adapter import Tensor
from lorabridge.bridge.base_shapes import base_shapes, shapes_of
from lorabridge.bridge.errors import ModelError

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def tensors(*names: str) -> bytes:
    return bytes(save({f"{name}.weight": np.zeros((4, 6), np.float32) for name in names}))


def closed(
    module: str, *, shape: tuple[int, ...] = (4, 6), kind: str = "weight", dtype: str = "F32", **config: Any
) -> str:
    """Why a module takes no adapter, in a model that has another that does."""
    held = {f"{Q}.weight": Tensor("F32", (4, 6), (0, 0)), f"{module}.{kind}": Tensor(dtype, shape, (0, 0))}
    return shapes_of(held, config).closed[module]


def test_one_file_or_several_say_the_same(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    (one / "model.safetensors").write_bytes(tensors(Q, K))
    (several / "a.safetensors").write_bytes(tensors(Q))
    (several / "b.safetensors").write_bytes(tensors(K))
    (several / "c.safetensors").write_bytes(b"not in the index, and not read")
    index = {"weight_map": {f"{Q}.weight": "a.safetensors", f"{K}.weight": "b.safetensors"}}
    (several / "model.safetensors.index.json").write_text(json.dumps(index))
    assert base_shapes(one) == base_shapes(several)
    assert base_shapes(one).linear == {Q: (4, 6), K: (4, 6)}


def test_what_is_no_weight_is_no_module() -> None:
    held = {f"{Q}.bias": Tensor("F32", (2, 2), (0, 0)), f"{Q}.weight_scale": Tensor("F32", (2, 2), (0, 0))}
    assert not shapes_of(held, {}).linear
    assert not shapes_of(held, {}).closed


@pytest.mark.parametrize(
    "module", ["lm_head", "model.embed_tokens", "transformer.wte", "embed_out", "model.embed.x_embed"]
)
def test_embeddings_and_the_head_take_no_adapter(module: str) -> None:
    assert "embedding or the output head" in closed(module)


def test_a_head_of_another_name_is_known_by_the_vocabulary() -> None:
    assert "output head" in closed("output", shape=(99, 6), vocab_size=99)
    assert shapes_of({"model.layers.0.up.weight": Tensor("F32", (99, 6), (0, 0))}, {"vocab_size": 99}).linear


@pytest.mark.parametrize("shape", [(4,), (4, 6, 3), ()])
def test_what_is_no_matrix_is_no_linear_layer(shape: tuple[int, ...]) -> None:
    assert closed("model.layers.0.input_layernorm", shape=shape) == "is no linear layer"


def test_experts_and_their_router_take_no_adapter_and_a_gate_elsewhere_does() -> None:
    expert, router = "model.layers.1.mlp.experts.0.up_proj", "model.layers.1.mlp.gate"
    held = {f"{m}.weight": Tensor("F32", (4, 6), (0, 0)) for m in (Q, expert, router)}
    shapes = shapes_of(held, {})
    assert set(shapes.linear) == {Q}
    assert all("not proven" in shapes.closed[m] for m in (expert, router))
    del held[f"{expert}.weight"]
    assert set(shapes_of(held, {}).linear) == {Q, router}


def test_what_vllm_folds_into_attention_takes_no_adapter() -> None:
    assert "folded into attention" in closed("model.layers.0.self_attn.kv_b_proj")


@pytest.mark.parametrize(("kind", "dtype"), [("qweight", "I32"), ("weight_packed", "I32"), ("weight", "U8")])
def test_packed_weights_say_nothing_of_a_shape(kind: str, dtype: str) -> None:
    assert "stored packed" in closed(K, kind=kind, dtype=dtype)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "I8"])
def test_weights_of_one_value_each_have_their_shape(dtype: str) -> None:
    assert shapes_of({f"{Q}.weight": Tensor(dtype, (4, 6), (0, 0))}, {}).linear == {Q: (4, 6)}


@pytest.mark.parametrize("sense", ["vision_config", "audio_config"])
def test_of_a_model_with_senses_only_the_language_model_takes_an_adapter(sense: str) -> None:
    text, tower = "model.language_model.layers.0.mlp.up_proj", "model.visual.blocks.30.mlp.up_proj"
    held = {f"{m}.weight": Tensor("F32", (4, 6), (0, 0)) for m in (text, tower)}
    shapes = shapes_of(held, {sense: {}, "text_config": {"num_hidden_layers": 1}})
    assert set(shapes.linear) == {text}
    assert "outside the language model" in shapes.closed[tower]


def test_layers_behind_the_last_are_not_part_of_the_model() -> None:
    extra = ["model.layers.1.mlp.up_proj", "mtp.layers.0.mlp.up_proj"]
    held = {f"{m}.weight": Tensor("F32", (4, 6), (0, 0)) for m in (Q, *extra)}
    shapes = shapes_of(held, {"num_hidden_layers": 1})
    assert set(shapes.linear) == {Q}
    assert not shapes.closed


@pytest.mark.parametrize("module", ["layers.0.self_attn.q_proj", "h.0.attn"])
def test_a_model_saved_without_its_head_is_refused(tmp_path: Path, module: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(tensors(module))
    with pytest.raises(ModelError, match="without its head") as refused:
        base_shapes(tmp_path)
    assert "AutoModelForCausalLM" in refused.value.action


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4.gguf", "consolidated.00.pth"])
def test_other_kinds_of_weights_are_named_and_what_to_do_about_them(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=rf"has no \*.safetensors weights but {name}") as refused:
        base_shapes(tmp_path)
    assert "save_pretrained" in refused.value.action


def test_safetensors_under_another_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(tensors(Q))
    with pytest.raises(ModelError, match=r"consolidated\.safetensors, and neither model\.safetensors"):
        base_shapes(tmp_path)


@pytest.mark.parametrize("body", [b"", b"1234567", tensors(Q)[:20], b"\xff" * 64])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(body)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        base_shapes(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", "{}", '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(tensors(Q))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        base_shapes(tmp_path)


def test_an_index_that_names_what_is_not_there_is_an_error_and_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(tensors(Q))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match=f"{tmp_path}/passwd cannot be read"):
        base_shapes(tmp_path)
