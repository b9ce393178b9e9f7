"""The base fingerprint changes with what the model computes or how text becomes tokens, part by part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from lorabridge.bridge import codec
from lorabridge.bridge import fingerprint as module
from lorabridge.bridge.errors import ModelError, RunMismatch
from lorabridge.bridge.fingerprint import PROBE, Traits, fingerprint
from lorabridge.bridge.run_record import check_base
from tests.factories import BASE, make_manifest, make_tensors

CHARACTERS = ["?", *sorted(set(PROBE))]


def write_tokenizer(folder: Path, characters: list[str], unknown: str | None = "?") -> None:
    """A tokenizer of one token per character."""
    vocabulary = {character: place for place, character in enumerate(characters)}
    kind = models.WordLevel(vocabulary, unk_token=unknown) if unknown else models.WordLevel(vocabulary)
    tokenizer = Tokenizer(kind)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder, small and complete."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "5.0"}))
    (tmp_path / "model.safetensors").write_bytes(make_tensors())
    write_tokenizer(tmp_path, CHARACTERS)
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
    write_tokenizer(model, CHARACTERS[::-1])
    assert before.differences(fingerprint(model)) == ["tokenizer"]
    write_tokenizer(model, CHARACTERS)
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
    for file, body in (("vocab.txt", "a"), ("model.safetensors", ""), ("chat_template.jinja", "x")):
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


def test_a_tokenizer_is_what_it_does_even_with_the_same_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(model)
    assert before.traits is not None
    assert before.traits.tokens == tuple(CHARACTERS.index(character) for character in PROBE)
    other = (*before.traits.tokens[:7], 0, *before.traits.tokens[8:])
    monkeypatch.setattr(module, "_tokens", lambda file: other)
    assert before.differences(fingerprint(model)) == ["tokenizer"]
    monkeypatch.undo()
    assert before.differences(fingerprint(model)) == []


def explanation(one: Path, change: Callable[[Path], object]) -> str:
    """What a generator with the model, changed, is told."""
    trainer = fingerprint(one)
    change(one)
    with pytest.raises(RunMismatch) as refused:
        check_base(trainer, fingerprint(one), "the generator")
    assert "differs: the generator has sha256:" in refused.value.problem
    assert "the trainer sha256:" in refused.value.problem
    return refused.value.problem


def test_it_is_said_how_a_tokenizer_differs(model: Path) -> None:
    last = max(PROBE)  # the last of the vocabulary: all others keep their ids
    told = explanation(model, lambda folder: write_tokenizer(folder, CHARACTERS[:-1]))
    assert "the base model's tokenizer differs" in told
    assert (
        f"(a fixed text makes {len(PROBE)} tokens against {len(PROBE)}, and token {PROBE.index(last)} is 0 against "
        f"{CHARACTERS.index(last)})" in told
    )


def test_it_is_said_that_a_tokenizers_files_alone_differ(model: Path) -> None:
    told = explanation(model, lambda folder: (folder / "vocab.txt").write_text("a"))
    assert "(other files, though a fixed text makes the same tokens)" in told


def test_it_is_said_that_one_of_two_tokenizers_is_not_there_or_ends_sooner(model: Path) -> None:
    told = explanation(model, lambda folder: (folder / "tokenizer.json").unlink())
    assert f"(a fixed text makes none against {len(PROBE)} tokens)" in told
    mine, theirs = (Traits(config="", weights=0, tokens=tokens, template=0) for tokens in ((5, 6), (5, 6, 7)))
    one, other = (msgspec.structs.replace(BASE, tokenizer=str(t.tokens), traits=t) for t in (mine, theirs))
    assert one.how(other, "tokenizer") == ("a fixed text makes 2 tokens against 3, and token 2 is the end against 7")


def test_it_is_said_how_a_checkpoint_or_a_template_differs(model: Path) -> None:
    told = explanation(model, lambda folder: rewrite(folder / "config.json", hidden_size=16))
    assert "(another config.json)" in told
    size = len(make_tensors())
    told = explanation(model, lambda folder: (folder / "model.safetensors").write_bytes(make_tensors(seed=1)))
    assert f"(the same config.json and other weights: {size} bytes against {size})" in told
    told = explanation(model, lambda folder: rewrite(folder / "tokenizer_config.json", chat_template="{{ m }}\u00e9!"))
    assert "the base model's template differs" in told
    assert "(9 characters against 7)" in told


def test_every_part_that_differs_is_told(model: Path) -> None:
    def change(folder: Path) -> None:
        rewrite(folder / "config.json", hidden_size=16)
        rewrite(folder / "tokenizer_config.json", chat_template="", add_bos_token=False)

    told = explanation(model, change)
    assert [part for part in ("checkpoint", "tokenizer", "template") if f"model's {part} differs" in told] == [
        "checkpoint", "tokenizer", "template",
    ]  # fmt: skip


def test_a_tokenizer_that_cannot_encode_such_a_text_is_known_by_its_files(model: Path) -> None:
    write_tokenizer(model, ["a"], unknown=None)
    found = fingerprint(model)
    assert found.traits is not None
    assert found.traits.tokens is None


@pytest.mark.parametrize("body", ["", "{}", '{"a": 1}', "[]"])
def test_a_tokenizer_that_is_none_is_named(model: Path, body: str) -> None:
    (model / "tokenizer.json").write_text(body)
    with pytest.raises(ModelError, match=r"tokenizer\.json is no tokenizer"):
        fingerprint(model)


def test_how_two_differ_is_no_part_of_what_they_are_and_older_records_do_without(model: Path) -> None:
    found = fingerprint(model)
    bare = msgspec.structs.replace(found, traits=None)
    assert bare.digest == found.digest
    assert bare.differences(found) == []
    assert bare.how(found, "tokenizer") is None


def test_it_is_small_enough_for_every_manifest(model: Path) -> None:
    manifest = make_manifest(base=fingerprint(model))
    assert len(codec.encode_json(manifest)) - len(codec.encode_json(make_manifest())) < 1024
    assert codec.decode_json(type(manifest), codec.encode_json(manifest)) == manifest
