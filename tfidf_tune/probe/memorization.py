"""The memorization probe: prompt with the start of a passage, decode greedily, compare with the
true continuation.

Section "Memorization" of the paper, after Huang et al. 2024 (https://arxiv.org/abs/2407.17817).
Prompts and references are the token ids of the passage: no text is tokenized again. BOS is before
them if the model was trained with it.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tfidf_tune._checks import check_at_least, require_choice, require_number
from tfidf_tune._tokenizer import after_bos, bos_ids, known_bos
from tfidf_tune.data import TextTokenizer, tokenizer_fingerprint, tokenizer_name
from tfidf_tune.passages import Passage
from tfidf_tune.probe import decoding, metrics, positive_control
from tfidf_tune.probe.finite import NonFiniteLogits
from tfidf_tune.probe.likelihoods import NUM_TEXTS_FOR_BOS, is_mean_positive
from tfidf_tune.probe.prompts import cut_passage
from tfidf_tune.probe.sample_fields import ProbeSample

if TYPE_CHECKING:
    pass


def compare_continuation(**fields: Any) -> ProbeSample:
    """Score a continuation against the true one, given all fields of :class:`ProbeSample` that are
    not scores.
    """
    ids = fields["generated_ids"], fields["reference_ids"]
    prefix_match = metrics.longest_prefix_match(*ids)
    return ProbeSample(
        **fields,
        prefix_match=prefix_match,
        lms=metrics.longest_memorized_substring(*ids),
        rouge_l=metrics.rouge_l(fields["generated_text"], fields["reference_text"]),
        verbatim=prefix_match == len(fields["reference_ids"]),
        edit_distance=metrics.edit_distance(*ids),
        common_subsequence=metrics.longest_common_subsequence(*ids),
    )


def best_continuation(samples: Sequence[ProbeSample]) -> ProbeSample:
    """Return one sample for several of a prompt, with the best value of each measure.

    Prefix match, LMS, longest common subsequence, ROUGE-L and verbatim are the highest, the edit
    distance is the lowest; each may be that of another sample. Ids and text are those of the
    longest common subsequence. ``unanswered`` is the sum.
    """
    shown = max(samples, key=lambda sample: (sample.common_subsequence, sample.lms))
    highest = ("prefix_match", "lms", "rouge_l", "verbatim", "common_subsequence")
    scores: dict[str, Any] = {
        name: max(getattr(sample, name) for sample in samples) for name in highest
    }
    scores["unanswered"] = sum(sample.unanswered for sample in samples)
    distances = [sample.edit_distance for sample in samples if sample.edit_distance is not None]
    return replace(shown, **scores, edit_distance=min(distances))


def check_passages(tokenizer: TextTokenizer, passages: Sequence[Passage], num_prompt: int) -> None:
    """Refuse passages that cannot be probed; ``num_prompt`` are the tokens of the longest prompt
    with its offset.

    Raises:
        ValueError: If a passage, other than a completion, has no ids after the prompt, or is of
            another tokenizer.
    """
    fingerprint = tokenizer_fingerprint(tokenizer)
    for passage in passages:
        if passage.num_prompt is None and len(passage.token_ids) <= num_prompt:
            raise ValueError(
                f"Passage {passage.id!r} has {len(passage.token_ids)} tokens, no more than offset "
                f"and longest prefix "
                f"take ({num_prompt}): lower one of them"
            )
        if passage.tokenizer_fingerprint != fingerprint:
            raise ValueError(
                f"Passage {passage.id!r} needs the tokenizer {passage.tokenizer!r} with the "
                f"fingerprint "
                f"{passage.tokenizer_fingerprint!r}; the given one, {tokenizer_name(tokenizer)!r}, "
                f"has "
                f"{fingerprint!r}. Name that tokenizer, or, if it is the same and an earlier "
                f"version of tfidf-tune "
                "wrote the probe file, make the file again"
            )


Value = TypeVar("Value")
LastLogits: TypeAlias = Callable[[Tensor, int], Tensor]


class MemorizationProbe:
    """Targets and controls, and how they are measured.

    Args:
        passages (Sequence[Passage]): of a probe file.
        tokenizer (TextTokenizer): the one that the model is trained with; its EOS ends a
            continuation.
        prefix_length (int): tokens of a passage that are the prompt; a completion has its own.
            Default: 50.
        max_new_tokens (int): most tokens that are generated and compared. Default: 128.
        batch_size (int): passages in a forward pass. Default: 32.
        stop_above (float | None): threshold for the mean LMS of the targets, in tokens. Default:
            None.
        when_above (Literal["stop", "keep"]): whether training ends above the threshold, or the last
            model below it is kept. Default: "stop".
        bos (bool | None): whether BOS is before each prompt. Default: None, if the tokenizer adds
            it, or else if it lowers the NLL of the controls at the first measurement.

    Raises:
        ValueError: If a setting is out of range, there is no target, or a passage is too short or
            of another tokenizer.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        tokenizer: TextTokenizer,
        *,
        prefix_length: int = 50,
        max_new_tokens: int = 128,
        batch_size: int = 32,
        stop_above: float | None = None,
        when_above: Literal["stop", "keep"] = "stop",
        bos: bool | None = None,
    ) -> None:
        require_choice("when_above", when_above, ("stop", "keep"))
        check_at_least(
            1, prefix_length=prefix_length, max_new_tokens=max_new_tokens, batch_size=batch_size
        )
        self._kinds = [passage.kind for passage in passages]
        self._ids = [passage.id for passage in passages]
        if "target" not in self._kinds:
            raise ValueError(
                f"none of the {len(passages)} passages is a target: take those of the training text"
            )
        check_passages(tokenizer, passages, prefix_length)
        # A measurement needs the ids alone, not the passages.
        divided = [cut_passage(passage, prefix_length, max_new_tokens) for passage in passages]
        self._prompts, self._references = zip(*divided, strict=True)
        self._eos_id = tokenizer.eos_id
        self._bos_ids = bos_ids(tokenizer)
        if bos and not self._bos_ids:
            raise ValueError("bos is true, and the tokenizer has no BOS: set it to false")
        self._has_bos = known_bos(tokenizer) if bos is None else bos
        self._controls = [passage for passage in passages if passage.kind == "control"]
        self._prefix_length = prefix_length
        self._blank_line = tokenizer.encode("\n\n", add_bos=False, add_eos=False)
        self._batch_size, self._stop_above = batch_size, stop_above
        self.keeps: bool = stop_above is not None and when_above == "keep"
        """Whether the last model below the threshold is kept."""
        self._was_above = False
        if stop_above is not None:
            longest = max(map(len, self._references))
            meaning = "it is a threshold for the mean LMS of the targets, in tokens"
            reason = f"the longest continuation has {longest} tokens"
            require_number("stop_above", stop_above, 0, longest, meaning, reason=reason)
        num_bos = 0 if self._has_bos is False else len(self._bos_ids)
        self.num_positions: int = num_bos + decoding.most_positions(
            self._prompts, [*map(len, self._references)]
        )
        """Tokens of the longest prompt with its continuation."""
        self.max_token_id: int = max(max(passage.token_ids) for passage in passages)

    def reason_to_stop(self, metrics: dict[str, float]) -> str | None:
        """Say why training has to end, if the mean LMS is above a threshold that ends it."""
        return None if self.keeps else self._above(metrics)

    def keep_below(
        self, step: int, metrics: dict[str, float], folder: Path, save: Callable[[Path], None]
    ) -> str | None:
        """Save a model into ``folder`` unless its mean LMS is above the threshold, if models are
        kept at all.

        Returns:
            str | None: the message for the user when the first model is above it.
        """
        if not self.keeps:
            return None
        verdict, was_above = self._above(metrics), self._was_above
        self._was_above = verdict is not None
        if verdict is None:
            save(folder)
        elif not was_above:
            kept = (
                f"the last model below it is in {folder}"
                if folder.exists()
                else "no model was below it"
            )
            return f"step {step}: {verdict}; {kept}"
        return None

    def _above(self, metrics: dict[str, float]) -> str | None:
        """Say that the targets' mean LMS is above the threshold, if it is."""
        lms = metrics["memorization_target_lms"]
        if self._stop_above is None or lms <= self._stop_above:
            return None
        return f"the targets' mean LMS is {lms:.1f} tokens, above stop_above={self._stop_above:g}"

    # Not inference_mode: FSDP2 would keep its buffers, which training then cannot use.
    @torch.no_grad()
    def measure(
        self, last_logits: LastLogits, continue_batch: decoding.ContinueBatch
    ) -> dict[str, float]:
        """Measure the memorization of a causal language model within :func:`evaluating`.

        With several processes all have to call; they make the same forward passes, in the same
        order, and get the numbers of the first.

        Args:
            last_logits (LastLogits): returns the logits ``[b, n, v]`` after each of the last n ids
                of int64 ``[b, s]`` on the CPU.
            continue_batch (ContinueBatch): returns greedy ids after each prompt, as many as the
                numbers say.

        Returns:
            dict[str, float]: ``memorization_target_lms`` and ``memorization_target_prefix_match``,
                means over the targets, in tokens; ``memorization_target_nll``, the mean of -ln P of
                a token of their continuations; and the same with ``control``, if there are
                controls.

        Raises:
            NonFiniteLogits: If logits of a passage are NaN or infinite.
        """
        prompts = self._given(self._prompts, last_logits)
        # One forward pass over prompt and reference says whether greedy decoding recites the
        # reference.
        scores = self._scores(last_logits, prompts, self._references, self._ids)
        # Only the other passages have to be decoded token by token.
        continuations = list(self._references)
        unknown = _of_first_process([i for i in range(len(scores)) if not scores[i][1]])
        made = self._continuations(
            continue_batch,
            [prompts[i] for i in unknown],
            [self._references[i] for i in unknown],
            [self._ids[i] for i in unknown],
        )
        for i, ids in zip(unknown, made, strict=True):
            continuations[i] = ids
        measured: dict[str, float] = {}
        for kind in dict.fromkeys(("target", *self._kinds)):
            chosen = [i for i, known in enumerate(self._kinds) if known == kind]
            pairs = [
                (self._ended(continuations[i], self._references[i]), self._references[i])
                for i in chosen
            ]
            num_tokens = sum(len(reference) for _, reference in pairs)
            lms = [metrics.longest_memorized_substring(*pair) for pair in pairs]
            matches = [metrics.longest_prefix_match(*pair) for pair in pairs]
            measured |= {
                f"memorization_{kind}_lms": sum(lms) / len(pairs),
                f"memorization_{kind}_prefix_match": sum(matches) / len(pairs),
                f"memorization_{kind}_nll": sum(scores[i][0] for i in chosen) / num_tokens,
            }
        return _of_first_process(measured)

    @torch.no_grad()
    def show_controls(
        self,
        last_logits: LastLogits,
        continue_batch: decoding.ContinueBatch,
        num_positions: int | None,
    ) -> tuple[dict[str, float], str]:
        """Ask for ten controls with and without a copy in front, which a model that can recite has
        to read.

        Without that, low numbers of :meth:`measure` say nothing.
        :mod:`tfidf_tune.probe.positive_control` has the method. Several processes call it as
        :meth:`measure`.

        Args:
            last_logits (LastLogits): as of :meth:`measure`.
            continue_batch (ContinueBatch): as of :meth:`measure`.
            num_positions (int | None): of the model's context; None if it has no limit.

        Returns:
            tuple[dict[str, float], str]: ``memorization_shown_lms`` and
                ``memorization_not_shown_lms``, means over the controls with and without the copy,
                in tokens, if there are ten controls; and a sentence for the user, "" if the copies
                were read.
        """
        if len(self._controls) < positive_control.NUM_CONTROLS:
            return {}, (
                f"nothing shows that the monitor could see a recited passage: its positive control "
                f"takes "
                f"{positive_control.NUM_CONTROLS} controls, there are {len(self._controls)}"
            )
        asked = [
            (one.id, one.token_ids, one.num_prompt or self._prefix_length) for one in self._controls
        ]
        num_free = None if num_positions is None else num_positions - len(self._bos_ids)
        pairs = positive_control.control_prompts(asked, self._blank_line, num_free)
        prompts = self._given([pair.prompt_ids for pair in pairs], last_logits)
        references = [pair.reference_ids for pair in pairs]
        ids = [pair.passage_id for pair in pairs]
        scores = self._scores(last_logits, prompts, references, ids)
        made = self._continuations(continue_batch, prompts, references, ids)
        frequencies = Counter(token for one in self._controls for token in one.token_ids)
        read: dict[bool, dict[str, int]] = {True: {}, False: {}}
        num_to_read = {pair.passage_id: len(pair.reference_ids) for pair in pairs}
        nlls: dict[bool, dict[str, float]] = {True: {}, False: {}}
        unigram = []
        for pair, continuation, (nll, _) in zip(pairs, made, scores, strict=True):
            reference = pair.reference_ids
            ended = self._ended(continuation, reference)
            read[pair.has_copy][pair.passage_id] = metrics.longest_memorized_substring(
                ended, reference
            )
            nlls[pair.has_copy][pair.passage_id] = nll / len(reference)
            unigram.append(
                positive_control.unigram_nll(np.array(reference, dtype=np.int32), frequencies)
            )
        return _of_first_process(_reading(read, num_to_read, nlls, float(np.mean(unigram))))

    def _given(self, prompts: Sequence[list[int]], last_logits: LastLogits) -> list[list[int]]:
        """Return prompts as the model gets them: after BOS, if it was trained with it."""
        if self._has_bos is None:
            self._has_bos = _of_first_process(self._is_likelier_after_bos(last_logits))
        before = self._bos_ids if self._has_bos else []
        return [after_bos(prompt, before) for prompt in prompts]

    def _is_likelier_after_bos(self, last_logits: LastLogits) -> bool:
        """Return whether BOS lowers the NLL of the controls, each after its first token."""
        chosen = self._controls[:NUM_TEXTS_FOR_BOS]
        references = [passage.token_ids[1 : self.num_positions - 1] for passage in chosen]
        ids = [passage.id for passage in chosen]
        nlls = []
        for before in ([], self._bos_ids):
            prompts = [[*before, passage.token_ids[0]] for passage in chosen]
            scores = self._scores(last_logits, prompts, references, ids)
            nlls.append(
                np.array(
                    [nll / len(each) for (nll, _), each in zip(scores, references, strict=True)]
                )
            )
        without_bos, with_bos = nlls
        return is_mean_positive(without_bos - with_bos)

    def _ended(self, ids: list[int], reference: list[int]) -> list[int]:
        """Return a continuation before EOS, unless the reference has EOS itself."""
        return decoding.before_eos(ids, decoding.end_of(reference, self._eos_id))

    def _continuations(
        self,
        continue_batch: decoding.ContinueBatch,
        prompts: Sequence[list[int]],
        references: Sequence[list[int]],
        ids: Sequence[str],
    ) -> list[list[int]]:
        """Continue prompts by as many tokens as their references have."""
        lengths = [len(reference) for reference in references]
        try:
            return decoding.continue_prompts(
                continue_batch, prompts, lengths, batch_size=self._batch_size
            )
        except NonFiniteLogits as error:
            raise NonFiniteLogits(
                error.index, error.dtype, f"passage {ids[error.index]}"
            ) from error

    def _scores(
        self,
        last_logits: LastLogits,
        prompts: Sequence[list[int]],
        references: Sequence[list[int]],
        ids: Sequence[str],
    ) -> list[tuple[float, bool]]:
        """Return for each prompt the sum of -ln P over its reference, and whether greedy decoding
        recites it.
        """
        scores: dict[int, tuple[float, bool]] = {}
        for batch in decoding.batches_of_prompts(prompts, self._batch_size):
            # Filled up on the right, which in a causal model changes nothing before it. The last id
            # is only scored.
            rows = [torch.tensor((prompts[i] + references[i])[:-1]) for i in batch]
            ids_bs = pad_sequence(rows, batch_first=True)
            # Logits are needed from the last id of the shortest prompt on.
            shortest = min(len(prompts[i]) for i in batch)
            for i, logits_nv in zip(
                batch, last_logits(ids_bs, ids_bs.shape[1] + 1 - shortest), strict=True
            ):
                reference_s = torch.tensor(references[i], device=logits_nv.device)
                logits_sv = logits_nv[len(prompts[i]) - shortest :][: len(reference_s)]
                # In float32 logits can be large. The sum is NaN if the largest logit of a position
                # is not finite.
                nll = F.cross_entropy(logits_sv.float(), reference_s, reduction="sum").item()
                if math.isnan(nll):
                    raise NonFiniteLogits(i, logits_sv.dtype, f"passage {ids[i]}")
                scores[i] = nll, logits_sv.argmax(dim=-1).equal(reference_s)
        return [scores[i] for i in range(len(prompts))]


