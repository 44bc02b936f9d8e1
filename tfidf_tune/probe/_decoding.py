"""Continuations of token ids by a model of transformers: greedily in batches with a KV cache, by samples, by beams."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS_BETWEEN_CHECKS = 16  # of whether all rows of a batch have ended


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
    # Batches are in the order of lengths, the result is in that of the prompts.
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
    # The first prompt of a batch is its longest.
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
    # The first pass reads as many ids as the shortest prompt has; each later pass reads an id a row.
    decoding = Decoding(prompts, num_tokens)
    ids_bs = torch.tensor(decoding.start, device=next(model.parameters()).device)
    num_left_b = torch.tensor(decoding.num_left, device=ids_bs.device)
    ended = torch.zeros(len(ids_bs), dtype=torch.bool, device=ids_bs.device)
    cache = None
    for step in range(decoding.num_steps):
        output = model(input_ids=ids_bs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cache is None:
            cache, capacity = output.past_key_values, decoding.num_positions
            # Memory for all positions at once. Other kinds of caches and layers stay as they are.
            if isinstance(cache, DynamicCache):
                cache.layers = [
                    _ReservedLayer(layer, capacity) if type(layer) is DynamicLayer and layer.is_initialized else layer
                    for layer in cache.layers
                ]
        ids_bs = decoding.append(output.logits[:, -1:].argmax(dim=-1))
        # An EOS within a prompt ends nothing.
        if eos_id is not None:
            ended |= (ids_bs[:, 0] == eos_id) & (num_left_b <= step)
            # The check waits for a GPU, so it is rare there. What follows EOS is removed below.
            if (not ids_bs.is_cuda or (step + 1) % _TOKENS_BETWEEN_CHECKS == 0) and ended.all():
                break
    return [row[: row.index(eos_id)] if eos_id in row else row for row in decoding.continuations()]


@torch.no_grad()
def generated_continuations(
    model: "PreTrainedModel",
    prompt: Sequence[int],
    num_tokens: int,
    generation: Mapping[str, Any],
    *,
    number: int = 1,
    batch_size: int = 1,
    eos_id: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Return samples of one prompt's continuation, or the best beam, whatever the model's ``generation_config`` says.

    ``generation`` holds "do_sample", "temperature" and "top_k", or "num_beams"; ``number`` of samples are made,
    ``batch_size`` in a forward pass. Samples are seeded; random states outside are not changed. EOS and what follows
    it may be in a continuation.
    """
    from transformers import GenerationConfig

    pad_id = 0 if eos_id is None else eos_id
    config = GenerationConfig(**generation, max_new_tokens=num_tokens, eos_token_id=eos_id, pad_token_id=pad_id)
    device = next(model.parameters()).device
    input_ids = torch.tensor([[*prompt]], device=device)
    rows: list[list[int]] = []

    # generate completes any config that it is given by the model's, under an adapter by that of the model itself.
    configured = model.get_base_model() if hasattr(model, "get_base_model") else model
    original, configured.generation_config = configured.generation_config, config
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            while len(rows) < number:
                together = min(batch_size, number - len(rows))
                made = model.generate(
                    input_ids=input_ids, attention_mask=torch.ones_like(input_ids), num_return_sequences=together
                )
                rows += made[:, len(prompt) :].tolist()
    finally:
        configured.generation_config = original
    return rows


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
        # Longer prompts are still read: their ids replace those that the model chose, which -1 marks as free.
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
        # A row begins with the rest of its prompt, and goes on until the longest row of the batch is complete.
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
