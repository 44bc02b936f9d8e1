"""Canaries: passages put into a user's own data set, so that what a training pipeline memorizes can be measured.

After "The Secret Sharer" (Carlini et al. 2019, https://arxiv.org/abs/1802.08232): known text is inserted into the
training data, and what the trained model knows of it is compared with text that was drawn in the same way but not
inserted.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tfidf_tune._checks import check_at_least
from tfidf_tune.data._duplicates import join_documents, name_repeated_windows, none_within
from tfidf_tune.data._embedded import embedded_documents
from tfidf_tune.data._injected_corpus import Places, inject_aligned
from tfidf_tune.data._passages import Passage, make_passages, write_probe_file
from tfidf_tune.data._probe_making import SHARED_TOKENS, WindowChooser
from tfidf_tune.data._sources import EMBEDDED
from tfidf_tune.data._tokenizer import HFTokenizer, check_fits_model, encode_texts

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_AT_ONCE = 1000


class InjectedCanaries:
    """Canaries for a data set of ``datasets``, and the probe file that measures how much a model recites of them.

    Targets are inserted as rows of their own, ``repeats`` times each, at random places; controls are not inserted.
    Both are drawn from the same text and divided at random, so that what a model recites of the controls is what it
    knows without having seen them in training.

    Unless ``texts`` are given, a canary is ``block_size`` tokens of :func:`embedded_documents`. It neither starts nor
    ends with white space, and its text has exactly the token ids of the probe file, after the BOS of the pipeline if
    it adds one. No two of these have 50 tokens in a row in common. A canary that a row of the column contains as a
    whole is replaced by another one. All is a function of the arguments and the data set.

    Args:
        tokenizer (PreTrainedTokenizerBase): the tokenizer of the pipeline, as ``transformers`` has loaded it.
        num_targets (int): canaries to insert. Default: 20
        num_controls (int | None): canaries that are not inserted. Default: None, as many as targets
        repeats (int | Sequence[int]): insertions of each target; several numbers, such as ``(1, 4, 16)``, are given to
            the targets by turns. ``num_injections`` of the probe file tells them apart. Default: 10
        block_size (int): tokens of a canary of the embedded text. The probe prompts with up to 100 of them, and a
            pipeline must not truncate them. Default: 256
        texts (Sequence[str] | None): your own canaries, each as it stands, of which ``num_targets + num_controls``
            are drawn. Default: None, the embedded text
        seed (int): decides which canaries are drawn, which are targets, and where they are inserted. Default: 0

    Attributes:
        passages (list[Passage]): targets, then controls; empty before :meth:`inject`. The ``positions`` of a target
            are ``[row, 0]`` in the returned data set.

    Raises:
        ValueError: If a number is out of range, a canary would be longer than the tokenizer's ``model_max_length``,
            there are too few ``texts``, one is part of another or has only one token, or the tokenizer is none of
            ``transformers`` or has no EOS token.

    Example:
        >>> canaries = InjectedCanaries(tokenizer, num_targets=20, repeats=10, seed=0)
        >>> train_dataset = canaries.inject(dataset, column="text")
        >>> canaries.write_probe_file("probe.jsonl")
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_targets: int = 20,
        num_controls: int | None = None,
        repeats: int | Sequence[int] = 10,
        block_size: int = 256,
        texts: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__}: give the pipeline's tokenizer as transformers loads it, "
                "AutoTokenizer.from_pretrained(...), or processor.tokenizer of a processor"
            )
        numbers = list(repeats) if isinstance(repeats, Sequence) else [repeats]
        if num_controls is None:
            num_controls = num_targets
        check_at_least(1, **{"the length of repeats": len(numbers)})
        for number in numbers:
            check_at_least(1, repeats=number)
        check_at_least(len(numbers), num_targets=num_targets)
        check_at_least(0, num_controls=num_controls, seed=seed)
        check_at_least(2, block_size=block_size)
        self._tokenizer = HFTokenizer(tokenizer, max_seq_len=tokenizer.model_max_length)
        special_tokens = tokenizer.num_special_tokens_to_add()
        if texts is None:
            check_fits_model(self._tokenizer, lower="block_size", block_size=block_size, special_tokens=special_tokens)
        else:
            _check_texts(self._tokenizer, texts, num_targets + num_controls, special_tokens)
        self._repeats = np.resize(numbers, num_targets)
        self._num_canaries = num_targets + num_controls
        self._block_size = block_size
        self._texts = texts
        self._seed = seed
        self.passages: list[Passage] = []

    def inject(self, dataset: "Dataset", column: str = "text", row: Mapping[str, Any] | None = None) -> "Dataset":
        """Insert the targets.

        Args:
            dataset (Dataset): the training data, one split.
            column (str): the column of text that the pipeline trains on. With prompts and completions it is
                ``"completion"``, and ``row={"prompt": ""}``. Default: "text"
            row (Mapping[str, Any] | None): values of the inserted rows in other columns. Default: None, each is None

        Returns:
            Dataset: the rows of ``dataset`` in their order, with the targets among them, and its features.

        Raises:
            ValueError: If ``dataset`` is no ``datasets.Dataset``, ``column`` does not exist or holds no text, ``row``
                names an unknown column, there are too few canaries whose text the column does not contain, or this is
                the second call.
        """
        from datasets import Dataset, concatenate_datasets

        if self.passages:
            raise ValueError(
                "inject() was called before, and a probe file belongs to one data set: make another InjectedCanaries"
            )
        _check_columns(dataset, column, row or {})
        texts = self._draw(dataset, column)
        targets = texts[: len(self._repeats)]
        injected = np.repeat(np.arange(len(targets), dtype=np.int32), self._repeats)
        base = np.arange(len(dataset), dtype=np.int32)
        # A block is the number of a row, those of the targets after those of the data set.
        indices, places = inject_aligned(base[:, None], len(base) + injected[:, None, None], seed=self._seed)
        positions: list[Places] = [[] for _ in texts]
        for target, place in zip(injected, places, strict=True):
            positions[target] += place
        values = {name: [None] * len(targets) for name in dataset.column_names}
        values |= {name: [value] * len(targets) for name, value in (row or {}).items()}
        rows = Dataset.from_dict(values | {column: targets}, features=dataset.features, split=dataset.split)
        result = concatenate_datasets([dataset, rows]).select(indices[:, 0])

        source = EMBEDDED if self._texts is None else "texts"
        windows = [
            (ids, sorted(where), source)
            for ids, where in zip(encode_texts(self._tokenizer, texts), positions, strict=True)
        ]
        self.passages = [
            *make_passages(self._tokenizer, "target", windows[: len(targets)]),
            *make_passages(self._tokenizer, "control", windows[len(targets) :]),
        ]
        return result

    def write_probe_file(self, path: str | Path) -> None:
        """Write the targets and controls for the monitor and for audits, see :func:`write_probe_file`.

        Args:
            path (str | Path): the file; its folder is created if it does not exist.

        Raises:
            OSError: If the file cannot be written.
            ValueError: If :meth:`inject` was not called.
        """
        if not self.passages:
            raise ValueError("there are no canaries yet: call inject() before write_probe_file()")
        write_probe_file(path, self.passages)

    def _draw(self, dataset: "Dataset", column: str) -> list[str]:
        """Draw canaries that the column does not contain, in random order."""
        rng = np.random.default_rng(self._seed)
        candidates: Iterator[str]
        if self._texts is None:
            candidates = _windows(self._tokenizer, self._block_size, rng)
        else:
            candidates = map(self._texts.__getitem__, rng.permutation(len(self._texts)))
        drawn: list[str] = []
        num_known = 0
        while more := list(islice(candidates, self._num_canaries - len(drawn))):
            known = _known_texts(dataset, column, more)
            num_known += len(known)
            drawn += [text for text in more if text not in known]
        if len(drawn) < self._num_canaries:
            what = f"passages of {self._block_size} tokens of the embedded text" if self._texts is None else "texts"
            raise ValueError(
                f"num_targets + num_controls is {self._num_canaries}, but there are only {len(drawn)} {what} that the "
                f"column {column!r} does not contain ({num_known} are in it): lower these numbers"
                f"{' or block_size' if self._texts is None else ''}, or give {'more' if self._texts else 'your own'} "
                "texts"
            )
        # Shuffled, because a passage must not overlap those that were drawn before it.
        return [drawn[index] for index in rng.permutation(len(drawn))]


