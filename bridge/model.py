"""The base model's folder, given as one or by a hub id, and the token ids that end its completions."""

from __future__ import annotations

from pathlib import Path

import msgspec

from lorabridge.bridge.codec import UNREADABLE
from lorabridge.bridge.errors import ModelError

_MAX_JSON = 64 * 1024 * 1024


def model_folder(path: str, revision: str | None = None, *, download: bool = True) -> Path:
    """The folder of a base model: ``path`` itself, or the local snapshot of a hub id.

    Raises:
        ModelError: neither a folder nor a hub id that can be had.
    """
    if not path:
        raise ModelError("no base model is configured", action="Set [model] path to a folder or a hub id")
    folder = Path(path)
    if folder.is_dir():
        return folder.absolute()
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"there is no folder {path}", action="Correct [model] path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=not download))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{path} is neither a folder nor a hub model that can be had: {error}", action="Correct [model] path"
        ) from error


def read_json(file: Path) -> dict[str, object]:
    """A JSON file of a model's folder; empty if it is not there. Raises ``ModelError``."""
    if not file.is_file():
        return {}
    if file.stat().st_size > _MAX_JSON:
        raise ModelError(f"{file} is over {_MAX_JSON} bytes", action="Look at what it is; nothing of it was read")
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except UNREADABLE as error:
        raise ModelError(f"{file} is not JSON: {error}", action="Save the model again") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, sorted.

    Raises:
        ModelError: it has none; what it has instead is named.
    """
    if found := sorted(folder.glob("*.safetensors")):
        return found
    others = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(kind))
    instead = f" but {others[0]}, which adapters cannot be checked against" if others else ""
    raise ModelError(
        f"{folder} has no *.safetensors weights{instead}",
        action="Load it with AutoModelForCausalLM and save it again: save_pretrained writes safetensors",
    )


class _Eos(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Token ids that end a completion, as the model's generation configuration says, else its configuration; sorted.

    Raises:
        ModelError: neither names one.
    """
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_Eos).eos_token_id
        except msgspec.DecodeError as error:
            raise ModelError(f"{file} is unreadable: {error}", action="Save the model again") from error
        if found is not None:
            return tuple(sorted([found] if isinstance(found, int) else found))
    raise ModelError(f"{folder} names no end token", action="Set eos_token_id in generation_config.json")
