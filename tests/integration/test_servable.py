"""The publisher's check against vLLM's own loader: what vLLM refuses, what it serves wrong, and what it serves right.

A model of vLLM's is built here, without a server, and an adapter is put into its slot as a worker does it. What then
sits there is compared with what PEFT trained: the difference that merging the adapter makes to the base's parameters.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("vllm.lora")

from safetensors.torch import load, save  # noqa: E402

from lorabridge.bridge.adapter import Adapter  # noqa: E402
from lorabridge.bridge.base_shapes import Shapes, base_shapes  # noqa: E402
from lorabridge.bridge.digest import CONFIG_FILE, TENSORS_FILE, read_config  # noqa: E402
from lorabridge.bridge.errors import AdapterError  # noqa: E402
from lorabridge.bridge.servable import check_adapter  # noqa: E402

MAX_RANK = 16
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PREFIX = "base_model.model."
LAYER = f"{PREFIX}model.layers.0"
Q_A, Q_B = f"{LAYER}.self_attn.q_proj.lora_A.weight", f"{LAYER}.self_attn.q_proj.lora_B.weight"
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama on disk."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shapes(base: Path) -> Shapes:
    return base_shapes(base)


class Slot:
    """The one LoRA slot of a vLLM model on this CPU."""

    def __init__(self, base: Path, folder: Path) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.engine.arg_utils import EngineArgs
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
        from vllm.model_executor.model_loader import get_model

        config = EngineArgs(
            model=str(base), skip_tokenizer_init=True, enable_lora=True, max_lora_rank=MAX_RANK, max_loras=1,
            dtype="float32", enforce_eager=True, max_model_len=64,
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            model = get_model(vllm_config=config)
            self._worker = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
            self._worker.create_lora_manager(model, config)

    def effect(self, folder: Path) -> Tensors | None:
        """What the adapter in ``folder`` adds to the base, by parameter; None if vLLM refuses it."""
        from vllm.lora.request import LoRARequest

        adapters = self._worker._adapter_manager
        adapters.remove_all_adapters()
        try:
            self._worker.add_adapter(LoRARequest("adapter", 1, str(folder)))
        except Exception:
            return None
        slot = adapters.lora_index_to_id.index(1)
        found: Tensors = {}
        for name, module in adapters.modules.items():
            a, b = module.lora_a_stacked, module.lora_b_stacked
            if name.endswith("embed_tokens"):
                found[f"{name}.weight"] = a[slot] @ b[slot, 0].T
            elif name.endswith("lm_head"):
                found[f"{name}.weight"] = b[slot, 0] @ a[slot, 0]
            else:
                for part, a_of, b_of in zip(adapters.packed_modules.get(name, [name]), a, b, strict=True):
                    found[f"{part}.weight"] = b_of[slot, 0] @ a_of[slot, 0]
        return found


@pytest.fixture(scope="module")
def slot(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slot]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("VLLM_PLUGINS", "")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's own CPU worker does
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        try:
            yield Slot(base, tmp_path_factory.mktemp("slot"))
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


class Trained:
    """An adapter after some training, as PEFT saves it, and what it adds to the base by PEFT's own merging."""

    def __init__(self, base: Path, folder: Path, **lora: Any) -> None:
        arguments = {"r": 8, "lora_alpha": 12, "target_modules": LINEAR} | lora
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(llama(base), peft.LoraConfig(**arguments))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(folder, save_embedding_layers=False)
            self.effect = added(base, model)
        self.config: dict[str, Any] = read_config(folder)
        self.tensors: Tensors = load((folder / TENSORS_FILE).read_bytes())

    def adapter(self) -> Adapter:
        return Adapter.of(self.config, save(self.tensors))


@functools.cache
def _loaded(base: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)


def llama(base: Path) -> Any:
    """The base model, to be changed."""
    return copy.deepcopy(_loaded(base))


def added(base: Path, model: Any) -> Tensors:
    """What a PEFT model adds to the base, by parameter."""
    before, merged = _loaded(base).state_dict(), model.merge_and_unload().state_dict()
    return {name: merged[name] - before[name] for name in before}


def written(adapter: Adapter, folder: Path) -> Path:
    """The folder of an adapter, as a store writes it."""
    folder.mkdir()
    (folder / CONFIG_FILE).write_bytes(adapter.config)
    (folder / TENSORS_FILE).write_bytes(adapter.tensors)
    return folder


def outcome(served: Tensors | None, meant: Tensors) -> str:
    """``refused``, ``right``, or ``wrong``: another number somewhere."""
    if served is None:
        return "refused"
    same = all(
        torch.allclose(served.get(name, torch.zeros_like(number)), number, atol=1e-5) for name, number in meant.items()
    )
    return "right" if same and served.keys() <= meant.keys() else "wrong"


