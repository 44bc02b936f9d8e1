"""The memorization probe: prompt with the start of a passage, decode greedily, compare with the true continuation.

Section "Memorization" of the paper, after Huang et al. 2024 (https://arxiv.org/abs/2407.17817). Prompts and references
are the token ids of the passage: no text is tokenized again, no BOS is added.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tfidf_tune.analysis._decoding import continue_prompts
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
        ValueError: As by :func:`check_passages`, or if an id is outside the model's vocabulary; before the generation.
    """
    check_passages(tokenizer, passages, offset + max(prefix_lengths))
    for passage in passages:
        require_known_ids(model, np.asarray(passage.token_ids))
    model.eval()
    asked = [
        (passage, prefix_length)
        for number, prefix_length in enumerate(prefix_lengths)
        for passage in passages
        if passage.num_prompt is None or number == 0  # a completion has one prompt
    ]
    divided = [passage.divide(prefix_length, max_new_tokens, offset) for passage, prefix_length in asked]
    prompts, references = ([*parts] for parts in zip(*divided, strict=True))
    continuations = continue_prompts(
        model, prompts, [*map(len, references)], batch_size=batch_size, eos_id=tokenizer.eos_id, progress=progress
    )
    samples = []
    for (passage, length), reference, made in zip(asked, references, continuations, strict=True):
        is_completion = passage.num_prompt is not None
        sample = compare_continuation(
            passage_id=passage.id,
            kind=passage.kind,
            offset=0 if is_completion else offset,
            prefix_length=0 if is_completion else length,
            generated_ids=made,
            reference_ids=reference,
            generated_text=tokenizer.decode(made),
            reference_text=tokenizer.decode(reference),
        )
        samples.append(sample)
    return samples


def compare_continuation(
    *, generated_ids: list[int], reference_ids: list[int], generated_text: str, reference_text: str, **asked: Any
) -> ProbeSample:
    """Score a continuation against the true one; the arguments are fields of :class:`ProbeSample`."""
    prefix_match = longest_prefix_match(generated_ids, reference_ids)
    return ProbeSample(
        **asked,
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
    """
    shown = max(samples, key=lambda sample: (sample.common_subsequence, sample.lms))
    highest = ("prefix_match", "lms", "rouge_l", "verbatim", "common_subsequence")
    scores: dict[str, Any] = {name: max(getattr(sample, name) for sample in samples) for name in highest}
    distances = [sample.edit_distance for sample in samples if sample.edit_distance is not None]
    return replace(shown, **scores, edit_distance=min(distances))


def check_passages(tokenizer: ProbeTokenizer, passages: Sequence["Passage"], num_prompt: int) -> None:
    """Refuse passages that cannot be probed; ``num_prompt`` are the tokens of the longest prompt with its offset.

    Raises:
        ValueError: If a passage, other than a completion, has no ids after the prompt, comes from another tokenizer, or
            has an id that the tokenizer does not have.
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
