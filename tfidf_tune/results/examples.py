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
        return ((text, False),) if text else ()
    words = re.findall(r"\s*\S+", text)
    ours: Sequence[object] = [word.strip() for word in words]
    theirs: Sequence[object] = sample.reference_text.split()
    by_token = decode is not None and decode(ids) == text
    if by_token:
        ours = ids
        theirs = sample.reference_ids
    match = SequenceMatcher(None, ours, theirs, autojunk=False).find_longest_match()
    ends = match.a, match.a + match.size
    if decode is not None and by_token:
        # A cut inside a character or before a joining space decodes differently: compare with the
        # whole text.
        first, last = (len(commonprefix((text, decode(ids[:end])))) for end in ends)  # noqa: RUF071 (characters are meant)
    else:
        first, last = (len("".join(words[:end])) for end in ends)
    return _pieces([text[:first], text[first:last], text[last:]], [(1, 2)])


def shared_pieces(truth: str, said: str) -> tuple[Pieces, Pieces]:
    """Cut two texts where they agree: pieces of each, and whether a piece is in both, in order.

    Runs of at least two words count, of text without spaces runs of at least eight characters.
    """
    both = [re.findall(r"\s*\S+", text) for text in (truth, said)]
    least = 2
    if any(
        len(text) > LONGEST_WORD * len(words)
        for text, words in zip((truth, said), both, strict=True)
    ):
        both = [list(truth), list(said)]
        least = 8
    ours, theirs = ([word.strip() for word in words] for words in both)
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False)
    matches = [match for match in blocks.get_matching_blocks() if match.size >= least]
    return (
        _pieces(both[0], [(match.a, match.a + match.size) for match in matches]),
        _pieces(both[1], [(match.b, match.b + match.size) for match in matches]),
    )


def excerpt(pieces: Pieces, num_characters: int) -> Pieces:
    """Keep 160 characters, or half of ``num_characters`` if less, around the longest shared piece;
    count the others.
    """
    most = min(_EXCERPT, num_characters // 2)
    text = "".join(piece for piece, _ in pieces)
    if len(text) <= most:
        return pieces
    starts = [sum(len(piece) for piece, _ in pieces[:number]) for number in range(len(pieces))]
    longest = max(range(len(pieces)), key=lambda number: pieces[number][1] * len(pieces[number][0]))
    first = max(0, min(starts[longest] - most // 4, len(text) - most)) if pieces[longest][1] else 0
    last = first + most
    kept = [
        (piece[max(0, first - start) : max(0, last - start)], shared)
        for start, (piece, shared) in zip(starts, pieces, strict=True)
    ]
    before = [(f"[{first:,} characters] … ", False)] if first else []
    after = [(f" … [{len(text) - last:,} characters]", False)] if last < len(text) else []
    return (*before, *(piece for piece in kept if piece[0]), *after)


def _pieces(words: Sequence[str], spans: Sequence[tuple[int, int]]) -> Pieces:
    pieces = []
    end = 0
    for first, last in spans:
        pieces += [("".join(words[end:first]), False), ("".join(words[first:last]), True)]
        end = last
    pieces.append(("".join(words[end:]), False))
    return tuple(piece for piece in pieces if piece[0])


def checkpoint_decoder(checkpoint: str) -> Decode | None:
    """Load the tokenizer in a checkpoint's folder; None for a hub id, or if the folder has none."""
    folder = Path(checkpoint)
    try:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer  # without transformers, which takes seconds to import

            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            return lambda ids: str(tokenizer.decode(ids))
        if any(
            (folder / name).is_file()
            for name in ("tokenizer.model", "tokenizer_config.json", "vocab.json")
        ):
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
    shortest = min((sample.prefix_length for sample, _ in targets), default=0)
    by_lms = sorted(
        (one for one in targets if one[0].prefix_length == shortest), key=lambda one: -one[0].lms
    )
    decoders = {
        objective: checkpoint_decoder(one.checkpoint) for objective, one in checkpoints.items()
    }
    examples = []
    for which, index in [("recited most", 0), ("a median one", len(by_lms) // 2)][: len(by_lms)]:
        wanted, prompt = by_lms[index]
        length = wanted.prefix_length
        offset = wanted.offset
        tokens = f"tokens {offset + 1} to {offset + length}" if offset else f"first {length} tokens"
        if not length:
            tokens = "own prompt"
        continuations = []
        for objective, checkpoint in checkpoints.items():
            for sample, _ in checkpoint.samples:
                prompted_by = (sample.passage_id, sample.offset, sample.prefix_length)
                if prompted_by == (wanted.passage_id, offset, length):
                    scores = f"LMS {sample.lms}, ROUGE-L {sample.rouge_l:.1f}"
                    pieces = recited_pieces(sample, decoders[objective])
                    continuations.append(Continuation(objective, scores, pieces))
        examples.append(
            Example(
                title=f"{model}: {wanted.passage_id} from its {tokens} ({which} under {baseline})",
                prompt=prompt,
                truth=wanted.reference_text,
                continuations=tuple(continuations),
            )
        )
    return examples