GOOD: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 4, "down_proj": 16}},
    "alpha_pattern": {"alpha_pattern": {"k_proj": 3, "mlp.up_proj": 30.5, r"model\.layers\.1\.self_attn\.q_proj": 2}},
    "patterns and rsLoRA": {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 7}},
    "a part of a packed module": {"target_modules": ["q_proj"]},
    "parts of different ranks": {"target_modules": ["k_proj", "up_proj"], "rank_pattern": {"k_proj": 2}},
    "a regular expression": {"target_modules": r".*\.1\..*(q|down)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "one layer": {"layers_to_transform": [1]},
    "excluded": {"exclude_modules": ["q_proj"]},
    "rank 1": {"r": 1},
    "a rank that is no slot": {"r": 12},
    "a negative alpha": {"lora_alpha": -3},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_vllm_serves_as_peft_trained_it_may_be_published(
    kind: str, base: Path, shapes: Shapes, slot: Slot, tmp_path: Path
) -> None:
    trained = Trained(base, tmp_path / "saved", **GOOD[kind])
    assert outcome(slot.effect(written(trained.adapter(), tmp_path / "stored")), trained.effect) == "right"
    check_adapter(trained.adapter(), MAX_RANK, shapes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_may_be_published(dtype: str, base: Path, shapes: Shapes, slot: Slot, tmp_path: Path) -> None:
    trained = Trained(base, tmp_path / "saved")
    trained.tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in trained.tensors.items()}
    folder = written(trained.adapter(), tmp_path / "stored")
    read = peft.PeftModel.from_pretrained(llama(base), str(folder))
    assert outcome(slot.effect(folder), added(base, read.float())) == "right"
    check_adapter(trained.adapter(), MAX_RANK, shapes)


# What PEFT itself saves: the arguments, what vLLM does, and a word of our refusal.
TRAINED: dict[str, tuple[dict[str, Any], str, str]] = {
    "DoRA": ({"use_dora": True}, "refused", "use_dora"),
    "bias": ({"bias": "lora_only"}, "refused", "bias"),
    "a module saved whole": ({"modules_to_save": ["lm_head"]}, "refused", "modules_to_save"),
    "a norm saved whole": ({"modules_to_save": ["norm"]}, "refused", "modules_to_save"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "refused", "init_lora_weights"),
    "OLoRA": ({"init_lora_weights": "olora"}, "refused", "init_lora_weights"),
    "trainable tokens": ({"trainable_token_indices": [1, 2]}, "refused", "trainable_token_indices"),
    "layer replication": ({"layer_replication": [[0, 2], [1, 2]]}, "refused", "layer_replication"),
    "QALoRA": ({"use_qalora": True}, "refused", "use_qalora"),
    "KaSA": ({"kasa_config": {}}, "refused", "kasa_config"),
    "MonteCLoRA": ({"monteclora_config": {}}, "refused", "monteclora_config"),
    "VeLoRA": ({"velora_config": {}}, "refused", "velora_config"),
    "a rank above the slot's": ({"r": 32}, "refused", "rank 32"),
    "a pattern's rank above the slot's": ({"rank_pattern": {"k_proj": 32}}, "refused", "rank 32"),
    "two alphas for one module": (
        {"alpha_pattern": {"q_proj": 3, "0.self_attn.q_proj": 30}}, "wrong", "alpha_pattern"),
    "two ranks for one module": (
        {"rank_pattern": {"self_attn.q_proj": 4, "0.self_attn.q_proj": 16}}, "wrong", "rank_pattern"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINED)
def test_what_peft_saves_and_vllm_does_not_serve_is_refused(
    kind: str, base: Path, shapes: Shapes, slot: Slot, tmp_path: Path
) -> None:
    arguments, vllm, word = TRAINED[kind]
    trained = Trained(base, tmp_path / "saved", **arguments)
    assert outcome(slot.effect(written(trained.adapter(), tmp_path / "stored")), trained.effect) == vllm
    with pytest.raises(AdapterError, match=word):
        check_adapter(trained.adapter(), MAX_RANK, shapes)


# A good adapter with other fields. "right" here: vLLM passes the field by, and serves as if it were not there.
FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "another kind of adapter": ({"peft_type": "LOHA"}, "right", "peft_type"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "right", "fan_in_fan_out"),
    "trainable tokens": ({"trainable_token_indices": [1]}, "right", "trainable_token_indices"),
    "target_parameters": ({"target_parameters": ["mlp.down_proj.weight"]}, "right", "target_parameters"),
    "Arrow": ({"arrow_config": {"top_k": 3}}, "right", "arrow_config"),
    "a field of a later release": ({"of_a_later_release": 1}, "right", "of_a_later_release"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "right", "init_lora_weights"),
    "fewer targets than tensors": ({"target_modules": ["q_proj"]}, "right", "does not mean"),
    "a target that is nowhere": ({"target_modules": [*LINEAR, "c_proj"]}, "right", "'c_proj'"),
    "a smaller r": ({"r": 4}, "wrong", "rank 4 on"),
    "a larger r": ({"r": 16}, "wrong", "rank 16 on"),
    "an alpha of 0": ({"lora_alpha": 0}, "wrong", "lora_alpha"),
    "no alpha": ({"lora_alpha": None}, "refused", "lora_alpha"),
    "no targets": ({"target_modules": None}, "refused", "target_modules"),
    "no r": ({"r": None}, "refused", "r is None"),
    "LoRA biases": ({"lora_bias": True}, "refused", "lora_bias"),
    "aLoRA": ({"alora_invocation_tokens": [1]}, "refused", "alora_invocation_tokens"),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, "refused", "use_bdlora"),
    "CorDA": ({"init_lora_weights": "corda"}, "refused", "init_lora_weights"),
    "LoftQ": ({"init_lora_weights": "loftq"}, "refused", "init_lora_weights"),
}


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An adapter on every linear layer, with a scale of 1: then vLLM multiplies nothing that is not there."""
    return Trained(base, tmp_path_factory.mktemp("trained"), lora_alpha=8)


@pytest.mark.parametrize("kind", FIELDS)
def test_a_field_that_vllm_refuses_or_does_not_read_is_refused(
    kind: str, trained: Trained, shapes: Shapes, slot: Slot, tmp_path: Path
) -> None:
    fields, vllm, word = FIELDS[kind]
    adapter = Adapter.of(trained.config | fields, save(trained.tensors))
    assert outcome(slot.effect(written(adapter, tmp_path / "stored")), trained.effect) == vllm
    with pytest.raises(AdapterError, match=word):
        check_adapter(adapter, MAX_RANK, shapes)


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


def also(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(shape)}


# A good adapter with other tensors. "right" here: vLLM passes the odd tensor, or the odd name, by.
TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str, str]] = {
    "a prefix that the model does not have": (renamed("model.model.model", "model.model.text"), "wrong", "no module"),
    "a layer that the model does not have": (renamed("layers.1", "layers.9"), "wrong", "no module"),
    "no prefix": (renamed(PREFIX, ""), "right", "is not base_model.model"),
    "the prefix twice": (renamed(PREFIX, PREFIX * 2), "right", "no module"),
    "the adapter's name inside": (renamed(".weight", ".default.weight"), "refused", "is not base_model.model"),
    "the packed module": (renamed("q_proj", "qkv_proj"), "refused", "no module"),
    "fewer inputs": (changed(Q_A, lambda a: a[:, :32]), "wrong", "makes"),
    "fewer outputs": (changed(Q_B, lambda b: b[:32]), "wrong", "makes"),
    "more inputs": (changed(Q_A, lambda a: a.repeat(1, 2)), "refused", "makes"),
    "more outputs": (changed(Q_B, lambda b: b.repeat(2, 1)), "refused", "makes"),
    "a lower rank in one tensor": (changed(Q_A, lambda a: a[:4]), "wrong", "makes"),
    "three dimensions": (changed(Q_A, lambda a: a[None]), "refused", "makes"),
    "not a number": (changed(Q_A, lambda a: a * torch.nan), "wrong", "no finite number"),
    "infinite": (changed(Q_B, lambda b: b.fill_diagonal_(torch.inf)), "wrong", "no finite number"),
    "no lora_B": (without("0.self_attn.q_proj.lora_B"), "wrong", "has no lora_B"),
    "no lora_A": (without("0.self_attn.q_proj.lora_A"), "wrong", "has no lora_A"),
    "a layer that was not saved": (without("layers.1"), "wrong", "no tensor is for it"),
    "nothing": (lambda tensors: {}, "refused", "empty"),
    "on a norm": (
        lambda tensors: tensors | {f"{LAYER}.input_layernorm.lora_{half}.weight": torch.ones(8, 8) for half in "AB"},
        "refused", "no linear layer"),
    "the base's own matrix": (also(f"{LAYER}.self_attn.q_proj.base_layer.weight", 64, 64), "refused", "base_layer"),
    "the base's embedding": (also(f"{PREFIX}model.embed_tokens.base_layer.weight", 48, 64), "right", "base_layer"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_vllm_refuses_or_serves_wrong_are_refused(
    kind: str, trained: Trained, shapes: Shapes, slot: Slot, tmp_path: Path
) -> None:
    change, vllm, word = TENSORS[kind]
    tensors = {name: tensor.clone() for name, tensor in trained.tensors.items()}
    adapter = Adapter.of(trained.config, save(change(tensors)))
    assert outcome(slot.effect(written(adapter, tmp_path / "stored")), trained.effect) == vllm
    with pytest.raises(AdapterError, match=word):
        check_adapter(adapter, MAX_RANK, shapes)


def test_a_file_cut_short_is_refused_by_both(trained: Trained, shapes: Shapes, slot: Slot, tmp_path: Path) -> None:
    whole = trained.adapter()
    adapter = Adapter(config=whole.config, tensors=whole.tensors[:-4])
    assert slot.effect(written(adapter, tmp_path / "stored")) is None
    with pytest.raises(AdapterError, match="bytes of data where its header says"):
        check_adapter(adapter, MAX_RANK, shapes)
