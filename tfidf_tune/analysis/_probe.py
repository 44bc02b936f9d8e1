"""The memorization probe: prompt with the start of a passage, decode greedily, compare with the true continuation.

Section "Memorization" of the paper, after Huang et al. 2024 (https://arxiv.org/abs/2407.17817). Prompts and references
are the token ids of the passage: no text is tokenized again, no BOS is added.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tfidf_tune.analysis._loading import require_known_ids
from tfidf_tune.analysis._metrics import longest_memorized_substring, longest_prefix_match, rouge_l
from tfidf_tune.data import tokenizer_fingerprint, tokenizer_name
from tfidf_tune.results import ProbeSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tfidf_tune.data import Passage

_TOKENS_BETWEEN_CHECKS = 16


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
    length of the reference, and before EOS. The prompts of a forward pass have one length, so nothing is padded and in
    float32 the batch size does not change the result. In bfloat16 it can, if two logits round to the same value.

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
    samples: list[ProbeSample] = []
    for prefix_length, first in itertools.product(prefix_lengths, range(0, len(passages), batch_size)):
        end = offset + prefix_length
        batch = passages[first : first + batch_size]
        prompts = [passage.token_ids[offset:end] for passage in batch]
        references = [passage.token_ids[end : end + max_new_tokens] for passage in batch]
        generated = greedy_continuations(model, prompts, max(map(len, references)), eos_id=tokenizer.eos_id)
        for passage, ids, reference in zip(batch, generated, references, strict=True):
            ids = ids[: len(reference)]
            samples.append(
                compare_continuation(
                    passage_id=passage.id,
                    kind=passage.kind,
                    offset=offset,
                    prefix_length=prefix_length,
                    generated_ids=ids,
                    reference_ids=reference,
                    generated_text=tokenizer.decode(ids),
                    reference_text=tokenizer.decode(reference),
                )
            )
        if progress is not None:
            progress(len(samples), len(passages) * len(prefix_lengths))
    return samples


@torch.no_grad()  # not inference_mode, which models in training cannot take
def greedy_continuations(
    model: "PreTrainedModel", prompts: Sequence[Sequence[int]], num_tokens: int, *, eos_id: int | None = None
) -> list[list[int]]:
    """Append the most probable next id up to ``num_tokens`` times, with a KV cache.

    Only the logits matter: ``model.generate`` would apply the model's ``generation_config``, for example a repetition
    penalty, and is slower on small models, see ``_kv_cache.py``.

    Args:
        model (PreTrainedModel): causal language model in eval mode.
        prompts (Sequence[Sequence[int]]): ``[b, p]`` token ids, all of one length.
        num_tokens (int): ids to append.
        eos_id (int | None): ends a row; generation stops when every row has ended. Default: None, no end.

    Returns:
        list[list[int]]: for each prompt at most ``num_tokens`` token ids, without EOS and what follows it; the
            lowest id wins a tie.
    """
    from tfidf_tune.analysis._kv_cache import reserve  # imports transformers

    ids_bs = torch.tensor(prompts, device=next(model.parameters()).device)
    ended = torch.zeros(len(ids_bs), dtype=torch.bool, device=ids_bs.device)
    capacity = ids_bs.shape[1] + num_tokens
    cache, generated = None, []
    for _ in range(num_tokens):
        output = model(input_ids=ids_bs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if cache is None:
            cache = output.past_key_values
            reserve(cache, capacity)
        ids_bs = output.logits[:, -1:].argmax(dim=-1)
        generated.append(ids_bs)
        if eos_id is not None:
            ended |= ids_bs[:, 0] == eos_id
            # The check waits for a GPU, so it is rare there. What follows EOS is removed below.
            if (not ids_bs.is_cuda or len(generated) % _TOKENS_BETWEEN_CHECKS == 0) and ended.all():
                break
    rows = torch.cat(generated, dim=1).tolist() if generated else [[] for _ in prompts]
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]


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
    )


def check_passages(tokenizer: ProbeTokenizer, passages: Sequence["Passage"], num_prompt: int) -> None:
    """Refuse passages that cannot be probed.

    Args:
        tokenizer (ProbeTokenizer): the model's.
        passages (Sequence[Passage]): targets and controls.
        num_prompt (int): tokens up to the end of the longest prompt, including the offset.

    Raises:
        ValueError: If a passage has no ids after the prompt, comes from another tokenizer, or has an id that the
            tokenizer does not have.
    """
    identified: Any = tokenizer if hasattr(tokenizer, "fingerprint") or hasattr(tokenizer, "encode") else None
    fingerprint = identified and tokenizer_fingerprint(identified)
    last_id = getattr(tokenizer, "max_token_id", getattr(tokenizer, "vocab_size", math.inf) - 1)
    for passage in passages:
        if len(passage.token_ids) <= num_prompt:
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
