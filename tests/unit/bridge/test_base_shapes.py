"""The base's matrices, from the headers of its files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lorabridge.bridge.base_shapes import base_shapes
from lorabridge.bridge.errors import ModelError

Q, EMBED = "model.layers.0.self_attn.q_proj", "model.embed_tokens"


def tensors(*names: str) -> bytes:
    return bytes(save({f"{name}.weight": np.zeros((4, 6), np.float32) for name in names}))


def test_one_file_or_several_say_the_same(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    (one / "model.safetensors").write_bytes(tensors(Q, EMBED))
    (several / "a.safetensors").write_bytes(tensors(Q))
    (several / "b.safetensors").write_bytes(tensors(EMBED))
    index = {"weight_map": {f"{Q}.weight": "a.safetensors", f"{EMBED}.weight": "b.safetensors"}}
    (several / "model.safetensors.index.json").write_text(json.dumps(index))
    assert base_shapes(one) == base_shapes(several) == {Q: (4, 6), EMBED: (4, 6)}


def test_what_is_no_matrix_is_left_out(tmp_path: Path) -> None:
    body = save({"model.norm.weight": np.zeros(4, np.float32), f"{Q}.bias": np.zeros((2, 2), np.float32)})
    (tmp_path / "model.safetensors").write_bytes(body)
    assert base_shapes(tmp_path) == {}


def test_without_safetensors_nothing_is_known(tmp_path: Path) -> None:
    assert base_shapes(tmp_path) is None


@pytest.mark.parametrize("body", [b"", b"1234567", tensors(Q)[:20], b"\xff" * 64])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(body)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        base_shapes(tmp_path)


def test_an_index_that_names_what_is_not_there_is_an_error_and_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="passwd cannot be read"):
        base_shapes(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="unreadable"):
        base_shapes(tmp_path)
