"""The memorization probe: prompt with the start of a passage, decode greedily, compare with the true continuation.

Section "Memorization" of the paper, after Huang et al. 2024 (https://arxiv.org/abs/2407.17817). Prompts and references
are the token ids of the passage: no text is tokenized again, no BOS is added.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tfidf_tune.analysis._loading import require_known_ids
from tfidf_tune.analysis._metrics import (
    edit_distance,
    longest_common_subsequence,
    longest_memorized_substring,
    longest_prefix_match,
    rouge_l,
)
from tfidf_tune.data import tokenizer_fingerprint, tokenizer_name
from tfidf_tune.results import ProbeSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tfidf_tune.data import Passage

_TOKENS_BETWEEN_CHECKS = 16
_MOST_APART = 16  # tokens between the longest and the shortest prompt of a batch


class ProbeTokenizer(Protocol):
    """The part of a tokenizer that the probe uses.

    If it can encode or has a ``fingerprint``, that must be the one of the passages, and its ``vocab_size``, if it has
    one, larger than all their ids.
    """

    @property
    def eos_id(self) -> int:
        """Id that ends a text."""

    def decode(self, ids: list[int], /) -> str:
        """Token ids -> text."""


def probe(
    model: "PreTrainedModel",
    tokenizer: ProbeTokenizer,
    passages: Sequence["Passage"],
    *,
    prefix_lengths: Sequence[int] = (32, 50, 100),
    max_new_tokens: int = 128,
    batch_size: int = 64,
    offset: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[ProbeSample]:
    """Measure how much of each passage the model recites from each prefix length.

    With ``o`` the offset and ``p`` a prefix length, the prompt is ``token_ids[o : o+p]`` and the reference
    ``token_ids[o+p : o+p+max_new_tokens]``, shorter if the passage ends earlier. The continuation is truncated to the
    length of the reference, and before EOS. A completion (:attr:`Passage.num_prompt`) is asked for once, from its own
    prompt; its ``prefix_length`` is 0. Nothing is padded, so in float32 the batch size does not change the result. In
    bfloat16 it can, if two logits round to the same value.

    Args:
        model (PreTrainedModel): causal language model; it is put in eval mode.
        tokenizer (ProbeTokenizer): gives the texts for ROUGE-L and the EOS id.
        passages (Sequence[Passage]): targets and controls.
        prefix_lengths (Sequence[int]): lengths of the prompts in tokens.
        max_new_tokens (int): most tokens to generate and compare.
        batch_size (int): prompts in a forward pass.
        offset (int): where in the passage the prompts start, in tokens.
        progress (Callable[[int, int], None] | None): called after each batch with (samples done, samples in total).

    Returns:
        list[ProbeSample]: one for each prefix length and passage, ordered by prefix length.

    Raises:
        ValueError: If a passage has no ids after a prefix, comes from another tokenizer, or has ids outside
            the model's vocabulary. Checked before generation starts.
    """
    check_passages(tokenizer, passages, offset + max(prefix_lengths))
    for passage in passages:
        require_known_ids(model, np.asarray(passage.token_ids))
    model.eval()
    asked = [
        (
            passage,
            prefix_length if passage.num_prompt is None else 0,
            *passage.divide(prefix_length, max_new_tokens, offset),
        )
        for number, prefix_length in enumerate(prefix_lengths)
        for passage in passages
        if passage.num_prompt is None or number == 0
    ]
    continuations: dict[int, list[int]] = {}
    for batch in batches_of_prompts([len(prompt) for _, _, prompt, _ in asked], batch_size):
        _, _, prompts, references = zip(*(asked[index] for index in batch), strict=True)
        generated = greedy_continuations(model, prompts, [*map(len, references)], eos_id=tokenizer.eos_id)
        continuations |= dict(zip(batch, generated, strict=True))
        if progress is not None:
            progress(len(continuations), len(asked))
    return [
        compare_continuation(
            passage_id=passage.id,
            kind=passage.kind,
            offset=offset if prefix_length else 0,
            prefix_length=prefix_length,
            generated_ids=continuations[index],
            reference_ids=reference,
            generated_text=tokenizer.decode(continuations[index]),
            reference_text=tokenizer.decode(reference),
        )
        for index, (passage, prefix_length, _, reference) in enumerate(asked)
    ]


def batches_of_prompts(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Divide prompts, given by their lengths, into batches for :func:`greedy_continuations`, the longest first.

    Lengths of a batch differ by at most 16, because the shorter prompts are continued while the longer ones are read.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batches and len(batches[-1]) < batch_size and lengths[batches[-1][0]] - lengths[index] <= _MOST_APART:
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
    penalty, and is slower on small models, see ``_kv_cache.py``. Prompts of different lengths are not padded: the
    shorter ones are continued while the others are read.

    Args:
        model (PreTrainedModel): causal language model in eval mode.
        prompts (Sequence[Sequence[int]]): token ids, at least one each.
        num_tokens (int | Sequence[int]): ids to append, to all or to each.
        eos_id (int | None): ends a row; generation stops when every row has ended. Default: None, no end.

    Returns:
        list[list[int]]: for each prompt at most ``num_tokens`` token ids, without EOS and what follows it; the
            lowest id wins a tie.
    """
    from tfidf_tune.analysis._kv_cache import reserve  # imports transformers

    decoding = Decoding(prompts, num_tokens)
    ids_bs = torch.tensor(decoding.start, device=next(model.parameters()).device)
    num_left_b = torch.tensor(decoding.num_left, device=ids_bs.device)
    ended = torch.zeros(len(ids_bs), dtype=torch.bool, device=ids_bs.device)
    cache = None
    for step in range(decoding.num_steps):
        output = model(input_ids=ids_bs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cache is None:
            cache = output.past_key_values
            reserve(cache, decoding.num_positions)
        ids_bs = decoding.append(output.logits[:, -1:].argmax(dim=-1))
        if eos_id is not None:
            ended |= (ids_bs[:, 0] == eos_id) & (num_left_b <= step)
            # The check waits for a GPU, so it is rare there. What follows EOS is removed below.
            if (not ids_bs.is_cuda or (step + 1) % _TOKENS_BETWEEN_CHECKS == 0) and ended.all():
                break
    return [row[: row.index(eos_id)] if eos_id in row else row for row in decoding.continuations()]


class Decoding:
    """The ids of a batch that is continued token by token, from prompts that may have different lengths.

    Args:
        prompts (Sequence[Sequence[int]]): token ids, at least one each.
        num_tokens (int | Sequence[int]): ids to append, to all or to each.

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


def compare_continuation(
    *,
    passage_id: str,
    kind: str,
    offset: int,
    prefix_length: int,
    generated_ids: list[int],
    reference_ids: list[int],
    generated_text: str,
    reference_text: str,
) -> ProbeSample:
    """Score a continuation against the true one; for the arguments see :class:`ProbeSample`.

    Returns:
        ProbeSample: the arguments and the scores.
    """
    prefix_match = longest_prefix_match(generated_ids, reference_ids)
    return ProbeSample(
        passage_id=passage_id,
        kind=kind,
        offset=offset,
        prefix_length=prefix_length,
        generated_ids=generated_ids,
        reference_ids=reference_ids,
        generated_text=generated_text,
        reference_text=reference_text,
        prefix_match=prefix_match,
        lms=longest_memorized_substring(generated_ids, reference_ids),
        rouge_l=rouge_l(generated_text, reference_text),
        verbatim=prefix_match == len(reference_ids),
        edit_distance=edit_distance(generated_ids, reference_ids),
        common_subsequence=longest_common_subsequence(generated_ids, reference_ids),
    )


def best_continuation(samples: Sequence[ProbeSample]) -> ProbeSample:
    """Return one sample for several of a prompt, with the best value of each measure.

    Prefix match, LMS, longest common subsequence, ROUGE-L and verbatim are the highest, the edit distance is the
    lowest; each may be that of another sample. Ids and text are those of the longest common subsequence.

    Args:
        samples (Sequence[ProbeSample]): of :func:`compare_continuation`, at least one.
    """
    shown = max(samples, key=lambda sample: (sample.common_subsequence or 0, sample.lms))
    highest = ("prefix_match", "lms", "rouge_l", "verbatim", "common_subsequence")
    scores: dict[str, Any] = {name: max(getattr(sample, name) for sample in samples) for name in highest}
    distances = [sample.edit_distance for sample in samples if sample.edit_distance is not None]
    return replace(shown, **scores, edit_distance=min(distances))


def check_passages(tokenizer: ProbeTokenizer, passages: Sequence["Passage"], num_prompt: int) -> None:
    """Refuse passages that cannot be probed.

    Args:
        tokenizer (ProbeTokenizer): the model's.
        passages (Sequence[Passage]): targets and controls.
        num_prompt (int): tokens up to the end of the longest prompt, including the offset; completions have their own.

    Raises:
        ValueError: If a passage has no ids after the prompt, comes from another tokenizer, or has an id that the
            tokenizer does not have.
    """
    identified: Any = tokenizer if hasattr(tokenizer, "fingerprint") or hasattr(tokenizer, "encode") else None
    fingerprint = identified and tokenizer_fingerprint(identified)
    last_id = getattr(tokenizer, "max_token_id", getattr(tokenizer, "vocab_size", math.inf) - 1)
    for passage in passages:
        if passage.num_prompt is None and len(passage.token_ids) <= num_prompt:
            raise ValueError(
                f"Passage {passage.id!r} has {len(passage.token_ids)} tokens, none after the first {num_prompt} "
                "that offset and longest prefix take: use longer passages or a smaller offset or prefix."
            )
        if fingerprint is not None and passage.tokenizer_fingerprint != fingerprint:
            raise ValueError(
                f"Passage {passage.id!r} was tokenized with fingerprint {passage.tokenizer_fingerprint!r}, "
                f"the given tokenizer, {tokenizer_name(identified)!r}, has {fingerprint!r}: probe with the tokenizer "
                f"{passage.tokenizer!r}."
            )
        if (highest := max(passage.token_ids)) > last_id:
            raise ValueError(
                f"Passage {passage.id!r} has the token id {highest}, but the tokenizer's ids end at {last_id}: "
                "make the probe file again with the tokenizer of the model."
            )
