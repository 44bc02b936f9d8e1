"""The injected corpus: blocks of base text with repeated passages, whose memorization is measured.

After "Demystifying Verbatim Memorization in Large Language Models" (Huang, Yang and Potts 2024).
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice, tee
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from tfidf_tune._checks import check_at_least, require_choice, require_number
from tfidf_tune._tokenizer import TextTokenizer, TokenArray, check_fits_model, encode_texts
from tfidf_tune.corpus import sources
from tfidf_tune.corpus.deduplication import Deduplicate, Deduplication
from tfidf_tune.corpus.sources import SampleBy, TextSource, load_documents
from tfidf_tune.data import sequences
from tfidf_tune.data.sequences import InjectedCorpusDataset
from tfidf_tune.data.text import (
    BLOCK_SIZE,
    blocks_and_lengths,
    cut_blocks,
    split_at_eos,
)
from tfidf_tune.passages.copies import NOISE_KINDS, NoiseKind, NoisyCopy, draw_slots, noisy_copy
from tfidf_tune.passages.probe_file import (
    FEWEST_PASSAGES,
    MOST_PASSAGES,
    SHORTEST_PASSAGE,
    PassageDraft,
    make_passages,
    read_probe_file,
    write_probe_file,
)
from tfidf_tune.passages.stretches import (
    SEPARATOR,
    Mask,
    Positions,
    WindowChooser,
    join_documents,
    label_runs,
)

Layout = Literal["aligned", "concatenated"]
_Window = TypeVar("_Window")
_Base: TypeAlias = TokenArray | list[TokenArray]  # aligned blocks or documents
_ALL = -1
_ENOUGH_WINDOWS = 16  # from which targets and controls are chosen; with fewer, passages get shorter


class _Material(NamedTuple):
    """What a corpus is made of."""

    passages: list[TokenArray]  # targets, then controls
    num_targets: int
    base: _Base
    document_lengths: list[int]  # tokens of the documents that were read for the base
    num_left_out: int  # of these documents; or passages that were taken out of them


@dataclass(frozen=True)
class _CorpusSpec:
    """Arguments of :func:`injected_corpus_dataset`; None stands for a number that follows from the
    text.
    """

    num_base: int
    num_targets: int | None
    num_controls: int | None
    min_target_tokens: int | None
    num_repeats: int
    block_size: int
    layout: Layout
    noise: float
    noise_kind: NoiseKind
    seed: int

    def __post_init__(self) -> None:
        require_choice("layout", self.layout, ("aligned", "concatenated"))
        require_choice("noise_kind", self.noise_kind, (*NOISE_KINDS, "mixed"))
        require_number(
            "noise",
            self.noise,
            0,
            0.99,
            "the share of a copy's tokens that is changed",
            reason="not all",
        )
        lowest = {
            "num_targets": 1,
            "min_target_tokens": 1,
            "num_repeats": 1,
            "block_size": 1,
            "num_controls": 0,
            "seed": 0,
        }
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None:
                check_at_least(least, **{name: value})
        if self.num_base != _ALL:
            check_at_least(1, **{f"num_base (or {_ALL} for all)": self.num_base})
        if self.layout == "aligned" and self.least_tokens < self.block_size:
            raise ValueError(
                f"min_target_tokens {self.min_target_tokens} is below block_size "
                f"{self.block_size}: raise min_target_tokens or use layout 'concatenated'"
            )

    @property
    def least_tokens(self) -> int:
        return self.min_target_tokens or self.block_size

    def choose(
        self, passages: Iterator[_Window], by_rule: int, what: str
    ) -> tuple[list[_Window], int]:
        """Take targets, then controls: if no number is given, as many as a rule says, but no more
        than there are.
        """
        num_targets = by_rule if self.num_targets is None else self.num_targets
        num_controls = num_targets if self.num_controls is None else self.num_controls
        chosen = list(islice(passages, num_targets + num_controls))
        has_numbers = self.num_targets is not None or self.num_controls is not None
        if not has_numbers and len(chosen) > 1:
            # Of 20 targets and 20 controls by rule, where there are 31 passages, 15 of each.
            num_targets = min(by_rule, len(chosen) // 2)
            num_controls = num_targets
        needed = num_targets + num_controls
        _require_enough(len(chosen), needed, f"{what} as targets and controls")
        return chosen[:needed], num_targets

    @property
    def num_documents(self) -> int | None:
        """How many base documents are read; None for any number."""
        is_limited = self.layout == "concatenated" and self.num_base != _ALL
        return self.num_base if is_limited else None

    def cut(
        self, documents: Iterable[TokenArray], num_base: int, where: str, eos_id: int
    ) -> tuple[_Base, list[int]]:
        """Return base documents or ``num_base`` blocks, at least one, and the tokens of each
        document that was read.
        """
        base: _Base
        if self.layout == "concatenated":
            base = list(documents)
            lengths = [len(ids) for ids in base]
            unit = "documents"
        else:
            most = None if num_base == _ALL else num_base
            base, lengths = blocks_and_lengths(documents, self.block_size, most, eos_id)
            unit = f"blocks of {self.block_size} tokens"
        _require_enough(len(base), max(1, num_base), f"base {unit} {where}")
        return base, lengths


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
    layout: Layout = "aligned",
    noise: float = 0.0,
    noise_kind: NoiseKind = "replace",
    deduplicate: Deduplicate = "none",
    seed: int = 0,
    probe_file: str | None = None,
    cache_dir: str | None = None,
) -> InjectedCorpusDataset:
    """Build the corpus of the memorization experiment; the defaults are the paper's.

    Targets are the first ``num_targets`` distinct passages of the target source that have at least
    ``min_target_tokens`` tokens. Controls are the next ``num_controls``; they are never injected.
    Base documents that equal a target or control are left out. With ``target_source=None``, targets
    and controls are windows of ``source`` itself that occur once in it, the same for every
    ``seed``; they are taken out of the base.

    In the layout "aligned", base documents, each followed by EOS, are cut into ``num_base`` blocks,
    and the first ``block_size`` tokens of a target fill exactly one block. In "concatenated", as in
    the paper's code, ``num_base`` complete documents and targets are shuffled, each followed by
    EOS, and then cut into blocks.

    The page "The injected corpus and the probe" has the rules of sizes that are None, and of
    ``noise``. The corpus is a function of these arguments only, and cached. In a distributed run
    let one process build first: processes that start together each build, and one result is kept.

    Args:
        tokenizer (TextTokenizer): the tokenizer of the model.
        source (str): base text, see :func:`load_documents`. Default: "monology/pile-uncopyrighted"
        source_name (str | None): its configuration on the hub. Default: None
        source_split (str): its split. Default: "train"
        source_column (str): its text column. Default: "text"
        sample_by (Literal["line", "paragraph", "document"]): a document of ``.txt`` files of both.
            Default: "line"
        num_base (int): base blocks, concatenated documents; -1 for all. Default: 20000
        target_source (str | None): text of targets and controls; None for ``source``. Default:
            "Salesforce/wikitext"
        target_name (str | None): its configuration on the hub. Default: "wikitext-2-v1"
        target_split (str): its split. Default: "train"
        target_column (str): its text column. Default: "text"
        num_targets (int | None): targets to inject; None for what the text allows, at most 100.
            Default: 100
        min_target_tokens (int | None): the least length of a target or control; None for
            ``block_size``, or less with ``target_source=None`` in short concatenated documents.
            Default: 256
        num_repeats (int): injections of each target. Default: 10
        num_controls (int | None): passages that are measured but not injected. Default: None, as
            many as targets
        block_size (int | None): tokens in a block; None for 256, or the tokenizer's ``max_seq_len``
            if that is less. Default: 256
        layout (Literal["aligned", "concatenated"]): see above. Default: "aligned"
        noise (float): share of the tokens of each copy that is changed, from 0 to 0.99. Default:
            0.0, exact copies
        noise_kind (Literal["replace", "insert", "drop", "mixed"]): how they are changed. Default:
            "replace"
        deduplicate (Deduplicate): which blocks are removed as copies, see :class:`Deduplication`;
            the probe file has the places that are left. Default: "none"
        seed (int): decides where the targets go and how copies are changed. Default: 0
        probe_file (str | None): where to write the passages, see :func:`read_probe_file`. Default:
            None, in the cache
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        InjectedCorpusDataset: the data set.

    Raises:
        FileNotFoundError: If a source looks like a path and does not exist.
        ValueError: If a value is unknown or out of range; ``block_size`` exceeds the tokenizer's
            ``max_seq_len`` or, when aligned, ``min_target_tokens``; or a source cannot be read or
            has too little text.

    Example:
        >>> dataset = injected_corpus_dataset(
        ...     tokenizer, source="corpus.jsonl", target_source="contracts.txt"
        ... )
        >>> dataset = injected_corpus_dataset(
        ...     tokenizer, source="corpus.jsonl", target_source=None, num_targets=None
        ... )
    """
    if block_size is None:
        block_size = min(BLOCK_SIZE, tokenizer.max_seq_len or BLOCK_SIZE)
    # Every argument is checked before a source is read.
    spec = _CorpusSpec(
        num_base,
        num_targets,
        num_controls,
        min_target_tokens,
        num_repeats,
        block_size,
        layout,
        noise,
        noise_kind,
        seed,
    )
    check_fits_model(tokenizer, lower="block_size", block_size=block_size)
    deduplication = Deduplication.of(deduplicate)
    base = TextSource(source, source_name, source_split, source_column, sample_by)
    text_sources = [base]
    target = None
    if target_source:
        target = TextSource(target_source, target_name, target_split, target_column, sample_by)
        text_sources.append(target)
    origin = target_source or source  # the passages carry it

    def build(folder: Path) -> dict[str, int]:
        if target is None:
            material = _gather_own(tokenizer, base, spec)
        else:
            material = _gather(tokenizer, base, target, spec)
        num_targets = material.num_targets
        sources.warn_of_short_documents(source, sample_by, material.document_lengths)

        # All copies are made and placed, and deduplication removes blocks.
        blocks, continues, copies, starts = _inject(
            material.passages[:num_targets], material.base, spec, tokenizer.eos_id
        )
        kept = deduplication.kept(blocks, source, tokenizer)

        # The places of the copies that are left, and how each was changed, are recorded.
        drafts = []
        for number, ids in enumerate(material.passages):
            fields: dict[str, list[object]] = {}
            if noise and number < num_targets:
                fields["changes"] = []
            drafts.append(PassageDraft(ids[:block_size], [], origin, fields))
        lengths = np.array([len(copy.token_ids[:block_size]) for copy in copies])
        is_whole, places = places_in_blocks(starts, lengths, kept, block_size)
        for number, (copy, place) in enumerate(zip(copies, places.tolist(), strict=True)):
            if is_whole[number]:
                draft = drafts[number // num_repeats]
                draft.positions.append(place)
                if noise:
                    draft.fields["changes"].append(copy.changes)

        np.save(folder / "blocks.npy", blocks[kept])
        np.save(folder / "continues.npy", still_continues(continues, kept))
        write_probe_file(folder / "probe.jsonl", make_passages(tokenizer, drafts, num_targets))
        return {
            "num_left_out": material.num_left_out,
            "num_documents": len(material.document_lengths),
            "num_removed": int((~kept).sum()),
        }

    arguments = asdict(spec)
    if not noise:
        del arguments["noise_kind"]  # which changes nothing
    key = sequences.cache_key(
        "injected_corpus",
        tokenizer,
        text_sources,
        deduplication=deduplication,
        passages_of=origin,
        **arguments,
    )
    folder, counts = sequences.cached_folder(cache_dir, key, build)
    probe = folder / "probe.jsonl"
    passages = read_probe_file(probe)
    if probe_file:
        probe = Path(probe_file).expanduser()
        write_probe_file(probe, passages)
    blocks = np.load(folder / "blocks.npy", mmap_mode="r")
    continues = np.load(folder / "continues.npy")
    return InjectedCorpusDataset(
        blocks, passages=passages, continues=continues, probe_file=probe, **counts
    )


def places_in_blocks(
    starts: Positions, lengths: Positions | int, kept: Mask, block_size: int
) -> tuple[Mask, Positions]:
    """Find runs of the text that was cut into blocks, of which only those of ``kept``, bool
    ``[num_blocks]``, stay.

    Returns which runs are complete, in kept blocks alone, and ``[block, offset]`` among these,
    int64 ``[num_runs, 2]``.
    """
    # Runs of 6 tokens in four blocks of 4, the second of which is removed:
    #
    #   kept                 1  0  1  1
    #   kept before each     0  1  1  2  3     (also before the end)
    #   run from 1           in blocks 0 and 1: 1 - 0 = 1 of 2 is kept, the run is lost
    #   run from 9           in blocks 2 and 3: 3 - 1 = 2 of 2 are kept, it starts at [1, 1]
    first = starts // block_size
    end = -(-(starts + lengths) // block_size)
    num_kept_before = np.cumsum(np.append(0, kept))
    # What is after the last block is lost.
    num_before_first = num_kept_before[np.minimum(first, len(kept))]
    num_before_end = num_kept_before[np.minimum(end, len(kept))]
    is_complete = num_before_end - num_before_first == end - first
    return is_complete, np.stack([num_before_first, starts % block_size], axis=1)


def still_continues(continues: Mask, kept: Mask) -> Mask:
    """Return which of the rows that are kept continue the text of the previous kept row, bool
    ``[num_kept]``.

    If row c is removed from the rows a, b, c and d of one document, b continues a, but d does not
    continue b::

        row            a  b  c  d
        continues      0  1  1  1
        kept           1  1  0  1
        is_after_kept  0  1  1  0
        returned       0  1     0
    """
    is_after_kept = np.append(False, kept[:-1])
    return np.asarray((continues & is_after_kept)[kept])


def _gather(
    tokenizer: TextTokenizer, source: TextSource, target: TextSource, spec: _CorpusSpec
) -> _Material:
    """Take the first long passages of one source as targets and controls, and base text from
    another.
    """

    def long_passages() -> Iterator[tuple[str, TokenArray]]:
        # Passages that agree in the tokens that are measured count once: a control must not be a
        # copy of a target, nor a target be injected twice as often as the others.
        measured: set[bytes] = set()
        texts, to_encode = tee(load_documents(*target))
        for text, ids in zip(texts, encode_texts(tokenizer, to_encode), strict=True):
            start = ids[: spec.block_size].tobytes()
            if len(ids) >= spec.least_tokens and start not in measured:
                measured.add(start)
                yield text, ids

    what = f"distinct passages of at least {spec.least_tokens} tokens in {target.source!r}"
    chosen, num_targets = spec.choose(long_passages(), MOST_PASSAGES, what)
    known = {text for text, _ in chosen}
    left_out: list[str] = []

    def base_documents() -> Iterator[str]:
        # Both sources can hold the same documents, and a control must not be trained on.
        for text in load_documents(*source):
            if text in known:
                left_out.append(text)
            else:
                yield text

    encoded = encode_texts(tokenizer, islice(base_documents(), spec.num_documents))
    base, lengths = spec.cut(encoded, spec.num_base, f"in {source.source!r}", tokenizer.eos_id)
    passages = [ids for _, ids in chosen]
    return _Material(passages, num_targets, base, lengths, len(left_out))


def _gather_own(tokenizer: TextTokenizer, source: TextSource, spec: _CorpusSpec) -> _Material:
    """Draw windows that occur once in the text as targets and controls; what is left of its
    documents is the base.
    """
    # The documents that the base is made of, the last one cut where the blocks end.
    is_concatenated = spec.layout == "concatenated"
    documents: list[TokenArray] = []
    num_left = spec.num_base * spec.block_size
    if is_concatenated or spec.num_base == _ALL:
        num_left = 2**62
    for ids in encode_texts(tokenizer, islice(load_documents(*source), spec.num_documents)):
        documents.append(ids[: num_left - 1])  # EOS follows
        num_left -= len(documents[-1]) + 1
        if num_left < 2:
            break
    _, lengths = spec.cut(documents, spec.num_base, f"in {source.source!r}", tokenizer.eos_id)
    # Passages get shorter while too few fit into short documents; by rule, a tenth of the windows
    # are targets.
    least = spec.least_tokens
    num_windows = sum(length // least for length in lengths)
    if spec.min_target_tokens is None and is_concatenated:
        while num_windows < _ENOUGH_WINDOWS and least // 2 >= SHORTEST_PASSAGE:
            least //= 2
            num_windows = sum(length // least for length in lengths)
    # Of 400 windows 40 are targets, of 60 10, of 20 5: at most a quarter, as there are as many
    # controls.
    tenth = max(FEWEST_PASSAGES, num_windows // 10)
    by_rule = max(1, min(MOST_PASSAGES, tenth, num_windows // 4))
    # In the blocks, EOS separates documents: so does EOS in the text itself.
    corpus = join_documents(split_at_eos(documents, tokenizer.eos_id))
    # The same passages for every seed.
    chooser = WindowChooser(tokenizer, corpus, least, np.random.default_rng(0))
    what = f"passages of {least} tokens that occur once in {source.source!r}"
    starts, num_targets = spec.choose(chooser.unique(least), by_rule, what)
    # What is left between the passages of a document are documents of the base.
    is_base = corpus != SEPARATOR
    for start in starts:
        is_base[start : start + least] = False
    rest = (corpus[first:end] for first, end in label_runs(is_base))
    base, _ = spec.cut(rest, _ALL, f"without {len(starts)} targets and controls", tokenizer.eos_id)
    passages = [chooser.window(start) for start in starts]
    return _Material(passages, num_targets, base, lengths, len(starts))


def _require_enough(number: int, needed: int, what: str) -> None:
    if number < needed:
        raise ValueError(
            f"there is too little text: found {number} {what}, needed {needed}. Lower num_base "
            "(-1: all), num_targets, num_controls, min_target_tokens or block_size; or name more "
            "or longer documents (sample_by joins lines)"
        )


def _inject(
    targets: list[TokenArray], base: _Base, spec: _CorpusSpec, eos_id: int
) -> tuple[TokenArray, Mask, list[NoisyCopy], Positions]:
    """Put copies of targets at random places between base blocks, or between documents that are
    then cut into blocks.

    Returns the blocks, whether each block continues the text of the previous block, the copies of
    each target, and where in all tokens the copies start, ascending for each target.
    """
    is_concatenated = spec.layout == "concatenated"
    eos = np.array([eos_id], dtype=np.int32)
    copies = _make_copies(targets, base, spec, eos)

    # A piece is a block, or a document with its EOS; each has a slot in the order of the corpus.
    pieces = [*base, *(copy.token_ids for copy in copies)]
    if is_concatenated:
        for index, piece in enumerate(pieces):
            _, missing_eos = sequences.missing_ends(piece, eos[:0], eos)
            pieces[index] = np.append(piece, missing_eos)
    slots = draw_slots(
        len(base), len(targets), spec.num_repeats, spec.seed, shuffle_base=is_concatenated
    )
    order = np.argsort(slots)

    # A copy starts where the piece in its slot ends, less its length. Base documents of 4 and 3
    # tokens and a copy of 5, in the slots 0, 2 and 1:
    #
    #   order                   0   2   1     the second piece is the copy
    #   lengths in this order   4   5   3
    #   ends                    4   9  12
    #   end of each piece       4  12   9     so the copy starts at 9 - 5 = 4
    lengths = np.array([len(piece) for piece in pieces])
    starts = np.cumsum(lengths[order])[slots] - lengths
    blocks = cut_blocks([pieces[index] for index in order], spec.block_size)
    continues = np.ones(len(blocks), dtype=np.bool_)
    if not is_concatenated:
        # A block that is a copy is a text of its own; the base blocks keep their order.
        is_base = order < len(base)
        continues = is_base & np.append(False, is_base[:-1])
    return blocks, continues, copies, starts[len(base) :]


def _make_copies(
    targets: list[TokenArray], base: _Base, spec: _CorpusSpec, eos: TokenArray
) -> list[NoisyCopy]:
    """Make ``num_repeats`` copies of each target in turn, with noise; in the layout "aligned" each
    is a block.
    """
    # The places are drawn with the seed itself.
    noise_rng = np.random.default_rng([spec.seed, 1])
    fill_rng = np.random.default_rng([spec.seed, 2])
    words = np.empty(0, dtype=np.int32)
    if spec.noise:
        words = np.concatenate(list(base))
        words = words[words != eos[0]]  # a document does not end within a copy
    copies = []
    for ids in targets:
        for _ in range(spec.num_repeats):
            copy = NoisyCopy(ids, [0, 0, 0])
            if spec.noise:
                copy = noisy_copy(
                    ids, spec.noise, spec.noise_kind, words, spec.block_size, noise_rng
                )
            if spec.layout == "aligned":
                # A copy that dropped tokens is filled up by the start of a random base block, as
                # after any document.
                block = copy.token_ids
                if len(block) < spec.block_size:
                    filling = base[fill_rng.integers(len(base))]
                    block = np.concatenate([block, eos, filling])
                copy = copy._replace(token_ids=block[: spec.block_size])
            copies.append(copy)
    return copies
