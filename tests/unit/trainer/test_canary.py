"""A canary is what the published tensors answer, whatever the model in training has become meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from lorabridge.bridge.canary import sequences
from lorabridge.trainer.canary import CanaryModel, canary_model
from lorabridge.trainer.export import gather

CONFIG = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(Qwen2ForCausalLM(Qwen2Config(**CONFIG)), lora)


def logprobs(model: Any, ids: tuple[int, ...]) -> list[float]:
    with torch.inference_mode():
        rows = model.eval()(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, ids[1:], strict=True)]


def test_it_is_what_the_adapter_and_the_base_answer(model: Any) -> None:
    tensors = gather(model, "default", main=True)
    assert tensors is not None
    canary = CanaryModel(model, "default").canary(tensors, "seed")
    assert canary.sequences == sequences(32, "seed")
    assert canary.dtype == "float32"
    for ids, adapter in zip(canary.sequences, canary.adapter, strict=True):
        assert logprobs(model, ids) == pytest.approx(adapter, abs=1e-5)
    with model.disable_adapter():
        for ids, base in zip(canary.sequences, canary.base, strict=True):
            assert logprobs(model, ids) == pytest.approx(base, abs=1e-5)


def test_training_goes_on_and_neither_disturbs_the_other(model: Any) -> None:
    beside = CanaryModel(model, "default")
    tensors = gather(model, "default", main=True)
    assert tensors is not None
    before = beside.canary(tensors, "seed")
    trained = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_" in name:
                parameter += 1.0
    after = {name: parameter.clone() for name, parameter in trained.items()}
    assert beside.canary(tensors, "seed") == before
    assert all(torch.equal(after[name], parameter) for name, parameter in model.named_parameters())


def test_what_the_trainer_puts_in_the_way_of_forward_is_not_in_the_copys(model: Any) -> None:
    tensors = gather(model, "default", main=True)
    assert tensors is not None
    plain = CanaryModel(model, "default").canary(tensors, "seed")

    def packed_only(*_: Any, **__: Any) -> None:
        raise AssertionError("rows must be packed")

    model.get_base_model().forward = packed_only
    assert CanaryModel(model, "default").canary(tensors, "seed") == plain


def test_it_holds_the_base_once(model: Any) -> None:
    beside: Any = canary_model(model, "default")
    own = {id(p) for p in beside._model.parameters()} - {id(p) for p in model.parameters()}
    adapter = [p for name, p in beside._model.named_parameters() if "lora_" in name]
    assert own == {id(p) for p in adapter}
