"""The exported bytes are what PEFT itself would save, and do not change under the trainer's feet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load
from transformers import Qwen2Config, Qwen2ForCausalLM

from lorabridge.bridge.adapter import Adapter, module_names
from lorabridge.bridge.base_shapes import base_shapes
from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE, folder_digest, parse_config
from lorabridge.bridge.servable import check_adapter
from lorabridge.trainer.export import gather, plain_config, serialise

CONFIG = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(Qwen2ForCausalLM(Qwen2Config(**CONFIG)), lora)


def export(model: PeftModel) -> Adapter:
    tensors = gather(model, "default", main=True)
    assert tensors is not None
    return serialise(tensors, plain_config(model.peft_config["default"]))


def test_it_has_the_digest_of_what_peft_saves(model: Any, tmp_path: Path) -> None:
    adapter = export(model)
    model.save_pretrained(tmp_path)
    assert adapter.digest == folder_digest(tmp_path)
    saved, ours = load((tmp_path / TENSORS_FILE).read_bytes()), load(adapter.tensors)
    assert saved.keys() == ours.keys()
    assert all(torch.equal(saved[name], ours[name]) for name in saved)


def test_it_passes_the_publishers_own_check(model: Any, tmp_path: Path) -> None:
    Qwen2ForCausalLM(Qwen2Config(**CONFIG)).save_pretrained(tmp_path)
    assert module_names(check_adapter(export(model), 8, base_shapes(tmp_path))) == ("down_proj", "q_proj")


def test_what_was_gathered_does_not_change_with_the_next_step(model: Any) -> None:
    tensors = gather(model, "default", main=True)
    assert tensors is not None
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], tensors[name]) for name in before)


def test_other_ranks_gather_and_get_nothing(model: Any) -> None:
    assert gather(model, "default", main=False) is None


def test_the_store_can_hand_it_to_peft(model: Any, tmp_path: Path) -> None:
    adapter = export(model)
    (tmp_path / CONFIG_FILE).write_bytes(adapter.config)
    (tmp_path / TENSORS_FILE).write_bytes(adapter.tensors)
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(Qwen2ForCausalLM(Qwen2Config(**CONFIG)), str(tmp_path))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    assert parse_config(adapter.config)["r"] == 8