def _windows(tokenizer: HFTokenizer, length: int, rng: np.random.Generator) -> Iterator[str]:
    """Draw texts of ``length`` tokens that do not overlap, and with no long stretch that the embedded text repeats."""
    documents = embedded_documents("train") + embedded_documents("validation")
    corpus = join_documents(encode_texts(tokenizer, documents))
    chooser = WindowChooser(tokenizer, corpus, length, rng)
    num_shared = min(SHARED_TOKENS, length)
    is_unique = none_within(name_repeated_windows(corpus, num_shared) > 0, length - num_shared + 1)
    for start in chooser.random(chooser.fits & is_unique[: len(chooser.fits)]):
        chooser.take(np.array([start]))
        # A token can differ at the start of a text: byte-level tokenizers have another one without the space before.
        text = tokenizer.decode(chooser.window(start).tolist()).strip()
        if len(tokenizer.encode(text, add_bos=False, add_eos=False)) == length:
            yield text


def _known_texts(dataset: "Dataset", column: str, texts: Sequence[str]) -> set[str]:
    """Return those of the texts that a row of the column contains."""
    known: set[str] = set()
    for batch in dataset.select_columns([column]).with_format(None).iter(batch_size=_ROWS_AT_ONCE):
        joined = "\0".join(text or "" for text in batch[column])
        known.update(text for text in texts if text in joined)
    return known


