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
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

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


def compare_continuation(**fields: Any) -> ProbeSample:
    """Score a continuation against the true one, given all fields of :class:`ProbeSample` that are
    not scores.
    """
    generated = fields["generated_ids"]
    reference = fields["reference_ids"]
    prefix_match = metrics.longest_prefix_match(generated, reference)
    return ProbeSample(
        **fields,
        prefix_match=prefix_match,
        lms=metrics.longest_memorized_substring(generated, reference),
        rouge_l=metrics.rouge_l(fields["generated_text"], fields["reference_text"]),
        verbatim=prefix_match == len(reference),
        edit_distance=metrics.edit_distance(generated, reference),
        common_subsequence=metrics.longest_common_subsequence(generated, reference),
    )


def best_continuation(samples: Sequence[ProbeSample]) -> ProbeSample:
    """Return one sample for several of a prompt, with the best value of each measure.

    Prefix match, LMS, longest common subsequence, ROUGE-L and verbatim are the highest, the edit
    distance is the lowest; each may be that of another sample. Ids and text are those of the
    longest common subsequence. ``unanswered`` is the sum.
    """
    shown = max(samples, key=lambda sample: (sample.common_subsequence, sample.lms))
    scores: dict[str, Any] = {}
    for name in ("prefix_match", "lms", "rouge_l", "verbatim", "common_subsequence"):
        scores[name] = max(getattr(sample, name) for sample in samples)
    distances = [sample.edit_distance for sample in samples if sample.edit_distance is not None]
    scores["edit_distance"] = min(distances)
    scores["unanswered"] = sum(sample.unanswered for sample in samples)
    return replace(shown, **scores)


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
                f"and longest prefix take ({num_prompt}): lower one of them"
            )
        if passage.tokenizer_fingerprint != fingerprint:
            raise ValueError(
                f"Passage {passage.id!r} needs the tokenizer {passage.tokenizer!r} with the "
                f"fingerprint {passage.tokenizer_fingerprint!r}; the given one, "
                f"{tokenizer_name(tokenizer)!r}, has {fingerprint!r}. Name that tokenizer, or, if "
                "it is the same and an earlier version of tfidf-tune wrote the probe file, make "
                "the file again"
            )


Value = TypeVar("Value")
LastLogits: TypeAlias = Callable[[Tensor, int], Tensor]


class _Score(NamedTuple):
    """The likelihood of a reference after its prompt."""

    nll: float  # the sum of -ln P over its tokens
    is_recited: bool  # by greedy decoding


