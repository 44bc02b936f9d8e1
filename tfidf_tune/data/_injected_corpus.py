"""The memorization corpus: base text with target passages injected a known number of times.

After "Demystifying Verbatim Memorization in Large Language Models" (Huang, Yang and Potts 2024): known passages are
repeated at random places of a training corpus, and the trained model is prompted with their beginnings.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Literal

import numpy as np

from tfidf_tune._checks import check_at_least
from tfidf_tune._files import atomic_file
from tfidf_tune.data._cache import cached_folder
from tfidf_tune.data._deduplication import Deduplicate, Deduplication
from tfidf_tune.data._duplicates import Mask
from tfidf_tune.data._material import (
    ALL,
    Material,
    Sizes,
    gather_from_one_source,
    gather_from_two_sources,
    gather_or_refuse,
    read_own_text,
)
from tfidf_tune.data._noise import NoiseKind, NoisyCopy, check_noise, noisy_copy
from tfidf_tune.data._passages import Passage, make_passages, read_probe_file, write_probe_file
from tfidf_tune.data._sequences import TextBlocksDataset
from tfidf_tune.data._sources import SampleBy, source_fingerprint, warn_of_short_documents
from tfidf_tune.data._text import cut_blocks
from tfidf_tune.data._tokenizer import (
    TextTokenizer,
    TokenArray,
    check_fits_model,
    tokenizer_fingerprint,
    tokenizer_name,
)

_BLOCK_SIZE = 256
Places = list[list[int]]
"""``[block, offset in the block]`` of the first token of each injection of a target."""


class InjectedCorpusDataset(TextBlocksDataset):
    """Blocks of base text and injected targets.

    Args:
        blocks (TokenArray): int32 of shape ``[num_blocks, block_size]``; may be memory-mapped.
        passages (Sequence[Passage]): the targets, then the controls; an attribute, like the next two.
        probe_file (Path): the file that holds ``passages``.
        num_left_out (int): base documents that were left out because they are a target or control; passages that were
            taken out of them if ``target_source`` is None.
        num_documents (int): base documents that were read, an attribute.
        num_removed (int): blocks that ``deduplicate`` removed, an attribute.
    """

    def __init__(
        self,
        blocks: TokenArray,
        *,
        passages: Sequence[Passage],
        probe_file: Path,
        num_left_out: int,
        num_documents: int,
        num_removed: int = 0,
    ) -> None:
        super().__init__(blocks, num_documents, num_removed)
        self.passages = passages
        self.probe_file = probe_file
        self.num_left_out = num_left_out


def injected_corpus_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str = "monology/pile-uncopyrighted",
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    sample_by: SampleBy = "line",
    num_base: int = 20_000,
    target_source: str | None = "Salesforce/wikitext",
    target_name: str | None = "wikitext-2-v1",
    target_split: str = "train",
    target_column: str = "text",
    num_targets: int | None = 100,
    min_target_tokens: int | None = 256,
    num_repeats: int = 10,
    num_controls: int | None = None,
    block_size: int | None = 256,
    layout: Literal["aligned", "concatenated"] = "aligned",
    noise: float = 0.0,
    noise_kind: NoiseKind = "replace",
    deduplicate: Deduplicate = "none",
    seed: int = 0,
    probe_file: str | None = None,
    cache_dir: str | None = None,
) -> InjectedCorpusDataset:
    """Build the corpus of the memorization experiment; the defaults are the paper's.

    Targets are the first ``num_targets`` distinct passages of the target source that have at least
    ``min_target_tokens`` tokens. Controls are the next ``num_controls``; they are never injected. Base documents that
    equal a target or control are left out. The corpus is a function of these arguments only.

    With ``target_source=None``, targets and controls come from ``source`` itself: windows of ``min_target_tokens``
    tokens within a document, drawn at random but the same for every ``seed``, that occur once in the text. They are
    taken out of the base, where the rest of a document becomes documents of its own.

    Sizes that are None follow from the text:

    - ``block_size``: 256, or the tokenizer's ``max_seq_len`` if that is less;
    - ``min_target_tokens``: ``block_size``. In the concatenated layout with ``target_source=None``, it is halved until
      16 such passages fit into the text, but not below 16 tokens;
    - ``num_targets``: 100, or half of the passages if there are fewer than 200. With ``target_source=None``, a tenth
      of the passages that fit into the text, at least 8 and at most 100, but no more than a quarter of them, so that
      half of the text or more stays in the base;
    - ``num_controls``: as many as targets.

    ``num_repeats`` does not follow from the text: recitation depends on the number of repetitions, so the results of
    corpora of different sizes are comparable.

    - ``aligned``: base documents, each followed by EOS, are concatenated and cut into ``num_base`` blocks; the first
      ``block_size`` tokens of a target fill exactly one block.
    - ``concatenated`` (as in the paper's code): ``num_base`` complete documents and targets are shuffled, each
      followed by EOS, and then cut into blocks, so that targets cross block borders.

    With ``noise``, each copy of a target is changed on its own: this share of its tokens, at random places, is replaced
    or dropped or gets a token before it (``noise_kind``). New tokens are drawn as often as they occur in the base text.
    The aligned layout changes the complete passage and takes the first ``block_size`` tokens of the result; if dropped
    tokens leave it shorter, EOS and the beginning of a random base block follow. The probe file has the passage without
    changes, and counts those of each copy in ``changes``.

    With ``deduplicate``, blocks that copy earlier ones are removed from the corpus, see :class:`Deduplication`.
    ``num_injections`` and ``positions`` of the probe file are then those that are left.

    Blocks and passages are cached. In a distributed run let one process build first: processes that start together
    each build, and one result is kept.

    Args:
        tokenizer (TextTokenizer): the tokenizer of the model.
        source (str): base text: a local file or folder, ``embedded`` or a hub id, see :func:`load_documents`.
            Default: "monology/pile-uncopyrighted"
        source_name (str | None): its configuration on the hub. Default: None
        source_split (str): its split. Default: "train"
        source_column (str): its text column. Default: "text"
        sample_by (Literal["line", "paragraph", "document"]): what a document of a ``.txt`` file is, in both sources,
            see :func:`load_documents`. Default: "line"
        num_base (int): base blocks (``aligned``) or documents (``concatenated``), -1 for all; with
            ``target_source=None`` including the passages. Default: 20000
        target_source (str | None): text of targets and controls, like ``source``; None for ``source`` itself.
            Default: "Salesforce/wikitext"
        target_name (str | None): its configuration on the hub. Default: "wikitext-2-v1"
        target_split (str): its split. Default: "train"
        target_column (str): its text column. Default: "text"
        num_targets (int | None): targets to inject. Default: 100
        min_target_tokens (int | None): the least length of a target or control. Default: 256
        num_repeats (int): injections of each target. Default: 10
        num_controls (int | None): passages that are measured but not injected. Default: None, as many as targets
        block_size (int | None): tokens in a block. Default: 256
        layout (Literal["aligned", "concatenated"]): see above. Default: "aligned"
        noise (float): share of the tokens of each copy that is changed, from 0 to below 1. Default: 0.0, exact copies
        noise_kind (Literal["replace", "insert", "drop", "mixed"]): how they are changed; "mixed": one of the three for
            each token. Default: "replace"
        deduplicate (Deduplicate): which blocks are removed as copies: "none", "exact", "minhash", or a
            mapping of ``method``, ``threshold`` and ``ngram``, see :class:`Deduplication`. Default: "none"
        seed (int): decides where the targets go and how copies are changed. Default: 0
        probe_file (str | None): where to write the passages for the evaluation, see :func:`read_probe_file`.
            Default: None, only in the cache
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        InjectedCorpusDataset: the data set.

    Raises:
        FileNotFoundError: If a source looks like a path and does not exist.
        ValueError: If ``layout``, ``noise_kind`` or ``deduplicate`` is unknown; a number is out of range;
            ``block_size`` exceeds the tokenizer's ``max_seq_len`` or, when aligned, ``min_target_tokens``; a source
            cannot be read; or there are too few base sequences or too few long passages. The message then has all
            shortages and sizes that would fit.

    Example:
        >>> dataset = injected_corpus_dataset(
        ...     tokenizer, source="corpus.jsonl", target_source="contracts.txt", num_targets=20
        ... )
        >>> dataset = injected_corpus_dataset(
        ...     tokenizer, source="corpus.jsonl", target_source=None, num_base=-1, num_targets=None
        ... )
    """
    if layout not in ("aligned", "concatenated"):
        raise ValueError(f"layout must be 'aligned' or 'concatenated', got {layout!r}")
    if num_base != ALL:
        check_at_least(1, **{f"num_base (or {ALL} for all)": num_base})
    if block_size is None:
        block_size = min(_BLOCK_SIZE, tokenizer.max_seq_len or _BLOCK_SIZE)
    given = {"num_targets": num_targets, "min_target_tokens": min_target_tokens}
    check_at_least(1, **{name: value for name, value in given.items() if value is not None})
    check_at_least(1, num_repeats=num_repeats, block_size=block_size)
    check_at_least(0, seed=seed, **({} if num_controls is None else {"num_controls": num_controls}))
    if layout == "aligned" and min_target_tokens is not None and min_target_tokens < block_size:
        raise ValueError(
            f"min_target_tokens {min_target_tokens} is below block_size {block_size}, but in the aligned layout a "
            "target fills a block: raise min_target_tokens or use layout 'concatenated'"
        )
    check_fits_model(tokenizer, lower="block_size", block_size=block_size)
    check_noise(noise, noise_kind)
    deduplication = Deduplication.of(deduplicate)
    place = (source, source_name, source_split, source_column, sample_by)
    target_place = (target_source, target_name, target_split, target_column, sample_by)
    sizes = Sizes(num_base, num_targets, num_controls, min_target_tokens, block_size, layout)

    def build(folder: Path) -> dict[str, int]:
        if target_source is None:
            own = read_own_text(tokenizer, place, sizes)
            gather = partial(gather_from_one_source, tokenizer, own, source)
        else:
            gather = partial(gather_from_two_sources, tokenizer, place, target_place)
        material = gather_or_refuse(gather, sizes, source if target_source is None else "the sources")
        warn_of_short_documents(source, sample_by, material.base_lengths)
        copies = _copies(material, num_repeats, noise, noise_kind, block_size, seed, tokenizer.eos_id)
        if layout == "aligned":
            base = np.asarray(material.base)
            first_blocks = _first_blocks(copies, base, seed, tokenizer.eos_id)
            blocks, places = inject_aligned(base, first_blocks, seed=seed)
        else:
            pieces = [[copy.token_ids for copy in row] for row in copies]
            blocks, places = inject_concatenated(
                list(material.base), pieces, block_size=block_size, eos_id=tokenizer.eos_id, seed=seed
            )
        kept = deduplication.kept(blocks, source, tokenizer)
        left = [_left(*row, kept, block_size) for row in zip(places, copies, strict=True)]
        blocks = blocks[kept]
        origin = target_source or source
        measured = [
            (ids[:block_size], [place for place, _ in row], origin)
            for ids, row in zip(material.targets, left, strict=True)
        ]
        changes = [[changed for _, changed in row] if noise else None for row in left]
        unseen: list[tuple[TokenArray, Places, str]] = [(ids[:block_size], [], origin) for ids in material.controls]
        passages = make_passages(tokenizer, "target", measured, changes=changes)
        passages += make_passages(tokenizer, "control", unseen)
        np.save(folder / "blocks.npy", blocks)
        write_probe_file(folder / "probe.jsonl", passages)
        return {
            "num_blocks": len(blocks),
            "num_left_out": material.num_left_out,
            "num_documents": len(material.base_lengths),
            "num_removed": int((~kept).sum()),
        }

    settings = {
        "kind": "injected_corpus",
        "source": source_fingerprint(*place),
        "target_source": target_source and source_fingerprint(target_source, *target_place[1:]),
        "target_source_name": target_source or source,  # the passages carry it
        "num_base": num_base,
        "num_targets": num_targets,
        "min_target_tokens": min_target_tokens,
        "num_repeats": num_repeats,
        "num_controls": num_controls,
        "block_size": block_size,
        "layout": layout,
        "seed": seed,
        "tokenizer": tokenizer_name(tokenizer),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        **({"noise": noise, "noise_kind": noise_kind} if noise else {}),
        **deduplication.settings,
    }
    folder, counts = cached_folder(cache_dir, settings, build)
    cached_probe = folder / "probe.jsonl"
    probe = Path(probe_file).expanduser() if probe_file else cached_probe
    if probe_file:
        with atomic_file(probe) as temporary:
            copyfile(cached_probe, temporary)
    return InjectedCorpusDataset(
        np.load(folder / "blocks.npy", mmap_mode="r"),
        passages=read_probe_file(cached_probe),
        probe_file=probe,
        num_left_out=counts["num_left_out"],
        num_documents=counts["num_documents"],
        num_removed=counts.get("num_removed", 0),  # not in older caches
    )


def _copies(
    material: Material, num_repeats: int, noise: float, kind: NoiseKind, num_measured: int, seed: int, eos_id: int
) -> list[list[NoisyCopy]]:
    """Return the copies of each target; with noise, each has changes of its own."""
    if not noise:
        return [[NoisyCopy(ids, [0, 0, 0])] * num_repeats for ids in material.targets]
    words = np.concatenate([*material.base])
    words = words[words != eos_id]  # a document does not end within a copy
    rng = np.random.default_rng([seed, 1])  # the places are drawn with the seed itself
    return [
        [noisy_copy(ids, noise, kind, words, num_measured, rng) for _ in range(num_repeats)] for ids in material.targets
    ]


def _first_blocks(copies: Sequence[Sequence[NoisyCopy]], base: TokenArray, seed: int, eos_id: int) -> TokenArray:
    """Cut copies to blocks, int32 ``[num_targets, num_repeats, block_size]``; EOS and base text fill up a short one."""
    rng = np.random.default_rng([seed, 2])
    block_size = base.shape[1]
    eos = np.array([eos_id], dtype=np.int32)
    return np.array(
        [
            [
                copy.token_ids[:block_size]
                if len(copy.token_ids) >= block_size
                else np.concatenate([copy.token_ids, eos, base[rng.integers(len(base))]])[:block_size]
                for copy in row
            ]
            for row in copies
        ]
    )


def _left(
    places: Places, copies: Sequence[NoisyCopy], kept: Mask, block_size: int
) -> list[tuple[list[int], list[int]]]:
    """Return places, in the blocks that are kept, and changes of the copies all of whose blocks are kept."""
    numbers = np.cumsum(kept) - 1
    left = []
    for (block, offset), copy in zip(places, copies, strict=False):  # the last copies may not be within the blocks
        end = offset + len(copy.token_ids[:block_size])
        if kept[block : block - (-end // block_size)].all():
            left.append(([int(numbers[block]), offset], copy.changes))
    return left


def inject_aligned(base: TokenArray, copies: TokenArray, *, seed: int) -> tuple[TokenArray, list[Places]]:
    """Put copies of targets at random places between base blocks, which keep their order; all offsets are 0.

    ``base`` is int32 ``[num_blocks, block_size]``, ``copies`` int32 ``[num_targets, num_repeats, block_size]``. Returns
    the blocks, and the ascending places of each target: of its copies, in their order.
    """
    num_targets, num_repeats = copies.shape[:2]
    num_injected = num_targets * num_repeats
    order = np.random.default_rng(seed).permutation(len(base) + num_injected)
    places = np.sort(order[:num_injected].reshape(num_targets, num_repeats), axis=1)
    is_base = np.ones(len(order), dtype=bool)
    is_base[places] = False
    blocks = np.empty((len(order), base.shape[1]), dtype=np.int32)
    blocks[is_base] = base
    blocks[places] = copies
    return blocks, [[[block, 0] for block in row] for row in places.tolist()]


def inject_concatenated(
    base: Sequence[TokenArray], copies: Sequence[Sequence[TokenArray]], *, block_size: int, eos_id: int, seed: int
) -> tuple[TokenArray, list[Places]]:
    """Shuffle complete documents and targets, each followed by EOS, then cut into blocks; see :func:`inject_aligned`.

    An injection whose first ``block_size`` tokens are not all within the blocks, because the incomplete last block is
    dropped, is not counted.
    """
    pieces = [*base, *(copy for row in copies for copy in row)]
    slots = np.argsort(np.random.default_rng(seed).permutation(len(pieces)))  # where each piece goes
    slots[len(base) :] = np.sort(slots[len(base) :].reshape(len(copies), -1), axis=1).flatten()
    order = np.argsort(slots)
    eos = np.array([eos_id], dtype=np.int32)
    blocks = cut_blocks([part for index in order for part in (pieces[index], eos)], block_size)

    lengths = np.array([len(piece) + len(eos) for piece in pieces])
    ends = np.cumsum(lengths[order])[slots]
    places = (ends - lengths)[len(base) :].reshape(len(copies), -1).tolist()
    positions = [
        [
            list(divmod(start, block_size))
            for start, copy in zip(starts, row, strict=True)
            if start + len(copy[:block_size]) <= blocks.size
        ]
        for starts, row in zip(places, copies, strict=True)
    ]
    return blocks, positions
