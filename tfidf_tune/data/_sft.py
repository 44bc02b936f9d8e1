"""Supervised fine-tuning on a prompt and its target: what the data sets of SQuAD and CNN/DailyMail share."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from tfidf_tune.data._cache import cached_counts, cached_folder
from tfidf_tune.data._encoding import TextTokenizer, TokenArray, encode_texts, tokenizer_fingerprint

# Part of every cache key: raise it when a change of code changes the ids.
FORMAT_VERSION = 1

# Rows in memory; enough that those to be cut, encoded together, keep a fast tokenizer's threads busy.
_BATCH_SIZE = 1024

logger = logging.getLogger(__name__)


class PromptTargetDataset(Dataset[dict[str, list[int]]]):
    """Prompts and their targets as a map-style data set.

    An item is ``{"tokens": list[int], "labels": list[int]}``: the prompt, the target and EOS. Labels are
    the tokens, -100 in the prompt; the recipe shifts them.

    Args:
        tokens (TokenArray): int32 ids of all examples, one after the other; may be memory-mapped.
        spans (npt.NDArray[np.int64]): shape ``[num_examples, 3]``: where in ``tokens`` an example starts,
            where its target does, and where the example ends.
        num_cut (int): examples whose prompt was cut.
        num_cut_targets (int): examples whose target was cut.
        num_left_out (int): rows of the source that gave no example.

    Attributes:
        num_cut (int): as given.
        num_cut_targets (int): as given.
        num_left_out (int): as given.
    """

    def __init__(
        self,
        tokens: TokenArray,
        spans: npt.NDArray[np.int64],
        *,
        num_cut: int,
        num_cut_targets: int,
        num_left_out: int,
    ) -> None:
        self._tokens = tokens
        self._spans = spans
        self.num_cut = num_cut
        self.num_cut_targets = num_cut_targets
        self.num_left_out = num_left_out

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        start, target, end = self._spans[index]
        tokens: list[int] = self._tokens[start:end].tolist()
        num_prompt = target - start
        return {"tokens": tokens, "labels": [CROSS_ENTROPY_IGNORE_IDX] * num_prompt + tokens[num_prompt:]}


@dataclass(frozen=True)
class Example:
    """A row of the source.

    Attributes:
        prompt: turns the text, whole or cut, into the prompt.
        text: what is cut where the prompt is too long.
        target: what is learnt; a space is put before it.
        keep: start and end of the characters of ``text`` that no cut may take.
    """

    prompt: Callable[[str], str]
    text: str
    target: str
    keep: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Limits:
    """The most tokens of an example, BOS and EOS included.

    Attributes:
        total: of the whole.
        prompt: of the prompt; its text is cut to fit.
        target: of the target and EOS; it is cut to fit.
    """

    total: int
    prompt: int
    target: int


def prompt_target_dataset(
    tokenizer: TextTokenizer,
    examples: Iterable[Example | None],
    limits: Limits,
    *,
    empty_prompt: str,
    source: str,
    fingerprint: str,
    cache_dir: str | None,
) -> PromptTargetDataset:
    """Tokenize examples into the cache, or find them there, and log how many were cut or left out.

    Args:
        tokenizer (TextTokenizer): the tokenizer; its BOS, where it has one, opens every example.
        examples (Iterable[Example | None]): read only when they are not in the cache; None for a row that
            has nothing to learn.
        limits (Limits): already checked.
        empty_prompt (str): the prompt of empty texts, which ends as every prompt does.
        source (str): the name of the source, for messages.
        fingerprint (str): hash of the source.
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        PromptTargetDataset: the data set.

    Raises:
        ValueError: If the examples cannot be read or none is left.
    """
    bos = opening_ids(tokenizer)

    def build(folder: Path) -> dict[str, int]:
        return _write_examples(folder, tokenizer, examples, limits, empty_prompt, source)

    settings: dict[str, Any] = {
        "kind": "prompt_target",
        "format_version": FORMAT_VERSION,
        "empty_prompt": empty_prompt,
        "limits": asdict(limits),
        "special_ids": [bos, tokenizer.eos_id],
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "source_fingerprint": fingerprint,
    }
    folder = cached_folder(cache_dir, settings, build)
    counts = cached_counts(folder)
    dataset = PromptTargetDataset(
        np.memmap(folder / "tokens.int32", dtype=np.int32, mode="r"), np.load(folder / "spans.npy"), **counts
    )
    logger.log(
        logging.WARNING if any(counts.values()) else logging.INFO,
        "%s: %d examples; of these %d with a cut prompt and %d with a cut target; %d rows left out",
        source,
        len(dataset),
        dataset.num_cut,
        dataset.num_cut_targets,
        dataset.num_left_out,
    )
    return dataset


def opening_ids(tokenizer: TextTokenizer) -> list[int]:
    """Return what the tokenizer puts before a text.

    Args:
        tokenizer (TextTokenizer): any tokenizer.

    Returns:
        list[int]: BOS, or nothing where the tokenizer has none.
    """
    return tokenizer.encode("", add_bos=True, add_eos=False)


def check_limit(name: str, limit: int, tokenizer: TextTokenizer, empty_prompt: str, num_target: int = 0) -> None:
    """Refuse a limit that leaves no room for any text.

    Args:
        name (str): the name of the limit.
        limit (int): tokens of the prompt and ``num_target`` of the target.
        tokenizer (TextTokenizer): the tokenizer.
        empty_prompt (str): the prompt of empty texts.
        num_target (int): the least tokens of a target that the limit includes. Default: 0

    Raises:
        ValueError: If no token is left for the text of the prompt.
    """
    needed = len(tokenizer.encode(empty_prompt, add_bos=True, add_eos=False)) + 1 + num_target
    if limit < needed:
        raise ValueError(
            f"{name} is {limit}, but the words of the prompt around a text of one token take {needed}: raise it"
        )


def fit_prompts(
    tokenizer: TextTokenizer, examples: Sequence[Example], max_tokens: Sequence[int]
) -> tuple[dict[int, TokenArray], set[int]]:
    """Encode prompts, the text cut where a prompt would take too many tokens.

    A text loses tokens from its end. Where this would take ``keep``, the room that is left goes half
    before and half behind ``keep``, and more to one side where the other needs less. A prompt is always
    encoded in one piece, so that its ids are those of a text.

    Args:
        tokenizer (TextTokenizer): the tokenizer.
        examples (Sequence[Example]): encoded together, for speed.
        max_tokens (Sequence[int]): for each the most tokens of its prompt, without BOS.

    Returns:
        tuple[dict[int, TokenArray], set[int]]: int32 ids of shape ``[num_tokens]`` by the index of the
            example, without those where not even ``keep`` alone fits; and the indices of those cut.
    """
    fitting: dict[int, TokenArray] = {}
    windows: dict[int, _Window] = {}
    texts = {index: example.text for index, example in enumerate(examples)}
    # Two rounds, and more where the pieces of a window, joined, take more tokens than each by itself.
    while texts:
        excess: dict[int, int] = {}
        prompts = _encode(tokenizer, (examples[index].prompt(text) for index, text in texts.items()))
        for index, prompt in zip(texts, prompts, strict=True):
            if len(prompt) <= max_tokens[index]:
                fitting[index] = prompt
            else:
                excess[index] = len(prompt) - max_tokens[index]
        new = [index for index in excess if index not in windows]
        before = _encode(tokenizer, (examples[index].text[: examples[index].keep[0]] for index in new))
        behind = _encode(tokenizer, (examples[index].text[examples[index].keep[1] :] for index in new))
        for index, *pieces in zip(new, before, behind, strict=True):
            windows[index] = _Window(examples[index], *pieces)
        shrunk = {index: windows[index].shrink(tokenizer, num_tokens) for index, num_tokens in excess.items()}
        texts = {index: text for index, text in shrunk.items() if text is not None}
    return fitting, fitting.keys() & windows.keys()


def encode_prompts(
    tokenizer: TextTokenizer, prompts: Sequence[Callable[[str], str]], texts: Sequence[str], max_tokens: int
) -> tuple[list[list[int]], set[int]]:
    """Encode prompts as the data sets do, for an evaluation: opened by BOS, texts cut at their end to fit.

    Args:
        tokenizer (TextTokenizer): the tokenizer; its BOS, where it has one, opens every prompt.
        prompts (Sequence[Callable[[str], str]]): each turns its text, whole or cut, into the prompt.
        texts (Sequence[str]): as many.
        max_tokens (int): tokens in a prompt, BOS included.

    Returns:
        tuple[list[list[int]], set[int]]: the ids of each prompt; and the indices of those whose text was cut.

    Raises:
        ValueError: If a prompt is too long even without its text.
    """
    bos = opening_ids(tokenizer)
    encoded: list[list[int]] = []
    all_cut: set[int] = set()
    for first in range(0, len(texts), _BATCH_SIZE):
        batch = range(first, min(first + _BATCH_SIZE, len(texts)))
        examples = [Example(prompts[index], texts[index], target="") for index in batch]
        fitting, cut = fit_prompts(tokenizer, examples, [max_tokens - len(bos)] * len(examples))
        for index in range(len(examples)):
            if index not in fitting:
                raise ValueError(
                    f"{max_tokens} tokens are too few for the prompt {examples[index].prompt('')[:200]!r}, even "
                    "without its text: raise the limit"
                )
            encoded.append(bos + fitting[index].tolist())
        all_cut |= {first + index for index in cut}
    return encoded, all_cut


class _Window:
    """The part of an example's text that is kept."""

    def __init__(self, example: Example, before: TokenArray, behind: TokenArray) -> None:
        self._example = example
        self._before = before
        self._behind = behind
        self._room = len(before) + len(behind)

    def shrink(self, tokenizer: TextTokenizer, num_tokens: int) -> str | None:
        """Give up ``num_tokens`` more; None where there are not as many left."""
        self._room -= num_tokens
        if self._room < 0:
            return None
        before, behind, room = self._before, self._behind, self._room
        num_before = len(before) if len(before) <= room else max(room // 2, room - len(behind))
        first, last = self._example.keep
        # Of decoded text only the length is taken, as a character may be cut in half. Both are counted from
        # the far end, where a space that SentencePiece drops before the first token is outside the window.
        start = first - len(tokenizer.decode(before[len(before) - num_before :].tolist()))
        end = len(self._example.text) - len(tokenizer.decode(behind[room - num_before :].tolist()))
        return self._example.text[max(start, 0) : max(end, last)].strip()


def _encode(tokenizer: TextTokenizer, texts: Iterable[str]) -> list[TokenArray]:
    return [ids for _, ids in encode_texts(tokenizer, texts)]


def _write_examples(
    folder: Path,
    tokenizer: TextTokenizer,
    examples: Iterable[Example | None],
    limits: Limits,
    empty_prompt: str,
    source: str,
) -> dict[str, int]:
    bos = np.array(opening_ids(tokenizer), dtype=np.int32)
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    # A target is encoded behind what comes before it in every prompt: no tokenizer then adds or loses a space.
    [ending] = _encode(tokenizer, [empty_prompt])
    counts = {"num_cut": 0, "num_cut_targets": 0, "num_left_out": 0}
    spans: list[tuple[int, int, int]] = []
    position = 0
    rows = iter(examples)
    with (folder / "tokens.int32").open("wb") as file:
        while batch := list(islice(rows, _BATCH_SIZE)):
            whole = [example for example in batch if example is not None]
            targets = _encode(tokenizer, (f"{empty_prompt} {example.target}" for example in whole))
            targets = [target[len(ending) :] for target in targets]
            kept = [np.concatenate([target[: limits.target - 1], eos]) for target in targets]
            max_prompts = [min(limits.prompt, limits.total - len(target)) - len(bos) for target in kept]
            prompts, cut = fit_prompts(tokenizer, whole, max_prompts)
            counts["num_left_out"] += len(batch) - len(prompts)
            counts["num_cut"] += len(cut)
            for index, prompt in sorted(prompts.items()):
                counts["num_cut_targets"] += len(kept[index]) <= len(targets[index])
                ids = np.concatenate([bos, prompt, kept[index]])
                file.write(ids.tobytes())
                spans.append((position, position + len(bos) + len(prompt), position + len(ids)))
                position += len(ids)
    if not spans:
        raise ValueError(
            f"{source!r} gives no example: {counts['num_left_out']} rows are empty, have no answer in their context "
            "or are too long. Raise the limit of tokens or name another source"
        )
    np.save(folder / "spans.npy", np.array(spans, dtype=np.int64))
    return counts