def _check_texts(tokenizer: HFTokenizer, texts: Sequence[str], needed: int, special_tokens: int) -> None:
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts must be a list of texts, each a canary")
    if len(texts) < needed:
        raise ValueError(f"num_targets + num_controls is {needed}, but there are only {len(texts)} texts")
    lengths = [len(ids) for ids in encode_texts(tokenizer, texts)]
    if min(lengths) < 2:
        index = lengths.index(min(lengths))
        raise ValueError(f"texts[{index}] is {texts[index]!r}: a canary needs at least 2 tokens, a prompt and its end")
    check_fits_model(
        tokenizer, lower="its length", **{"the longest of texts": max(lengths), "special_tokens": special_tokens}
    )
    joined = "\0".join(texts)
    for index, text in enumerate(texts):
        if joined.count(text) > 1:
            raise ValueError(f"texts[{index}] occurs in another of the texts, so that a control could be inserted")


def _check_columns(dataset: "Dataset", column: str, row: Mapping[str, Any]) -> None:
    from datasets import Dataset, Value

    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"dataset is a {type(dataset).__name__}: canaries are inserted into a datasets.Dataset. Take one split of "
            "a DatasetDict, such as dataset['train'], and load without streaming"
        )
    kinds = {name: getattr(kind, "dtype", type(kind).__name__) for name, kind in dataset.features.items()}
    if not isinstance(dataset.features.get(column), Value) or kinds[column] not in ("string", "large_string"):
        found = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())
        raise ValueError(
            f"the data set has no column {column!r} of text; it has {found}. Name a column of text: of prompts and "
            "completions column='completion' with row={'prompt': ''}; of conversations make one with "
            "tokenizer.apply_chat_template(messages, tokenize=False)"
        )
    if unknown := sorted(row.keys() - kinds.keys() | row.keys() & {column}):
        possible = [name for name in kinds if name != column]
        raise ValueError(f"row gives values for {unknown}; the other columns of the data set are {possible}")
