"""Recomputes the logprobs of sampled tokens with PEFT, in float32, on the KV that the engine had.

Spans whose KV was kept make a chain: each is computed on what the spans before it left in the cache under their own
adapters. A neighbouring version is tried on one span at a time, on a copy of the same cache, and leaves no trace.

Chains through the same adapters go through the model together. A prompt that several of them share, as the samples of
a group do, is computed once. Rows are padded on the right of each step, and what comes later does not see the padding.

torch, transformers and peft are imported when a ``Scorer`` is made.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lorabridge.bridge.adapter import read_header
from lorabridge.bridge.digest import parse_config
from lorabridge.bridge.errors import AdapterError, AdapterUnservable, ConfigError, ModelError, StoreError
from lorabridge.bridge.fingerprint import Fingerprint, fingerprint
from lorabridge.bridge.store import Store

if TYPE_CHECKING:
    import torch

MAX_ROWS = 64
MAX_LOGITS = 1 << 26
"""Logits computed at once, 256 MiB in float32: large vocabularies get fewer rows."""

ONE_THREAD_BELOW = 10_000_000
"""Parameters. With smaller matrices a second thread gains little, and where cores are shared it cost five times."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens ``start`` to ``end`` (exclusive) of a turn, to be scored under ``digest`` and each neighbour."""

    policy: str
    version: int
    digest: str
    neighbours: tuple[str, ...]
    start: int
    end: int


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive pieces of a turn, each continuing on the KV that the ones before it left.

    Attributes:
        key: the caller's.
        prompt_ids, token_ids: of the turn, whole; what stands before the first piece is computed under its adapter.
        divisor: of the logits (``lorabridge.bridge.replay.verdict.divisor`` of the temperature).
    """

    key: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    divisor: float

    @property
    def adapters(self) -> tuple[tuple[str, int, str, tuple[str, ...]], ...]:
        """What it goes through, in order: chains with equal ``adapters`` can share a batch."""
        return tuple((piece.policy, piece.version, piece.digest, piece.neighbours) for piece in self.pieces)

    @property
    def length(self) -> int:
        """Tokens fed to the model: all but the last."""
        return len(self.prompt_ids) + self.pieces[-1].end - 1

    def fed(self, number: int) -> tuple[int, int]:
        """Positions that piece ``number`` feeds: all but its last token, from where the one before stopped.

        Before the first piece, all of the prompt but its last token has been fed.
        """
        before = len(self.prompt_ids) - 1
        return before + (self.pieces[number - 1].end if number else 0), before + self.pieces[number].end


class PieceScore(msgspec.Struct, frozen=True):
    """Logprobs in nats, one per token of a piece: under its own adapter, and under each neighbour in order."""

    own: tuple[float, ...]
    neighbours: tuple[tuple[float, ...], ...]


class ChainScore(msgspec.Struct, frozen=True):
    """One score per piece of ``chain``; or ``problem`` says why there are none."""

    chain: Chain
    pieces: tuple[PieceScore, ...]
    problem: str = ""


def batches(chains: Sequence[Chain], max_rows: int, max_positions: int) -> Iterator[list[Chain]]:
    """Chains that can go through the model together, by policy and version, with equal prompts side by side.

    Args:
        chains: in any order.
        max_rows: chains in a batch.
        max_positions: rows times longest length in a batch; a chain that is longer goes alone.
    """
    ordered = sorted(chains, key=lambda chain: (chain.adapters, len(chain.prompt_ids), chain.prompt_ids, chain.length))
    for _, alike in groupby(ordered, key=lambda chain: chain.adapters):
        batch: list[Chain] = []
        for chain in alike:
            longest = max(each.length for each in [*batch, chain])
            if batch and (len(batch) == max_rows or (len(batch) + 1) * longest > max_positions):
                yield batch
                batch = []
            batch.append(chain)
        yield batch


class Scorer:
    """A base model on the CPU and the adapters used last.

    Attributes:
        base: fingerprint of the base model's folder.
        vocabulary: token ids are below it.

    Args:
        folder: of the base model.
        store: adapters are read from it by digest, verified.
        max_adapters: adapters kept in memory.
        max_rows: chains computed at once.

    Raises:
        ConfigError: torch, transformers or peft is not installed.
        ModelError: the folder holds no model that transformers can load.
    """

    def __init__(self, folder: Path, store: Store, *, max_adapters: int = 8, max_rows: int = MAX_ROWS) -> None:
        self.base: Fingerprint = fingerprint(folder)
        model = _load_base(folder)
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self._config = model.config
        self._one_thread = model.num_parameters() < ONE_THREAD_BELOW
        self._adapters = _Adapters(model, store, max_adapters)
        self._max_rows = max_rows
        self._max_positions = max(1, MAX_LOGITS // self.vocabulary)

    def score(self, chains: Sequence[Chain]) -> Iterator[ChainScore]:
        """The score of every chain, in the order that is cheapest to compute.

        An adapter that cannot be read or loaded is reported as the ``problem`` of the chains that need it.
        """
        for batch in batches(chains, self._rows(chains), self._max_positions):
            try:
                with _threads(self._one_thread):
                    scores = self._score(batch)
            except (AdapterError, StoreError) as error:
                scores = [ChainScore(chain, (), error.problem) for chain in batch]
            yield from scores

    def _rows(self, chains: Sequence[Chain]) -> int:
        """A sliding window counts padding too: chains that it could shorten go alone, unpadded."""
        window = getattr(self._config, "sliding_window", None)
        if window is None or not getattr(self._config, "use_sliding_window", True):
            return self._max_rows
        padded = max(((len(chain.pieces) + 1) * chain.length for chain in chains), default=0)
        return self._max_rows if padded < window else 1

    def _score(self, chains: list[Chain]) -> list[ChainScore]:
        import torch

        prompts = _Prompts(chains, self._config)
        seen, left = prompts.valid, None
        scored: list[list[PieceScore]] = []
        with torch.no_grad():
            for number, piece in enumerate(chains[0].pieces):
                step = _Step(chains, number, seen)
                logprobs = []
                # The chain's own adapter goes last: it is the one whose KV the next piece finds.
                for digest in (*piece.neighbours, piece.digest):
                    model = self._adapters.use(digest)
                    cache = copy.deepcopy(left) if number else prompts.kv(model)
                    logprobs.append(step.logprobs(model, cache))
                *others, own = logprobs
                scored.append([PieceScore(row, tuple(other[n] for other in others)) for n, row in enumerate(own)])
                seen, left = step.seen, cache
        return [ChainScore(chain, tuple(piece[n] for piece in scored)) for n, chain in enumerate(chains)]


class _Prompts:
    """The prompts of a batch, each once and without its last token, which the first piece feeds.

    ``valid`` is 1 where a row of the batch has a prompt token and 0 where it has padding.
    """

    def __init__(self, chains: list[Chain], config: Any) -> None:
        import torch

        numbers: dict[tuple[int, ...], int] = {}
        owners = [numbers.setdefault(chain.prompt_ids, len(numbers)) for chain in chains]
        self._config = config
        self._owners = torch.tensor(owners)
        self._ids, valid = _padded([prompt[:-1] for prompt in numbers])
        self.valid = valid[self._owners]

    def kv(self, model: Any) -> Any:
        """A cache with every row's prompt, as the active adapter computes it."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._config)
        if self._ids.shape[1]:
            model(input_ids=self._ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_select_indices(self._owners)
        return cache


class _Step:
    """One piece of every chain in a batch. ``seen`` is 1 where the cache holds a token once the piece is computed."""

    def __init__(self, chains: list[Chain], number: int, seen: torch.Tensor) -> None:
        import torch

        ranges = [chain.fed(number) for chain in chains]
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        self._counts = [chain.pieces[number].end - chain.pieces[number].start for chain in chains]
        for row, (chain, (start, stop), count) in enumerate(zip(chains, ranges, self._counts, strict=True)):
            rows += [row] * count
            columns += range(stop - start - count, stop - start)  # the position before each token predicts it
            targets += chain.token_ids[chain.pieces[number].start : chain.pieces[number].end]
        self._ids, valid = _padded(
            [(chain.prompt_ids + chain.token_ids)[slice(*fed)] for chain, fed in zip(chains, ranges, strict=True)]
        )
        width = self._ids.shape[1]
        self.seen = torch.cat([seen, valid], dim=1)
        self._positions = torch.tensor([start for start, _ in ranges])[:, None] + torch.arange(width)
        self._keep = width - min(columns)
        self._at = torch.tensor(rows), torch.tensor(columns) - min(columns)
        self._targets = torch.tensor(targets)[:, None]
        self._divisors = torch.tensor([chains[row].divisor for row in rows])[:, None]

    def logprobs(self, model: Any, cache: Any) -> list[tuple[float, ...]]:
        """Logprobs of every row's tokens; ``cache`` grows by this step."""
        logits: torch.Tensor = model(
            input_ids=self._ids,
            position_ids=self._positions,
            attention_mask=self.seen,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=self._keep,
        ).logits
        every = (logits[self._at].float() / self._divisors).log_softmax(-1)
        flat = iter(every.gather(1, self._targets)[:, 0].tolist())
        return [tuple(islice(flat, count)) for count in self._counts]


def _padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of (rows, longest), padded on the right with 0, and 1 where they are not padding."""
    import torch

    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long)
    valid = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=torch.long)
    return ids, valid


class _Slot(msgspec.Struct):
    """An adapter of the PEFT model into which weights are copied; ``weights`` are its own tensors, by PEFT's names."""

    name: str
    weights: dict[str, Any]
    holds: str = ""


class _Adapters:
    """The base model, wrapped by PEFT, and the adapters used last.

    Making PEFT take up another adapter walks the whole model, many times slower than a small forward. So there is one
    slot for each configuration, a run has one or two, and another adapter is a copy into its slot.
    """

    def __init__(self, base: Any, store: Store, capacity: int) -> None:
        self._base = base
        self._model: Any = None
        self._store = store
        self._capacity = max(1, capacity)
        self._read: OrderedDict[str, tuple[bytes, dict[str, torch.Tensor]]] = OrderedDict()
        self._slots: dict[bytes, _Slot] = {}
        self._active: _Slot | None = None

    def use(self, digest: str) -> Any:
        """The model with that adapter, and no other, active.

        Raises:
            StoreError: the bytes are not there, or not those that the digest names.
            AdapterError: PEFT cannot put them on this base.
        """
        config, tensors = self._tensors(digest)
        try:
            if config not in self._slots:
                self._slots[config] = self._new_slot(config)
            slot = self._slots[config]
            if slot.holds != digest:
                _check_fits(tensors, slot.weights)
                for name, weight in slot.weights.items():
                    weight.copy_(tensors[name])
                slot.holds = digest
        except (TypeError, ValueError, KeyError) as error:
            raise AdapterUnservable(
                f"{digest} does not fit the base model: {str(error).splitlines()[0]}",
                action="Check that [model] path is the base it was trained on",
            ) from error
        if self._active is not slot:
            self._model.set_adapter(slot.name)
            self._active = slot
        return self._model

    def _tensors(self, digest: str) -> tuple[bytes, dict[str, torch.Tensor]]:
        """Configuration and tensors of an adapter, from memory or the store."""
        from safetensors.torch import load

        if digest not in self._read:
            adapter = self._store.read(digest)
            read_header(adapter.tensors)
            self._read[digest] = adapter.config, load(adapter.tensors)
            if len(self._read) > self._capacity:
                self._read.popitem(last=False)
        self._read.move_to_end(digest)
        return self._read[digest]

    def _new_slot(self, config: bytes) -> _Slot:
        """Raises ``TypeError`` or ``ValueError`` where PEFT cannot make such an adapter."""
        from peft import LoraConfig, PeftModel, get_peft_model_state_dict

        name = f"slot{len(self._slots)}"
        # Initial values are overwritten; an unknown field is an error here, never ignored.
        lora = LoraConfig(**{"init_lora_weights": False, **parse_config(config)})
        if self._model is None:
            self._model = PeftModel(self._base, lora, adapter_name=name)
        else:
            self._model.add_adapter(name, lora)
        self._model.eval()
        weights = get_peft_model_state_dict(self._model, adapter_name=name, save_embedding_layers=False)
        return _Slot(name, weights)


def _check_fits(tensors: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` unless the tensors are exactly those that the slot has, by name and shape."""
    if odd := sorted(tensors.keys() ^ weights.keys()):
        raise ValueError(f"{odd[0]} is only in the {'adapter' if odd[0] in tensors else 'model'}")
    for name, weight in weights.items():
        if tensors[name].shape != weight.shape:
            raise ValueError(f"{name} is {list(tensors[name].shape)} where the model has {list(weight.shape)}")


@contextmanager
def _threads(one: bool) -> Iterator[None]:
    """Let torch use one thread only, if ``one``."""
    import torch

    before = torch.get_num_threads()
    if one:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_base(folder: Path) -> Any:
    """The model in float32, ready for inference. Only safetensors are read."""
    try:
        import peft  # noqa: F401  (here, so that it is missed before anything is computed)
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(f"replay needs {error.name}", action='pip install "lorabridge[audit]"') from error
    import torch

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"{folder} cannot be loaded: {str(error).splitlines()[0]}", action="Check [model] path"
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    return model.eval().requires_grad_(False)
