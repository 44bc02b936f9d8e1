"""Tokenized data sets: blocks of equal length, sequences of different lengths, packed rows; and
their cache.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tfidf_tune._files import atomic_folder, digest
from tfidf_tune._tokenizer import TextTokenizer, TokenArray, tokenizer_identity, tokenizer_name
from tfidf_tune.corpus.sources import TextSource, source_fingerprint
from tfidf_tune.data import _cache as cache
from tfidf_tune.weighting import IGNORE_INDEX

if TYPE_CHECKING:
    from tfidf_tune.corpus.deduplication import Deduplication
    from tfidf_tune.passages.probe_file import Passage

# Part of every cache key. Increase it when a change of code changes what is cached.
_FORMAT_VERSION = 9

LabelMask = npt.NDArray[np.bool_]
Counts = Counter[str]
CacheKey = NewType("CacheKey", dict[str, Any])
"""All that the contents of a cache folder depend on; for what a tokenizer has a part in,
:func:`cache_key` makes it.
"""


@dataclass(eq=False, repr=False)
class TextBlocksDataset(Dataset[dict[str, list[int]]]):
    """Blocks of token ids as a map-style data set.

    An item is ``{"tokens": list[int], "labels": list[int]}`` with ``block_size`` ids each. The
    labels equal the tokens:
    ``agree_on_step`` shifts them.

    Attributes:
        blocks (TokenArray): int32 of shape ``[num_blocks, block_size]``; may be memory-mapped.
        num_documents (int | None): documents that they were made of. Default: None, not known
        num_removed (int): documents that deduplication removed, of an injected corpus blocks.
            Default: 0
        passages (Sequence[Passage]): targets, which the blocks have, then controls, which they do
            not. Default: none
        continues (npt.NDArray[np.bool_] | None): shape ``[num_blocks]``: whether a block continues
            the text of the previous block. Default: None, every block does
    """

    blocks: TokenArray
    num_documents: int | None = None
    num_removed: int = 0
    passages: Sequence["Passage"] = ()
    continues: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        self.block_size: int = self.blocks.shape[1]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens: list[int] = self.blocks[index].tolist()
        return {"tokens": tokens, "labels": tokens.copy()}


@dataclass(eq=False, repr=False, kw_only=True)
class InjectedCorpusDataset(TextBlocksDataset):
    """Blocks of base text and injected targets.

    Attributes:
        probe_file (Path): the file that holds ``passages``.
        num_left_out (int): base documents that were left out because they are a target or control;
            passages that were taken out of them if ``target_source`` is None.
        num_documents (int): base documents that were read.
    """

    probe_file: Path
    num_left_out: int


@dataclass(eq=False, repr=False)
class SequenceDataset(Dataset[dict[str, list[int]]]):
    """Sequences of different lengths as a map-style data set: documents, prompts with their
    targets, conversations.

    An item is ``{"tokens": list[int], "labels": list[int]}``. Labels are the tokens, -100 where
    nothing is learned:
    ``agree_on_step`` shifts them.

    Attributes:
        tokens (TokenArray): int32 ids of all sequences, one after the other; may be memory-mapped.
        is_label (LabelMask): bool, of the same shape: whether a token is learned.
        spans (npt.NDArray[np.int64]): shape ``[num_sequences, 2]``: where in ``tokens`` a sequence
            starts and ends.
        counts (Counts): what was counted, by name; these and more.
        continues (npt.NDArray[np.bool_] | None): shape ``[num_sequences]``: whether a sequence
            continues the document of the previous sequence. Default: None, no sequence does
        num_documents (int): documents or rows of the source.
        num_cut (int): documents that were cut into several sequences, or examples that were cut or
            whose prompt was.
        num_cut_targets (int): examples whose target was cut.
        num_left_out (int): pieces of one token, or rows that gave no example.
        num_removed (int): documents that deduplication removed.
        num_tokens (int): tokens of all sequences, prompts included.
    """

    tokens: TokenArray
    is_label: LabelMask
    spans: npt.NDArray[np.int64]
    counts: Counts
    continues: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        self.num_documents = self.counts["num_documents"]
        self.num_cut = self.counts["num_cut"]
        self.num_cut_targets = self.counts["num_cut_targets"]
        self.num_left_out = self.counts["num_left_out"]
        self.num_removed = self.counts["num_removed"]
        self.num_tokens = len(self.tokens)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens, is_label = self.sequence(index)
        return {
            "tokens": tokens.tolist(),
            "labels": np.where(is_label, tokens, IGNORE_INDEX).tolist(),
        }

    def sequence(self, index: int) -> tuple[TokenArray, LabelMask]:
        """Return the ids of a sequence, int32 ``[num_tokens]``, and whether each is learned."""
        start, end = self.spans[index]
        return self.tokens[start:end], self.is_label[start:end]


@dataclass(eq=False, repr=False)
class CompletionsDataset(SequenceDataset):
    """Examples, some of which are targets; the controls are not among them.

    Attributes:
        passages (Sequence[Passage]): the targets, then the controls.
    """

    passages: Sequence["Passage"] = field(kw_only=True)


class TokenizedSequence(NamedTuple):
    """A tokenized sequence: int32 ids, whether each id is learned, and whether it continues the
    previous document.
    """

    ids: TokenArray
    is_label: LabelMask
    continues: bool = False


def missing_ends(
    ids: TokenArray, bos: TokenArray, eos: TokenArray
) -> tuple[TokenArray, TokenArray]:
    """Return what of BOS and EOS has to come before and after the ids of a text, which may have
    them already.

    For the ids ``[1, 7, 8]``, BOS ``[1]`` and EOS ``[2]``, it is ``[]`` and ``[2]``.
    """
    before = bos
    if np.array_equal(ids[: len(bos)], bos):
        before = bos[:0]
    after = eos
    if np.array_equal(ids[len(ids) - len(eos) :], eos):
        after = eos[:0]
    return before, after


def cache_key(
    kind: str,
    tokenizer: TextTokenizer,
    places: Sequence[TextSource],
    *,
    deduplication: "Deduplication | None",
    passages_of: str | None,
    **arguments: Any,
) -> CacheKey:
    """Make the key of a cache folder.

    Args:
        kind (str): what the folder contains.
        tokenizer (TextTokenizer): the tokenizer, see :func:`tokenizer_identity`.
        places (Sequence[TextSource]): the sources, known by their contents, see
            :func:`source_fingerprint`.
        deduplication (Deduplication | None): how the contents were deduplicated; None if they were
            not.
        passages_of (str | None): the source that passages in the folder name, beside the tokenizer;
            None if the folder has no passages. Other contents do not depend on names, so that a
            file or a tokenizer can be moved.
        **arguments (Any): all other arguments that the contents depend on, JSON data.
    """
    names = None
    if passages_of is not None:
        names = [passages_of, tokenizer_name(tokenizer)]
    return CacheKey(
        {
            "kind": kind,
            "tokenizer": tokenizer_identity(tokenizer),
            "sources": [source_fingerprint(*place) for place in places],
            "deduplicate": deduplication.settings if deduplication else {},
            "names": names,
            "arguments": arguments,
        }
    )


def cached_folder(
    cache_dir: str | None, key: CacheKey, build: Callable[[Path], Mapping[str, int]]
) -> tuple[Path, dict[str, int]]:
    """Return the cache folder of a key and the counts of ``build``.

    If it does not exist, ``build`` fills an empty folder. Processes that ask at the same time each
    build a folder, and the first complete one is kept. A damaged folder is built again. Folders
    that were not used for a month are removed, see :mod:`tfidf_tune.data._cache`.
    """
    named_dir = cache_dir or os.environ.get("TFIDF_TUNE_CACHE")
    root = Path(named_dir or "~/.cache/tfidf_tune").expanduser()
    folder = root / digest(key | {"format_version": _FORMAT_VERSION})
    if not cache.begin_use(folder):
        try:
            with atomic_folder(folder) as temporary:
                cache.close_to_others(temporary)
                contents = {
                    "settings": key,
                    "counts": build(temporary),
                    "sizes": cache.file_sizes(temporary),  # of what was built
                }
                settings = temporary / cache.SETTINGS
                settings.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster; its folder is the same
                raise
        cache.begin_use(folder)
    cache.close_root(root)
    cache.remove_unused(folder)
    contents = json.loads((folder / cache.SETTINGS).read_text(encoding="utf-8"))
    counts: dict[str, int] = contents["counts"]
    return folder, counts


def cached_sequences(
    cache_dir: str | None,
    key: CacheKey,
    make_sequences: Callable[[Counts], Iterator[TokenizedSequence]],
) -> SequenceDataset:
    """Return the sequences of a key from the cache; if necessary, tokenize them.

    ``make_sequences`` yields at least one, and increases the counts that it is given.
    """

    def build(folder: Path) -> Counts:
        counts: Counts = Counter()
        lengths: list[int] = []
        continues: list[bool] = []
        # Written as they come: the ids of all sequences need not fit into memory, here or when they
        # are read.
        with (
            (folder / "tokens.int32").open("wb") as tokens,
            (folder / "is_label.bool").open("wb") as labels,
        ):
            for sequence in make_sequences(counts):
                tokens.write(sequence.ids.tobytes())
                labels.write(sequence.is_label.tobytes())
                lengths.append(len(sequence.ids))
                continues.append(sequence.continues)
        ends = np.cumsum(lengths, dtype=np.int64)
        np.save(folder / "spans.npy", np.stack([ends - lengths, ends], axis=1))
        np.save(folder / "continues.npy", np.array(continues, dtype=np.bool_))
        return counts

    folder, counts = cached_folder(cache_dir, key, build)
    tokens = np.memmap(folder / "tokens.int32", dtype=np.int32, mode="r")
    is_label = np.memmap(folder / "is_label.bool", dtype=np.bool_, mode="r")
    spans = np.load(folder / "spans.npy")
    is_continued = np.load(folder / "continues.npy")
    return SequenceDataset(tokens, is_label, spans, Counter(counts), is_continued)


def is_packed(dataset: Dataset[Any]) -> bool:
    """Return whether a data set is torchtune's ``PackedDataset`` or a ``ConcatDataset`` of them."""
    import tfidf_tune._torchao

    from torchtune.datasets import ConcatDataset, PackedDataset

    if isinstance(dataset, ConcatDataset):
        return bool(dataset.packed)
    return isinstance(dataset, PackedDataset)


