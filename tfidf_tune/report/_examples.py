"""Continuations with what they recite marked, and which passages to show."""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

from tfidf_tune.analysis import Evaluation, ProbeSample
from tfidf_tune.report._document import Continuation, Example

Decode: TypeAlias = Callable[[list[int]], str]
Pieces: TypeAlias = tuple[tuple[str, bool], ...]


def recited_pieces(sample: ProbeSample, decode: Decode | None) -> Pieces:
    """Cut a continuation at its longest memorized substring.

    The substring is found among the token ids. Where they cannot be decoded to the sample's text (no tokenizer, or
    another one), it is the longest run of whole words that both texts share.

    Args:
        sample (ProbeSample): what the model generated, and the reference.
        decode (Callable[[list[int]], str] | None): token ids -> text.

    Returns:
        tuple[tuple[str, bool], ...]: non-empty texts that joined are ``generated_text``, and whether it is the recited
            one; nothing is marked at an LMS of 0.
    """
    text = sample.generated_text
    if sample.lms == 0:
        return ((text, False),) if text else ()
    if decode is not None and decode(sample.generated_ids) == text:
        start, size = _longest_common(sample.generated_ids, sample.reference_ids)
        # A cut inside a character or before a joining space decodes differently: the text is what both agree on.
        first, last = (_shared_length(text, decode(sample.generated_ids[:end])) for end in (start, start + size))
    else:
        words = re.findall(r"\s*\S+", text)
        start, size = _longest_common([word.strip() for word in words], sample.reference_text.split())
        first, last = (len("".join(words[:end])) for end in (start, start + size))
    pieces = ((text[:first], False), (text[first:last], True), (text[last:], False))
    return tuple(piece for piece in pieces if piece[0])


def checkpoint_decoder(checkpoint: str) -> Decode | None:
    """Load the tokenizer that lies with a checkpoint.

    Args:
        checkpoint (str): its folder. A hub id is not fetched.

    Returns:
        Callable[[list[int]], str] | None: token ids -> text; None where there is no folder or no tokenizer in it.
    """
    if not Path(checkpoint).is_dir():
        return None
    from tfidf_tune.data import hf_tokenizer

    try:
        return hf_tokenizer(checkpoint).decode
    except (ValueError, OSError):
        return None


def recitation_examples(
    model: str, evaluations: Mapping[str, Evaluation], decoder: Callable[[str], Decode | None]
) -> list[Example]:
    """The target that the first objective recites most, and one that it recites as much as a median one.

    Both with the shortest prefix that was asked; the first of equals.

    Args:
        model (str): name of the model.
        evaluations (Mapping[str, Evaluation]): objective -> its evaluation on the same prompts; the first is the
            baseline.
        decoder (Callable[[str], Callable[[list[int]], str] | None]): checkpoint -> how to decode its ids.

    Returns:
        list[Example]: empty where there is no target, one where there is one target.
    """
    baseline, first = next(iter(evaluations.items()))
    targets = [sample for sample in first.samples if sample.kind == "target"]
    shortest = min((sample.prefix_length for sample in targets), default=0)
    by_lms = sorted((s for s in targets if s.prefix_length == shortest), key=lambda sample: -sample.lms)
    decoders = {objective: decoder(evaluation.checkpoint) for objective, evaluation in evaluations.items()}
    chosen = [("recited most", 0), ("a median one", len(by_lms) // 2)][: len(by_lms)]
    return [
        Example(
            title=f"{model}: {_prompt_name(by_lms[index])} ({which} under {baseline})",
            prompt=first.prompts.get(_prompt_of(by_lms[index]), ""),
            truth=by_lms[index].reference_text,
            continuations=tuple(
                _continuation(objective, _same_prompt(evaluation.samples, by_lms[index]), decoders[objective])
                for objective, evaluation in evaluations.items()
            ),
        )
        for which, index in chosen
    ]


def _prompt_name(sample: ProbeSample) -> str:
    if sample.offset == 0:
        return f"{sample.passage_id} from its first {sample.prefix_length} tokens"
    return f"{sample.passage_id} from its tokens {sample.offset + 1} to {sample.offset + sample.prefix_length}"


def _continuation(objective: str, sample: ProbeSample, decode: Decode | None) -> Continuation:
    scores = f"LMS {sample.lms}, ROUGE-L {sample.rouge_l:.1f}"
    return Continuation(objective, scores, recited_pieces(sample, decode))


def _same_prompt(samples: Sequence[ProbeSample], wanted: ProbeSample) -> ProbeSample:
    return next(sample for sample in samples if _prompt_of(sample) == _prompt_of(wanted))


def _prompt_of(sample: ProbeSample) -> tuple[str, int, int]:
    return sample.passage_id, sample.offset, sample.prefix_length


def _longest_common(generated: Sequence[object], reference: Sequence[object]) -> tuple[int, int]:
    """Where the longest run that both share starts in ``generated``, and its length."""
    match = SequenceMatcher(None, generated, reference, autojunk=False).find_longest_match()
    return match.a, match.size


def _shared_length(text: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))
