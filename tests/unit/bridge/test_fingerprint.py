"""The base fingerprint changes with what the model computes or how text becomes tokens, part by part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lorabridge.bridge.errors import ModelError
from lorabridge.bridge.fingerprint import fingerprint
from tests.factories import make_tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder, small and complete."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "5.0"}))
    (tmp_path / "model.safetensors").write_bytes(make_tensors())
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "chat_template": "{{ m }}"}))
    return tmp_path


def rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_each_part_sees_its_own_files_and_no_others(model: Path) -> None:
    before = fingerprint(model)
    rewrite(model / "config.json", hidden_size=16)
    assert before.differences(fingerprint(model)) == ["checkpoint"]
    rewrite(model / "config.json", hidden_size=8)
    (model / "model.safetensors").write_bytes(make_tensors(seed=1))
    assert before.differences(fingerprint(model)) == ["checkpoint"]
    (model / "model.safetensors").write_bytes(make_tensors())
    (model / "tokenizer.json").write_text('{"a": 1}')
    assert before.differences(fingerprint(model)) == ["tokenizer"]
    (model / "tokenizer.json").write_text("{}")
    rewrite(model / "tokenizer_config.json", chat_template="{{ other }}")
    assert before.differences(fingerprint(model)) == ["template"]
    rewrite(model / "tokenizer_config.json", chat_template="{{ m }}")
    assert fingerprint(model) == before
    assert fingerprint(model).digest == before.digest


def test_the_version_that_saved_the_model_and_its_path_change_nothing(model: Path) -> None:
    before = fingerprint(model)
    rewrite(model / "config.json", transformers_version="9.9", _name_or_path="/elsewhere")
    rewrite(model / "tokenizer_config.json", name_or_path="/elsewhere")
    (model / "README.md").write_text("about it")
    assert fingerprint(model) == before


def test_one_template_is_one_template_wherever_it_stands_and_its_own_file_wins(model: Path) -> None:
    before = fingerprint(model)
    (model / "chat_template.jinja").write_text("{{ m }}")
    assert fingerprint(model) == before
    rewrite(model / "tokenizer_config.json", chat_template="{{ ignored }}")
    assert fingerprint(model) == before


def test_a_second_weights_file_counts(model: Path) -> None:
    before = fingerprint(model)
    (model / "model-2.safetensors").write_bytes(make_tensors(seed=2))
    assert before.differences(fingerprint(model)) == ["checkpoint"]


def test_two_models_never_share_a_digest_through_another_part(model: Path) -> None:
    before = fingerprint(model)
    for file, body in (("tokenizer.json", "{ }"), ("model.safetensors", ""), ("chat_template.jinja", "x")):
        kept = (model / file).read_bytes() if (model / file).exists() else None
        (model / file).write_text(body)
        assert fingerprint(model).digest != before.digest
        (model / file).unlink() if kept is None else (model / file).write_bytes(kept)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_model_is_named(model: Path, missing: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ModelError, match=str(model)):
        fingerprint(model)


@pytest.mark.parametrize("body", ["", "[]", "{", '{"a":' + "[" * 100_000])
def test_a_configuration_that_is_not_json_is_named(model: Path, body: str) -> None:
    (model / "config.json").write_text(body)
    with pytest.raises(ModelError, match="not JSON"):
        fingerprint(model)