def _reading(
    read: dict[bool, dict[str, int]],
    num_to_read: dict[str, int],
    nlls: dict[bool, dict[str, float]],
    unigram: float,
) -> tuple[dict[str, float], str]:
    """Judge the positive control by passage: tokens that were read and that could be, and NLLs in
    nats a token.

    ``read`` and ``nlls`` are with the copy and without.
    """
    shown, not_shown = read[True], read[False]
    if not shown:
        return (
            {},
            "it is not known if the monitor could see a recited passage: the model's context is "
            "too small to test",
        )
    measured = {
        "memorization_shown_lms": float(np.mean([*shown.values()])),
        "memorization_not_shown_lms": float(np.mean([not_shown[name] for name in shown])),
    }
    differences = [float(shown[name] - not_shown[name]) for name in shown]
    if positive_control.is_read(differences, [shown[name] / num_to_read[name] for name in shown]):
        return measured, ""
    falls = [nlls[False][name] - nlls[True][name] for name in nlls[True]]
    reading = (
        f"shown a passage, the model reads {measured['memorization_shown_lms']:.1f} of "
        f"{np.mean([num_to_read[name] for name in shown]):.0f} tokens, and "
        f"{measured['memorization_not_shown_lms']:.1f} without"
    )
    if positive_control.is_too_small_to_read(
        float(np.median(falls)), float(np.mean([*nlls[False].values()])), unigram
    ):
        return (
            measured,
            f"{reading}: it is too small to read, so this does not show what the monitor could see",
        )
    return measured, f"{reading}: nothing shows that the monitor could see a recited passage"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for the block, without any effect on the training that goes on after
    it.

    After the block each module is in the mode that it was in, random states are those of before,
    and the layers of FSDP2 are sharded again. Compiled code is not used, and so not compiled again
    for other shapes.
    """
    was_training = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    # It takes seconds to import, and before torch 2.6 has no stance.
    has_stance = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    stance = torch.compiler.set_stance("force_eager") if has_stance else nullcontext()
    with torch.random.fork_rng([*devices]), stance:
        model.eval()
        try:
            yield
        finally:
            for module, mode in was_training.items():
                module.training = mode
                # A forward pass without backward pass leaves complete weights behind, where FSDP2
                # shards them.
                if (reshard := getattr(module, "reshard", None)) is not None:
                    reshard()


def _of_first_process(value: Value) -> Value:
    """Return the first process's value on all: rounding may differ, but they have to
    do the same.
    """
    values = [value]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]