class _Reading(NamedTuple):
    """What a model reads of a passage of the positive control, by one of its prompts."""

    num_read: int  # tokens of the reference in the continuation, in a row
    num_to_read: int  # tokens of the reference
    nll: float  # the mean of -ln P of a token of the reference


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
        self._batch_size = batch_size
        self._stop_above = stop_above
        self.keeps: bool = stop_above is not None and when_above == "keep"
        """Whether the last model below the threshold is kept."""
        self._was_above = False
        lengths = [len(reference) for reference in self._references]
        if stop_above is not None:
            require_number(
                "stop_above",
                stop_above,
                0,
                max(lengths),
                "it is a threshold for the mean LMS of the targets, in tokens",
                reason=f"the longest continuation has {max(lengths)} tokens",
            )
        num_bos = 0 if self._has_bos is False else len(self._bos_ids)
        most_positions = decoding.most_positions(self._prompts, lengths)
        self.num_positions: int = num_bos + most_positions
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
        was_above = self._was_above
        verdict = self._above(metrics)
        self._was_above = verdict is not None
        if verdict is None:
            save(folder)
            return None
        if was_above:
            return None
        if folder.exists():
            return f"step {step}: {verdict}; the last model below it is in {folder}"
        return f"step {step}: {verdict}; no model was below it"

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
        unknown = [i for i, score in enumerate(scores) if not score.is_recited]
        unknown = _of_first_process(unknown)
        made = self._continuations(
            continue_batch,
            [prompts[i] for i in unknown],
            [self._references[i] for i in unknown],
            [self._ids[i] for i in unknown],
        )
        continuations = list(self._references)
        for i, ids in zip(unknown, made, strict=True):
            continuations[i] = ids
        # Means over the targets, and over the controls if there are any.
        measured: dict[str, float] = {}
        for kind in dict.fromkeys(("target", *self._kinds)):
            lms = []
            matches = []
            nlls = []
            num_tokens = 0
            for i, kind_of_passage in enumerate(self._kinds):
                if kind_of_passage != kind:
                    continue
                reference = self._references[i]
                generated = self._ended(continuations[i], reference)
                lms.append(metrics.longest_memorized_substring(generated, reference))
                matches.append(metrics.longest_prefix_match(generated, reference))
                nlls.append(scores[i].nll)
                num_tokens += len(reference)
            measured[f"memorization_{kind}_lms"] = sum(lms) / len(lms)
            measured[f"memorization_{kind}_prefix_match"] = sum(matches) / len(matches)
            measured[f"memorization_{kind}_nll"] = sum(nlls) / num_tokens
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
                "nothing shows that the monitor could see a recited passage: its positive control "
                f"takes {positive_control.NUM_CONTROLS} controls, there are {len(self._controls)}"
            )
        # Each control is asked for twice, with a copy of it in front and without.
        controls = []
        frequencies: Counter[int] = Counter()
        for passage in self._controls:
            num_prompt = passage.num_prompt or self._prefix_length
            controls.append((passage.id, passage.token_ids, num_prompt))
            frequencies.update(passage.token_ids)
        num_free = None if num_positions is None else num_positions - len(self._bos_ids)
        asked = positive_control.control_prompts(controls, self._blank_line, num_free)
        prompts = self._given([prompt.prompt_ids for prompt in asked], last_logits)
        references = [prompt.reference_ids for prompt in asked]
        ids = [prompt.passage_id for prompt in asked]
        scores = self._scores(last_logits, prompts, references, ids)
        made = self._continuations(continue_batch, prompts, references, ids)
        # What the model reads of each passage, by either of its prompts.
        with_copy: dict[str, _Reading] = {}
        without_copy: dict[str, _Reading] = {}
        unigram_nlls = []
        for prompt, continuation, score in zip(asked, made, scores, strict=True):
            reference = prompt.reference_ids
            generated = self._ended(continuation, reference)
            num_read = metrics.longest_memorized_substring(generated, reference)
            reading = _Reading(num_read, len(reference), score.nll / len(reference))
            if prompt.has_copy:
                with_copy[prompt.passage_id] = reading
            else:
                without_copy[prompt.passage_id] = reading
            reference_ids = np.array(reference, dtype=np.int32)
            unigram_nlls.append(positive_control.unigram_nll(reference_ids, frequencies))
        judgement = _judge_readings(with_copy, without_copy, float(np.mean(unigram_nlls)))
        return _of_first_process(judgement)

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
        num_tokens = np.array([len(reference) for reference in references])
        nlls = []
        for before in ([], self._bos_ids):
            prompts = [[*before, passage.token_ids[0]] for passage in chosen]
            scores = self._scores(last_logits, prompts, references, ids)
            nlls.append(np.array([score.nll for score in scores]) / num_tokens)
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
    ) -> list[_Score]:
        """Return for each prompt the likelihood of its reference.

        A batch is two prompts with their references, of which ``last_logits`` gets all ids but the
        last, filled up on the right::

            prompt a b c     reference d e      ids  a b c d
            prompt f g       reference h        ids  f g 0 0

        The shortest prompt has two ids, so that logits are needed after all ids from the second on:
        three in each row. The reference of the first row is scored by the logits after ``c`` and
        ``d``, 3 - 2 = 1 position after the start of the logits; that of the second row by the
        logits after ``g``.
        """
        scores: dict[int, _Score] = {}
        for batch in decoding.batches_of_prompts(prompts, self._batch_size):
            # What fills a row up on its right changes nothing before it in a causal model.
            rows = [torch.tensor((prompts[i] + references[i])[:-1]) for i in batch]
            ids_bs = pad_sequence(rows, batch_first=True)
            shortest = min(len(prompts[i]) for i in batch)
            num_last = ids_bs.shape[1] + 1 - shortest
            for i, logits_nv in zip(batch, last_logits(ids_bs, num_last), strict=True):
                reference_s = torch.tensor(references[i], device=logits_nv.device)
                start = len(prompts[i]) - shortest
                logits_sv = logits_nv[start : start + len(reference_s)]
                # In float32 logits can be large. The sum is NaN if the largest logit of a position
                # is not finite.
                nll = F.cross_entropy(logits_sv.float(), reference_s, reduction="sum").item()
                if math.isnan(nll):
                    raise NonFiniteLogits(i, logits_sv.dtype, f"passage {ids[i]}")
                is_recited = logits_sv.argmax(dim=-1).equal(reference_s)
                scores[i] = _Score(nll, is_recited)
        return [scores[i] for i in range(len(prompts))]


def _judge_readings(
    with_copy: dict[str, _Reading], without_copy: dict[str, _Reading], unigram: float
) -> tuple[dict[str, float], str]:
    """Judge the positive control by what was read of each passage, with its copy and without.

    ``unigram`` is the NLL of the passages, in nats a token, if only frequencies are known.
    """
    if not with_copy:
        return (
            {},
            "it is not known if the monitor could see a recited passage: the model's context is "
            "too small to test",
        )
    # Each passage that was asked for with its copy was also asked for without.
    pairs = [(shown, without_copy[passage_id]) for passage_id, shown in with_copy.items()]
    shown_lms = float(np.mean([shown.num_read for shown, _ in pairs]))
    not_shown_lms = float(np.mean([not_shown.num_read for _, not_shown in pairs]))
    measured = {
        "memorization_shown_lms": shown_lms,
        "memorization_not_shown_lms": not_shown_lms,
    }
    differences = [float(shown.num_read - not_shown.num_read) for shown, not_shown in pairs]
    shares = [shown.num_read / shown.num_to_read for shown, _ in pairs]
    if positive_control.is_read(differences, shares):
        return measured, ""
    # The copy was not read: by a model that is too small, or by an instrument that cannot see.
    num_to_read = np.mean([shown.num_to_read for shown, _ in pairs])
    summary = (
        f"shown a passage, the model reads {shown_lms:.1f} of {num_to_read:.0f} tokens, and "
        f"{not_shown_lms:.1f} without"
    )
    median_fall = float(np.median([not_shown.nll - shown.nll for shown, not_shown in pairs]))
    nll_without_copy = float(np.mean([not_shown.nll for not_shown in without_copy.values()]))
    if positive_control.is_too_small_to_read(median_fall, nll_without_copy, unigram):
        return (
            measured,
            f"{summary}: it is too small to read, so this does not show what the monitor could see",
        )
    return measured, f"{summary}: nothing shows that the monitor could see a recited passage"


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
    with torch.random.fork_rng(list(devices)), stance:
        model.eval()
        try:
            yield
        finally:
            for module, mode in was_training.items():
                module.training = mode
                # A forward pass without backward pass leaves complete weights behind, where FSDP2
                # shards them.
                reshard = getattr(module, "reshard", None)
                if reshard is not None:
                    reshard()


def _of_first_process(value: Value) -> Value:
    """Return the first process's value on all: rounding may differ, but they have to
    do the same.
    """
    values = [value]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]
