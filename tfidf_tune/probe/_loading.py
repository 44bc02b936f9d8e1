"""Models for evaluation: load a checkpoint folder, check token ids, and decode greedily in batches with a KV cache."""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from tfidf_tune._files import looks_like_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REMEDY = "Give the folder of a finished checkpoint, or write this one again."


def load_model(
    folder: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> "PreTrainedModel":
    """Load a Hugging Face model folder, or a PEFT adapter folder on its base model, in eval mode.

    A complete folder has ``config.json`` and weights, an adapter folder ``adapter_config.json`` and weights.

    Args:
        folder (str | os.PathLike[str]): the folder.
        base (str | os.PathLike[str] | None): folder or hub name of an adapter's base model. Default: the adapter's
        device (str | torch.device): device of the model.
        dtype (torch.dtype | None): of the weights; PEFT keeps half-precision adapters in float32. Default: the
            checkpoint's

    Returns:
        PreTrainedModel: the model; for an adapter folder a ``peft.PeftModel``, which has the same interface.

    Raises:
        FileNotFoundError: If the folder, its config or its weights are missing.
        ValueError: If weights of the model are not in the files, a file is truncated, or an adapter names no
            base.
    """
    folder = Path(folder)
    is_adapter = (folder / "adapter_config.json").is_file()
    weights = "adapter_model.*" if is_adapter else "*.safetensors or *.bin"
    if not (is_adapter or (folder / "config.json").is_file()):
        raise FileNotFoundError(f"{folder} has neither config.json nor adapter_config.json. {_REMEDY}")
    if not any(path for pattern in weights.split(" or ") for path in folder.glob(pattern)):
        raise FileNotFoundError(f"{folder} has no weights ({weights}). {_REMEDY}")
    try:
        if is_adapter:
            base = base or adapter_base(folder, "pass base=, a model folder or hub name")[0]
            model = with_adapter(_load_complete(base, dtype), folder)
        else:
            model = _load_complete(folder, dtype)
    except SafetensorError as error:
        raise ValueError(f"{folder} or its base has a damaged weights file: {error}. {_REMEDY}") from error
    return model.to(device)


def adapter_base(folder: str | os.PathLike[str], remedy: str) -> tuple[str, str | None]:
    """Return folder or hub name of the base model that a PEFT adapter folder names, and its revision.

    ``remedy`` ends the message of an error: how to name the base model.

    Raises:
        ValueError: If it names no base model, or a folder that does not exist.
    """
    config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:
        raise ValueError(f"the adapter {folder} names no base model: {remedy}")
    if looks_like_path(base) and not Path(base).expanduser().is_dir():
        raise ValueError(f"the adapter {folder} belongs to the base model {base}, which does not exist: {remedy}")
    return str(base), revision


def require_known_ids(model: "PreTrainedModel", ids: npt.NDArray[np.integer]) -> None:
    """Refuse token ids that are outside the model's embedding.

    Raises:
        ValueError: If an id of any shape is not in ``[0, v)``, with input embeddings ``[v, d]``.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if unknown.size:
        raise ValueError(
            f"Token id {unknown[0]} is outside the model's vocabulary, 0 to {vocab_size - 1}: "
            "tokenize the text with the tokenizer that this model was trained with."
        )


def _load_complete(name: str | os.PathLike[str], dtype: torch.dtype | None) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype if dtype is not None else "auto", output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        # transformers would initialize them randomly.
        raise ValueError(f"{name} lacks {len(missing)} of the model's weights, {missing[0]} first. {_REMEDY}")
    return model


def with_adapter(model: Any, folder: str | os.PathLike[str], **arguments: Any) -> Any:
    """Return a model with a PEFT adapter; ``arguments`` are those of ``PeftModel.from_pretrained``.

    Raises:
        ValueError: If the folder lacks weights of the adapter.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT initializes missing weights randomly and only warns.
        warnings.filterwarnings("error", message=".*missing adapter keys")
        # PEFT 0.18 reads an attribute that transformers 5 has renamed.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        try:
            return PeftModel.from_pretrained(model, folder, **arguments)
        except UserWarning as warning:
            raise ValueError(f"{folder} lacks weights of its adapter: {warning} {_REMEDY}") from warning


_TOKENS_BETWEEN_CHECKS = 16


def continue_prompts(
    model: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
    *,
    batch_size: int,
    eos_id: int | None,
    most_apart: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continue any number of prompts by :func:`greedy_continuations`, in batches of :func:`batches_of_prompts`.

    ``progress`` is called after each batch with (prompts done, prompts in total).
    """
    continuations: dict[int, list[int]] = {}
    for batch in batches_of_prompts([*map(len, prompts)], batch_size, most_apart):
        numbers = [num_tokens[index] for index in batch]
        made = greedy_continuations(model, [prompts[index] for index in batch], numbers, eos_id=eos_id)
        continuations |= dict(zip(batch, made, strict=True))
        if progress is not None:
            progress(len(continuations), len(prompts))
    return [continuations[index] for index in range(len(prompts))]


def batches_of_prompts(lengths: Sequence[int], batch_size: int, most_apart: int = 16) -> list[list[int]]:
    """Divide prompts, given by their lengths, into batches for :func:`greedy_continuations`, the longest first.

    Too little memory is so noticed immediately. Lengths of a batch differ by at most ``most_apart`` tokens, because the
    shorter prompts are continued while the longer ones are read.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches and len(batches[-1]) < batch_size and lengths[batches[-1][0]] - lengths[index] <= most_apart:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@torch.no_grad()  # not inference_mode, which models in training cannot take
def greedy_continuations(
    model: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    num_tokens: int | Sequence[int],
    *,
    eos_id: int | None = None,
) -> list[list[int]]:
    """Append the most probable next id up to ``num_tokens`` times, with a KV cache.

    Only the logits matter: ``model.generate`` would apply the model's ``generation_config``, for example a repetition
    penalty, and takes more CPU time for the same ids: 15 % more for a Llama of 0.1 million parameters, 18 % for 3.4
    million, 2 % for a GPT-NeoX of 70 million. Prompts of different lengths are not padded: the
    shorter ones are continued while the others are read.

    Args:
        model (PreTrainedModel): causal language model in eval mode.
        prompts (Sequence[Sequence[int]]): token ids, at least one each.
        num_tokens (int | Sequence[int]): ids to append, to all or to each.
        eos_id (int | None): ends a row; generation stops when every row has ended. Default: None, no end.

    Returns:
        list[list[int]]: the ids without EOS and what follows it; the lowest id wins a tie.
    """
    decoding = Decoding(prompts, num_tokens)
    ids_bs = torch.tensor(decoding.start, device=next(model.parameters()).device)
    num_left_b = torch.tensor(decoding.num_left, device=ids_bs.device)
    ended = torch.zeros(len(ids_bs), dtype=torch.bool, device=ids_bs.device)
    cache = None
    for step in range(decoding.num_steps):
        output = model(input_ids=ids_bs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cache is None:
            cache, capacity = output.past_key_values, decoding.num_positions
            if isinstance(cache, DynamicCache):  # other kinds of caches and layers stay as they are
                cache.layers = [
                    _ReservedLayer(layer, capacity) if type(layer) is DynamicLayer and layer.is_initialized else layer
                    for layer in cache.layers
                ]
        ids_bs = decoding.append(output.logits[:, -1:].argmax(dim=-1))
        if eos_id is not None:
            ended |= (ids_bs[:, 0] == eos_id) & (num_left_b <= step)
            # The check waits for a GPU, so it is rare there. What follows EOS is removed below.
            if (not ids_bs.is_cuda or (step + 1) % _TOKENS_BETWEEN_CHECKS == 0) and ended.all():
                break
    return [row[: row.index(eos_id)] if eos_id in row else row for row in decoding.continuations()]


class Decoding:
    """The ids of a batch that is continued token by token; the arguments are those of :func:`greedy_continuations`.

    Attributes:
        start (list[list[int]]): as many ids of each prompt as the shortest one has: what the model reads first.
        num_steps (int): how often :meth:`append` is to be called; 0 if no ids are to be appended.
        num_left (list[int]): ids of each prompt after these, which are read one at a time.
        num_positions (int): the most ids of a prompt with its continuation.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], num_tokens: int | Sequence[int]) -> None:
        self._num_tokens = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else list(num_tokens)
        shortest = min(map(len, prompts))
        self.start = [list(prompt[:shortest]) for prompt in prompts]
        self._rest = [list(prompt[shortest:]) for prompt in prompts]
        self.num_left = [*map(len, self._rest)]
        self.num_positions = shortest + max(map(sum, zip(self.num_left, self._num_tokens, strict=True)))
        self.num_steps = self.num_positions - shortest if any(self._num_tokens) else 0
        self._appended: list[Tensor] = []

    def append(self, ids_b1: Tensor) -> Tensor:
        """Append the ids that the model chose, int64 ``[b, 1]``, or those of prompts that go on, and return them."""
        if (step := len(self._appended)) < max(self.num_left):
            given = [rest[step] if step < len(rest) else -1 for rest in self._rest]
            given_b1 = torch.tensor(given, device=ids_b1.device)[:, None]
            ids_b1 = torch.where(given_b1 < 0, ids_b1, given_b1)
        self._appended.append(ids_b1)
        return ids_b1

    def continuations(self) -> list[list[int]]:
        """Return what was appended to each prompt."""
        if not self._appended:
            return [[] for _ in self._rest]
        rows = torch.cat(self._appended, dim=1).tolist()
        return [
            row[len(rest) : len(rest) + number]
            for row, rest, number in zip(rows, self._rest, self._num_tokens, strict=True)
        ]


class _ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """``keys`` and ``values`` of one attention layer, ``[b, h, s, d]``, are views of the filled part.

    transformers' own layer copies all that it holds into new memory for each token. This layer has memory for
    ``capacity`` tokens.
    """

    def __init__(self, filled: DynamicLayer, capacity: int) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self._reserved = [
            states.new_empty(*states.shape[:-2], capacity, states.shape[-1]) for states in (filled.keys, filled.values)
        ]
        self.update(filled.keys, filled.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens, ``[b, h, n, d]``; return keys and values of all tokens so far."""
        first = self.get_seq_length()
        end = first + key_states.shape[-2]
        for reserved, states in zip(self._reserved, (key_states, value_states), strict=True):
            reserved[..., first:end, :] = states
        self.keys, self.values = (reserved[..., :end, :] for reserved in self._reserved)
        return self.keys, self.values
