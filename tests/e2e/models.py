"""A tiny random base and adapters for it, made here: nothing is downloaded."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lorabridge.bridge.adapter import Adapter, largest_rank, module_names
from lorabridge.bridge.base_shapes import base_shapes
from lorabridge.bridge.canary import Canary
from lorabridge.bridge.digest import parse_config
from lorabridge.bridge.fingerprint import fingerprint
from lorabridge.bridge.manifest import Manifest
from lorabridge.bridge.servable import check_adapter
from lorabridge.bridge.store import Store
from lorabridge.trainer.canary import CanaryModel
from lorabridge.trainer.export import gather, plain_config, serialise

END = 0
RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CHAT = (
    "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)


def make_base(folder: Path, hidden: int = 128) -> Path:
    """A random Qwen2 of 0.5 M parameters with a tokenizer of one token per character."""
    symbols = ["<|end|>", "<|start|>", "?", *string.ascii_letters, *string.digits, *string.punctuation]
    vocabulary = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<|end|>", pad_token="<|end|>", unk_token="?"
    )
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=END, pad_token_id=END,
        )
    )  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=END)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(base: Path, seed: int, rank: int = RANK) -> Adapter:
    """A random adapter on every linear layer, strong enough that a wrong one shows in every token."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=8 * rank, target_modules=list(TARGETS), init_lora_weights=False)
    torch.manual_seed(seed)
    tensors = gather(get_peft_model(model, config), "default", main=True)
    assert tensors is not None
    return serialise(tensors, plain_config(config))


def make_canary(base: Path, seed: int) -> Canary:
    """The canary of ``make_adapter(base, seed)``."""
    model = Qwen2ForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=64, target_modules=list(TARGETS), init_lora_weights=False)
    torch.manual_seed(seed)
    peft = get_peft_model(model, config)
    tensors = gather(peft, "default", main=True)
    assert tensors is not None
    return CanaryModel(peft, "default").canary(tensors, str(seed))


def commit(store: Store, base: Path, policy: str, adapters: list[Adapter]) -> list[Manifest]:
    """Put adapters into the store as versions 1, 2, ... of a policy."""
    epoch = store.allocate_epoch(policy)
    return [commit_next(store, base, policy, adapter, epoch) for adapter in adapters]


def commit_next(
    store: Store, base: Path, policy: str, adapter: Adapter, epoch: int, canary: Canary | None = None
) -> Manifest:  # fmt: skip
    """Put an adapter into the store as a policy's next version."""
    rank = largest_rank(parse_config(adapter.config))
    header = check_adapter(adapter, rank, base_shapes(base))
    newest = store.newest(policy)
    version = newest.version + 1 if newest else 1
    manifest = Manifest(
        policy=policy,
        version=version,
        digest=store.put(adapter),
        parent=newest.digest if newest else None,
        base=fingerprint(base),
        rank=rank,
        targets=module_names(header),
        dtype="F32",
        step=version - 1,
        epoch=epoch,
        run="e2e",
        created_ms=1_700_000_000_000,
        size=len(adapter.tensors),
        canary=canary,
    )
    store.commit(manifest)
    return manifest
