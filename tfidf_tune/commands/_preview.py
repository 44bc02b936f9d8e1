"""What a training config makes of its data set: examples with the learned tokens marked, and counts
of tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

from tfidf_tune._printing import counted, say, visible
from tfidf_tune._tokenizer import decode_whole
from tfidf_tune.weighting import IGNORE_INDEX

_MOST_COUNTED = (
    10_000  # items that are read for the counts: torchtune's data sets tokenize when they are read
)

Document: TypeAlias = tuple[list[int], list[bool]]  # token ids, and whether the loss counts each


def print_preview(dataset: Any, tokenizer: Any, number: int) -> None:
    """Print the first examples of a data set, and how many tokens it has."""
    for at, document in enumerate(
        islice(_documents(dataset, range(len(dataset))), number), start=1
    ):
        _print_document(tokenizer, at, document)
    say(_counts(dataset))


def _documents(dataset: Any, indices: Sequence[int]) -> Iterator[Document]:
    """Yield the sequences of a data set, those of packed rows one by one."""
    for item in (dataset[index] for index in indices):
        tokens, labels = ([int(value) for value in item[name]] for name in ("tokens", "labels"))
        start = 0
        for length in map(int, item.get("seq_lens", [len(tokens)])):
            end = start + length
            # Labels are shifted by one: the first token of a document is never learned.
            is_learned = [False, *(label != IGNORE_INDEX for label in labels[start + 1 : end])]
            if any(is_learned) or "seq_lens" not in item:  # otherwise padding
                yield tokens[start:end], is_learned[:length]
            start = end


def _print_document(tokenizer: Any, number: int, document: Document) -> None:
    tokens, is_learned = document
    console = Console(highlight=False)
    is_colored = console.color_system is not None and not console.no_color
    mark = "in green" if is_colored else "in [[ ]]"
    say(f"\nExample {number}: {counted(len(tokens), 'token')}, {sum(is_learned):,} learned, {mark}")
    shown = Text()
    end = 0
    before = ""
    for learned, run in groupby(is_learned):
        end += len(list(run))
        # Decoded from the start, because a decoder drops the space before a first token.
        whole = decode_whole(tokenizer, tokens[:end])
        text = visible(whole[len(before) :])
        before = whole
        if is_colored:
            shown.append(text, "bold green" if learned else "dim")
        else:
            shown.append(f"[[{text}]]" if learned else text)
    console.print(shown, soft_wrap=True)


def _counts(dataset: Any) -> str:
    num_items = len(dataset)
    step = -(-num_items // _MOST_COUNTED)
    lengths = []
    num_learned = 0
    for tokens, is_learned in _documents(dataset, range(0, num_items, step)):
        lengths.append(len(tokens))
        num_learned += sum(is_learned)
    lengths.sort()
    num_tokens = sum(lengths)
    median = lengths[len(lengths) // 2]
    is_packed = "seq_lens" in dataset[0]
    sampled = f", one in {step} of which was counted" if step > 1 else ""
    items = counted(num_items, "packed row" if is_packed else "example")
    in_examples = f" in {counted(len(lengths), 'example')}" if is_packed else ""
    return (
        "\n"
        f"{items}{sampled}: {num_tokens:,} tokens{in_examples}, {num_learned / num_tokens:.1%} of "
        f"them learned; {lengths[0]:,} to {lengths[-1]:,} tokens in an example, median {median:,}"
    )
