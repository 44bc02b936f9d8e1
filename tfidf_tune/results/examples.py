"""Continuations with their recited span marked, and which passages to show."""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from os.path import commonprefix
from pathlib import Path
from typing import TypeAlias

from tfidf_tune.probe import ProbeSample
from tfidf_tune.report.document import Continuation, Example
from tfidf_tune.results.table import LONGEST_WORD, Checkpoint

Decode: TypeAlias = Callable[[list[int]], str]
Pieces: TypeAlias = tuple[tuple[str, bool], ...]
_EXCERPT = 160


def recited_pieces(sample: ProbeSample, decode: Decode | None) -> Pieces:
    """Cut a continuation at its longest memorized substring: non-empty texts, and whether each is
    recited.

    It is found among the token ids or, if they do not decode to the text, as the longest run of
    words of both texts.
    """
    text = sample.generated_text
    ids = sample.generated_ids
    if sample.lms == 0:
        return _pieces([text], [])
    words = re.findall(r"\s*\S+", text)
    ours: Sequence[object] = [word.strip() for word in words]
    theirs: Sequence[object] = sample.reference_text.split()
    by_token = decode is not None and decode(ids) == text
    if by_token:
        ours = ids
        theirs = sample.reference_ids
    match = SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match()
    ends = []  # of the text before the span, and of the span, in characters
    for end in (match.a, match.a + match.size):
        if decode is not None and by_token:
            # A cut inside a character or before a joining space decodes differently: compare with
            # the whole text.
            ends.append(len(commonprefix((text, decode(ids[:end])))))  # noqa: RUF071 (characters are meant)
        else:
            ends.append(len("".join(words[:end])))
    first, last = ends
    return _pieces([text[:first], text[first:last], text[last:]], [(1, 2)])


def shared_pieces(truth: str, said: str) -> tuple[Pieces, Pieces]:
    """Cut two texts where they agree: pieces of each, and whether a piece is in both, in order.

    Runs of at least two words count, of text without spaces runs of at least eight characters.
    """
    ours = re.findall(r"\s*\S+", truth)
    theirs = re.findall(r"\s*\S+", said)
    least = 2
    if _has_no_spaces(truth, ours) or _has_no_spaces(said, theirs):
        ours = list(truth)
        theirs = list(said)
        least = 8
    stripped_ours = [word.strip() for word in ours]
    stripped_theirs = [word.strip() for word in theirs]
    matcher = SequenceMatcher(None, stripped_ours, stripped_theirs, autojunk=False)
    spans_of_truth = []
    spans_of_said = []
    for block in matcher.get_matching_blocks():
        if block.size >= least:
            spans_of_truth.append((block.a, block.a + block.size))
            spans_of_said.append((block.b, block.b + block.size))
    return _pieces(ours, spans_of_truth), _pieces(theirs, spans_of_said)


def _has_no_spaces(text: str, words: Sequence[str]) -> bool:
    return len(text) > LONGEST_WORD * len(words)


def excerpt(pieces: Pieces, num_characters: int) -> Pieces:
    """Keep 160 characters, or half of ``num_characters`` if less, around the longest shared piece;
    count the others.

    A quarter of them stand before that piece, as far as the text has so many. For example, of 500
    characters with a shared piece from 100 to 130 the characters 60 to 220 are kept, with
    "[60 characters] … " before and " … [280 characters]" after them.
    """
    most = min(_EXCERPT, num_characters // 2)
    # Where each piece starts in the text, and the longest one that is shared.
    starts = []
    num_in_text = 0
    start_of_longest = 0
    longest = 0
    for text, shared in pieces:
        starts.append(num_in_text)
        if shared and len(text) > longest:
            start_of_longest = num_in_text
            longest = len(text)
        num_in_text += len(text)
    if num_in_text <= most:
        return pieces
    first = 0
    if longest:
        first = max(0, min(start_of_longest - most // 4, num_in_text - most))
    last = first + most
    # What of each piece lies between the first and the last character.
    kept = []
    if first:
        kept.append((f"[{first:,} characters] … ", False))
    for start, (text, shared) in zip(starts, pieces, strict=True):
        part = text[max(0, first - start) : max(0, last - start)]
        if part:
            kept.append((part, shared))
    if last < num_in_text:
        kept.append((f" … [{num_in_text - last:,} characters]", False))
    return tuple(kept)


def _pieces(words: Sequence[str], spans: Sequence[tuple[int, int]]) -> Pieces:
    """Join words to pieces: those of the spans, and those between them, without empty pieces."""
    pieces = []
    end = 0
    for first, last in spans:
        pieces.append(("".join(words[end:first]), False))
        pieces.append(("".join(words[first:last]), True))
        end = last
    pieces.append(("".join(words[end:]), False))
    return tuple(piece for piece in pieces if piece[0])


def checkpoint_decoder(checkpoint: str) -> Decode | None:
    """Load the tokenizer in a checkpoint's folder; None for a hub id, or if the folder has none."""
    folder = Path(checkpoint)
    try:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer  # without transformers, which takes seconds to import

            file = folder / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(file))
            return lambda ids: str(tokenizer.decode(ids))
        others = ("tokenizer.model", "tokenizer_config.json", "vocab.json")
        if any((folder / name).is_file() for name in others):
            from tfidf_tune.data import hf_tokenizer

            return hf_tokenizer(checkpoint).decode
    except Exception:  # the libraries are not in the extra `report`, and each has its own errors
        return None
    return None


def recitation_examples(model: str, checkpoints: Mapping[str, Checkpoint]) -> list[Example]:
    """Show the target that the first objective recites most and the median one, from the shortest
    prompt.
    """
    baseline, first = next(iter(checkpoints.items()))
    targets = [(sample, prompt) for sample, prompt in first.samples if sample.kind == "target"]
    if not targets:
        return []
    shortest = min(sample.prefix_length for sample, _ in targets)
    asked = [target for target in targets if target[0].prefix_length == shortest]
    by_lms = sorted(asked, key=lambda target: -target[0].lms)
    chosen = [("recited most", *by_lms[0])]
    if len(by_lms) > 1:
        chosen.append(("a median one", *by_lms[len(by_lms) // 2]))
    decoders = {}
    for objective, checkpoint in checkpoints.items():
        decoders[objective] = checkpoint_decoder(checkpoint.checkpoint)
    examples = []
    for name, target, prompt in chosen:
        tokens = _prompt_tokens(target)
        continuations = []
        for objective, checkpoint in checkpoints.items():
            for sample, _ in checkpoint.samples:
                if _prompt_of(sample) == _prompt_of(target):
                    scores = f"LMS {sample.lms}, ROUGE-L {sample.rouge_l:.1f}"
                    pieces = recited_pieces(sample, decoders[objective])
                    continuations.append(Continuation(objective, scores, pieces))
        example = Example(
            title=f"{model}: {target.passage_id} from its {tokens} ({name} under {baseline})",
            prompt=prompt,
            truth=target.reference_text,
            continuations=tuple(continuations),
        )
        examples.append(example)
    return examples


def _prompt_of(sample: ProbeSample) -> tuple[str, int, int]:
    return sample.passage_id, sample.offset, sample.prefix_length


def _prompt_tokens(sample: ProbeSample) -> str:
    """Say which tokens of the passage a prompt had: "first 32 tokens"."""
    length = sample.prefix_length
    if not length:
        return "own prompt"
    if sample.offset:
        return f"tokens {sample.offset + 1} to {sample.offset + length}"
    return f"first {length} tokens"