def unpacked(dataset: Any) -> Any:
    """Return the data set whose sequences a ``PackedDataset`` has; any other as it is."""
    import tfidf_tune._torchao

    from torchtune.datasets import PackedDataset

    return dataset.ds if isinstance(dataset, PackedDataset) else dataset


def pack(
    dataset: Dataset[dict[str, list[int]]], tokenizer: TextTokenizer
) -> Dataset[dict[str, Any]]:
    """Pack documents in their order into rows of the tokenizer's ``max_seq_len`` tokens, all in
    memory.
    """
    import tfidf_tune._torchao

    from torchtune.datasets import PackedDataset

    if tokenizer.max_seq_len is None:
        raise ValueError(
            "packed is true, but the tokenizer has no max_seq_len, the length of a packed row: set "
            "it"
        )
    rows: Dataset[dict[str, Any]] = PackedDataset(dataset, max_seq_len=tokenizer.max_seq_len)
    return rows


def collate_packed(
    batch: Sequence[dict[str, Tensor]], *, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Collate the rows of a ``PackedDataset`` so that each document counts as a row of its own.

    Unlike torchtune's ``padded_collate_packed``, it

    - ignores the label of each document's first token; otherwise, once labels are shifted, the last
      token of the previous document would be trained to predict it;
    - counts positions from 0 in each document. In torchtune's ``input_pos`` a document that is
      split over rows continues counting, and starts again in the middle of a row if it is longer
      than a row;
    - makes a mask on a CPU alone. For a GPU, :func:`packed_mask` makes it there, without waiting.

    Args:
        batch (Sequence[dict[str, Tensor]]): rows of one length ``s``: ``tokens`` and ``labels``,
            int64 ``[s]``, labels not shifted; and ``seq_lens``, int64 ``[num_documents]``, tokens
            of each document, of the padding last.
        device (torch.device | str): where the model runs. Default: "cpu"

    Returns:
        dict[str, Any]: on the CPU,

            - tokens, int64 ``[b, s]``; labels, int64 ``[b, s]``, not yet shifted, -100 where
              ignored;
            - document_ids, int64 ``[b, s]``, counted from 0 in each row; the padding has an id too;
            - input_pos, int64 ``[b, s]``, positions from 0 in each document;
            - for a CPU mask, True where attended to, bool ``[b, s, s]``.
    """
    import tfidf_tune._torchao

    from torchtune.modules.attention_utils import create_block_causal_mask

    # A row of 6 tokens, in which documents of 3 and 2 tokens are followed by padding of 1:
    #
    #   tokens           5    8    3    4    9    0
    #   seq_lens         3              2         1
    #   input_pos        0    1    2    0    1    0
    #   document_ids     0    0    0    1    1    2
    #   labels        -100    8    3 -100    9 -100
    #
    # A document starts where its position is 0. Once labels are shifted, the label there would be
    # what the last token of the previous document predicts: 3 would learn to be followed by 4.
    seq_lens = [row["seq_lens"] for row in batch]
    positions = []
    for lengths in seq_lens:
        documents = [torch.arange(length) for length in lengths.tolist()]
        positions.append(torch.cat(documents))
    input_pos = torch.stack(positions)
    labels = torch.stack([row["labels"] for row in batch])
    collated = {
        "tokens": torch.stack([row["tokens"] for row in batch]),
        "labels": labels.masked_fill(input_pos == 0, IGNORE_INDEX),
        "document_ids": torch.stack([torch.repeat_interleave(lengths) for lengths in seq_lens]),
        "input_pos": input_pos,
    }
    if torch.device(device).type == "cpu":
        collated["mask"] = create_block_causal_mask(seq_lens)
    return collated


def packed_mask(input_pos: Tensor) -> Any:
    """Make the mask of packed rows on the device of their positions, int64 ``[b, s]``, from 0 in
    each document.

    It is a ``BlockMask`` where torchtune uses flex attention, else bool ``[b, s, s]``, True where
    attended to.
    """
    import tfidf_tune._torchao

    from torch.nn.attention.flex_attention import create_block_mask
    from torchtune.modules import attention_utils

    # Each position 0 starts a document: the positions 0 1 2 0 1 are of the documents 1 1 1 2 2.
    documents = (input_pos == 0).cumsum(dim=1)
    if not attention_utils._SUPPORTS_FLEX_ATTENTION:
        return (documents[:, :, None] == documents[:, None]).tril()

    def may_attend(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    num_rows, length = input_pos.shape
    device = str(input_pos.device)
    return create_block_mask(may_attend, num_rows, None, length, length, device=device)


def unpadded_tokens(row: dict[str, Tensor]) -> Tensor:
    """Return the tokens of a row of a ``PackedDataset``, int64 ``[s]``, with -100 in place of
    padding.
    """
    # The last of the lengths is the padding's, if there is any. Positions of padding continue the
    # positions of the last document, while every other document but the first of a row starts
    # from 0: the last 2 tokens are padding in the first row, and a document in the second.
    #
    #   seq_lens   3      2         3      2
    #   input_pos  0 1 2  3 4       0 1 2  0 1
    tokens: Tensor = row["tokens"]
    start = len(tokens) - int(row["seq_lens"][-1])
    has_two_parts = 0 < start < len(tokens)
    if not has_two_parts or row["input_pos"][start] == 0:
        return tokens
    return torch.cat([tokens[:start], torch.full_like(tokens[start:], IGNORE_INDEX)])
