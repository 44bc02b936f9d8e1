"""The memorization corpus: base text with target passages injected a known number of times."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import copyfile
from typing import Literal

import numpy as np
from torch.utils.data import Dataset

from tfidf_tune._files import atomic_file
from tfidf_tune.data._cache import cached_counts, cached_folder
from tfidf_tune.data._corpus_build import CorpusSpec, build_corpus
from tfidf_tune.data._encoding import TextTokenizer, TokenArray, tokenizer_fingerprint, tokenizer_name
from tfidf_tune.data._passages import Passage, read_probe_file
from tfidf_tune.data._sources import source_fingerprint
from tfidf_tune.data._text_blocks import FORMAT_VERSION, block_sample, check_block_size


class InjectedCorpusDataset(Dataset[dict[str, list[int]]]):
    """Blocks of base text and injected targets as a map-style data set.

    An item is ``{"tokens": list[int], "labels": list[int]}``, each of ``block_size`` ids and the labels
    equal to the tokens: the recipe shifts them.

    Args:
        blocks (TokenArray): int32 of shape ``[num_blocks, block_size]``; may be memory-mapped.
        passages (Sequence[Passage]): the targets, then the controls.
        probe_file (Path): the file that holds ``passages``.
        num_left_out (int): base documents that were left out for being a target or control.

    Attributes:
        blocks (TokenArray): as given.
        block_size (int): tokens in a block.
        passages (Sequence[Passage]): as given.
        probe_file (Path): as given.
        num_left_out (int): as given.
    """

    def __init__(self, blocks: TokenArray, *, passages: Sequence[Passage], probe_file: Path, num_left_out: int) -> None:
        self.blocks = blocks
        self.block_size: int = blocks.shape[1]
        self.passages = passages
        self.probe_file = probe_file
        self.num_left_out = num_left_out

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return block_sample(self.blocks[index])


def injected_corpus_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str = "monology/pile-uncopyrighted",
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    num_base: int = 20_000,
    target_source: str = "Salesforce/wikitext",
    target_name: str | None = "wikitext-2-v1",
    target_split: str = "train",
    target_column: str = "text",
    num_targets: int = 100,
    min_target_tokens: int = 256,
    num_repeats: int = 10,
    num_controls: int | None = None,
    block_size: int = 256,
    layout: Literal["aligned", "concatenated"] = "aligned",
    seed: int = 0,
    probe_file: str | None = None,
    cache_dir: str | None = None,
) -> InjectedCorpusDataset:
    """Build the corpus of the memorization experiment; the defaults are the paper's.

    Targets are the first ``num_targets`` distinct passages of the target source that have at least
    ``min_target_tokens`` tokens, controls the next ``num_controls``, which are never injected. Base
    documents that equal one of them are left out. The corpus is a function of these arguments alone.

    - ``aligned``: base documents, each followed by EOS, are concatenated and cut into ``num_base``
      blocks; the first ``block_size`` tokens of a target fill exactly one block.
    - ``concatenated`` (the way of the paper's code): ``num_base`` whole documents and the whole targets
      are mixed, each followed by EOS, and then cut, so that targets straddle block borders.

    Blocks and passages are cached, so a second run starts at once. In a distributed run let one process
    build first: processes that start together each build, and one result is kept.

    Args:
        tokenizer (TextTokenizer): the tokenizer of the model.
        source (str): base text: a local file or folder, ``embedded`` or a hub id, see
            :func:`load_documents`. Default: "monology/pile-uncopyrighted"
        source_name (str | None): its configuration on the hub. Default: None
        source_split (str): its split. Default: "train"
        source_column (str): its text column. Default: "text"
        num_base (int): base blocks (``aligned``) or documents (``concatenated``), -1 for all there are.
            Default: 20000
        target_source (str): text of targets and controls, named like ``source``. Default:
            "Salesforce/wikitext"
        target_name (str | None): its configuration on the hub. Default: "wikitext-2-v1"
        target_split (str): its split. Default: "train"
        target_column (str): its text column. Default: "text"
        num_targets (int): targets to inject. Default: 100
        min_target_tokens (int): the least length of a target or control. Default: 256
        num_repeats (int): injections of each target. Default: 10
        num_controls (int | None): passages that are measured but not injected. Default: None, as many
            as targets
        block_size (int): tokens in a block. Default: 256
        layout (Literal["aligned", "concatenated"]): see above. Default: "aligned"
        seed (int): decides where the targets go. Default: 0
        probe_file (str | None): where to write the passages for the evaluation, see
            :func:`read_probe_file`. Default: None, only in the cache
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        InjectedCorpusDataset: the data set.

    Raises:
        FileNotFoundError: If a source looks like a path and nothing is there.
        ValueError: If ``layout`` is unknown; a size is out of range; ``block_size`` exceeds the tokenizer's
            ``max_seq_len`` or, when aligned, ``min_target_tokens``; a source cannot be read; or it has too
            few base sequences or too few long passages.

    Example:
        >>> dataset = injected_corpus_dataset(
        ...     tokenizer, source="corpus.jsonl", target_source="contracts.txt", num_targets=20
        ... )
    """
    spec = CorpusSpec(
        source=source,
        source_name=source_name,
        source_split=source_split,
        source_column=source_column,
        num_base=num_base,
        target_source=target_source,
        target_name=target_name,
        target_split=target_split,
        target_column=target_column,
        num_targets=num_targets,
        min_target_tokens=min_target_tokens,
        num_repeats=num_repeats,
        num_controls=num_targets if num_controls is None else num_controls,
        block_size=block_size,
        layout=layout,
        seed=seed,
    )
    check_block_size(tokenizer, block_size)
    settings = {
        "kind": "injected_corpus",
        "format_version": FORMAT_VERSION,
        **asdict(spec),
        "tokenizer": tokenizer_name(tokenizer),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "source_fingerprint": source_fingerprint(source, source_name, source_split, source_column),
        "target_fingerprint": source_fingerprint(target_source, target_name, target_split, target_column),
    }
    folder = cached_folder(cache_dir, settings, lambda folder: build_corpus(folder, tokenizer, spec))
    cached_probe = folder / "probe.jsonl"
    probe = Path(probe_file).expanduser() if probe_file else cached_probe
    if probe_file:
        with atomic_file(probe) as temporary:
            copyfile(cached_probe, temporary)
    return InjectedCorpusDataset(
        np.load(folder / "blocks.npy", mmap_mode="r"),
        passages=read_probe_file(cached_probe),
        probe_file=probe,
        num_left_out=cached_counts(folder)["num_left_out"],
    )
