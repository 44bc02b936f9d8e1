"""Probe files from text that is larger than memory."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfidf_tune.data._disk_search import (
    Records,
    WindowSearch,
    count_copies,
    distances,
    draw_places,
    read_windows,
    same_document,
    search_windows,
)
from tfidf_tune.data._disk_tasks import TaskRunner, begin, file_stamps
from tfidf_tune.data._passages import make_passages
from tfidf_tune.data._probe_making import (
    SHARED_TOKENS,
    MadeProbe,
    ProbeSpec,
    Start,
    check_enough,
    choose_controls,
    is_varied,
    read_unseen,
)
from tfidf_tune.data._sources import (
    EMBEDDED,
    load_documents,
    source_fingerprint,
    warn_of_short_documents,
)
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray, encode_texts, tokenizer_fingerprint

logger = logging.getLogger(__name__)

_SAMPLE_FILES, _SAMPLE_DOCUMENTS, _SAMPLE_CHARACTERS = 10, 100, 10_000
_LEAST_SAMPLE = 16  # tokens of a document whose bytes in a token count
_MARGIN = 1.1
_SURE_SHARE = 0.75  # of the bytes of SHARED_TOKENS: controls are refused for less than these, rather than more
_CANDIDATES, _MORE_CANDIDATES = 4, 50
_SAME_TOKENS = 16
"""Passages that have as many consecutive tokens in common are taken to overlap."""


class _Candidate(NamedTuple):
    ids: TokenArray
    start: Start
    num_copies: int
    file: str


def make_probe_on_disk(
    tokenizer: TextTokenizer,
    spec: ProbeSpec,
    work: Path,
    runner: TaskRunner | None = None,
    *,
    replace_work: bool = False,
) -> MadeProbe:
    """Choose the passages of a probe file from files of any size; memory does not grow with the text.

    As :func:`make_probe`, with these differences. Duplicates are found on bytes: all stretches that hold a passage and
    32 words. A passage starts at a word chosen by its content, if possible at the start of a line. A stretch that
    was chosen gives its first such place. No two passages have 16 consecutive tokens in common. Of near-duplicates,
    most are found whose windows have a Jaccard similarity of three-word n-grams above 0.5; ``num_injections`` counts
    the documents that are connected by such pairs. Of exact duplicates it is a lower bound: copies count that have a
    window at the same place. The number of tokens is estimated.

    Args:
        tokenizer (TextTokenizer): the tokenizer of the model; no BOS is added.
        spec (ProbeSpec): what to choose; the sources are local files or folders.
        work (Path): folder of the steps. If an interrupted call with the same arguments left one, it goes on.
        runner (TaskRunner | None): where the tasks run, one for each file. Default: None, one process of this machine
        replace_work (bool): empty ``work`` if it is of a call with other arguments. Default: False

    Returns:
        MadeProbe: the passages, with the file of the first occurrence as ``source`` and without ``positions``.

    Raises:
        FileNotFoundError: If a source does not exist.
        ValueError: If a source cannot be read or has too few passages; if ``work`` is of a call with other arguments.
        ChildProcessError: If a task on another machine failed.
    """
    runner = runner or TaskRunner()
    for source in spec.sources:
        if not Path(source).expanduser().exists():
            raise FileNotFoundError(f"no such file or folder: {source!r}; the search on disk reads local files only")
    stamps = file_stamps(spec.sources)
    files = tuple(stamps)
    unseen_stamp = source_fingerprint(spec.controls_source or EMBEDDED, column=spec.column, sample_by=spec.sample_by)
    arguments = {**asdict(spec), "sources": list(spec.sources), "files": stamps, "controls": unseen_stamp}
    begin(work, arguments | {"tokenizer": tokenizer_fingerprint(tokenizer)}, replace=replace_work)
    rng = np.random.default_rng(spec.seed)
    lengths, mean, most = _sample(tokenizer, files, spec)
    # Controls are drawn before the search, which looks for them in the text.
    unseen = read_unseen(tokenizer, spec) if spec.num_controls else None
    more = replace(spec, num_controls=_CANDIDATES * spec.num_controls + _MORE_CANDIDATES, allow_fewer=True)
    drawn = choose_controls(tokenizer, unseen, rng, more, lambda *_: False)[0] if unseen else []
    decoded = {ids.tobytes(): tokenizer.decode(ids.tolist()).encode("utf-8", "surrogatepass") for ids in drawn}
    sizes = [len(text) / spec.block_size for text in decoded.values()] or [mean]
    search = WindowSearch(
        files=files,
        column=spec.column,
        sample_by=spec.sample_by,
        num_bytes=round(spec.block_size * most * _MARGIN),
        near=spec.passages == "near-duplicates",
        num_shared_bytes=round(min(SHARED_TOKENS, spec.block_size) * float(np.median(sizes)) * _SURE_SHARE),
    )
    stretches = {key: search.stretches(search.batch([text])) for key, text in decoded.items()}
    known = np.concatenate([np.zeros(0, np.uint64), *stretches.values()])
    found = search_windows(search, known, work, runner)
    targets, num_duplicates, repeats, num_repetitive = _choose_targets(
        tokenizer, search, found.groups, work, runner, rng, spec, found.counts["windows"]
    )
    text = f"{', '.join(spec.sources)} ({found.counts['documents']:,} documents)"
    needed = f" On disk, only documents of at least {search.num_bytes:,} bytes are searched."
    check_enough(len(targets), "num_targets", spec, text, max(lengths, default=0), needed)
    # Of a control that is too short to have a stretch nothing is known.
    accepted = {key for key, own in stretches.items() if len(own) and not np.isin(own, found.shared).any()}
    controls = [ids for ids in drawn if ids.tobytes() in accepted][: spec.num_controls]
    num_refused = len(drawn) - len(accepted)
    remark = f" {num_refused} more share text with the training text, or are too short to tell." if num_refused else ""
    source = spec.controls_source or EMBEDDED
    check_enough(len(controls), "num_controls", spec, source, spec.block_size, remark)
    passages = make_passages(tokenizer, "target", [(one.ids, [], one.file) for one in targets])
    passages = [replace(one, num_injections=own.num_copies) for one, own in zip(passages, targets, strict=True)]
    passages += make_passages(tokenizer, "control", [(ids, [], source) for ids in controls])
    return MadeProbe(
        passages=tuple(passages),
        num_documents=found.counts["documents"],
        num_tokens=round(found.counts["bytes"] / mean),
        stretch_repeats=repeats,
        num_duplicates=num_duplicates,
        num_repetitive=num_repetitive,
        num_refused=num_refused,
        starts=Counter(target.start for target in targets),
        is_estimate=True,
    )


def _sample(tokenizer: TextTokenizer, files: Sequence[str], spec: ProbeSpec) -> tuple[list[int], float, float]:
    """Return tokens of some documents, the mean number of bytes in a token, and that of documents with long ones."""
    chosen = [files[index] for index in np.unique(np.linspace(0, len(files) - 1, _SAMPLE_FILES).round().astype(int))]
    lengths, sizes = [], []
    for file in chosen:
        documents = load_documents(file, column=spec.column, sample_by=spec.sample_by)
        texts = [text[:_SAMPLE_CHARACTERS] for text in islice(documents, _SAMPLE_DOCUMENTS)]
        own = [len(ids) for ids in encode_texts(tokenizer, texts)]
        warn_of_short_documents(file, spec.sample_by, own)
        lengths += own
        sizes += [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    shares = [size / length for size, length in zip(sizes, lengths, strict=True) if length >= _LEAST_SAMPLE]
    mean = sum(sizes) / max(1, sum(lengths))
    return lengths, max(mean, 1.0), float(np.quantile(shares, 0.95)) if shares else max(mean, 1.0)


def _choose_targets(
    tokenizer: TextTokenizer,
    search: WindowSearch,
    groups: Records,
    work: Path,
    runner: TaskRunner,
    rng: np.random.Generator,
    spec: ProbeSpec,
    num_windows: int,
) -> tuple[list[_Candidate], int, tuple[int, ...], int]:
    """Return the targets, how many are duplicates, the repeats of all stretches, and the repetitive ones."""
    number = _CANDIDATES * spec.num_targets + _MORE_CANDIDATES
    stretches = _one_of_each_stretch(groups[groups["count"] >= spec.min_repeats], search.num_bytes)
    order = sorted(rng.permutation(len(stretches)), key=lambda index: -int(stretches["count"][index]))
    wanted = stretches[order[: number if spec.passages != "random" else 0]]
    drawn = wanted["place"][:0]
    if num_windows:
        drawn = draw_places(number, work / "runs", rng, unique=spec.passages != "random")
    places = np.concatenate([wanted["place"], drawn])
    texts = read_windows(search, places, work, runner)
    keys = np.array([one.keys for one in texts[len(wanted) :]], np.uint64)
    copies = count_copies(search, keys, drawn, work / "runs") if len(drawn) else []
    counts = [*wanted["count"].tolist(), *copies]
    targets: list[_Candidate] = []
    taken: set[bytes] = set()
    num_duplicates = num_repetitive = num_short = 0
    for index, (place, (before, text, _), count) in enumerate(zip(places, texts, counts, strict=True)):
        is_random = index >= len(wanted)
        if len(targets) == spec.num_targets:
            break
        if is_random and count > 1 and spec.passages != "random":
            continue
        ids = _window_ids(tokenizer, before, text)[: spec.block_size + 1]
        if len(ids) <= spec.block_size:  # the last token may go on after the window
            num_short += 1
            continue
        ids = ids[: spec.block_size]
        if not is_varied(ids):
            num_repetitive += 1
            continue
        size = min(_SAME_TOKENS, spec.block_size)
        grams = {ids[start : start + size].tobytes() for start in range(len(ids) - size + 1)}
        if grams & taken:
            continue
        taken |= grams
        num_duplicates += not is_random
        start = Start.LINE if before.endswith(("\n", "\r")) else Start.WORD
        targets.append(
            _Candidate(ids, start if place["offset"] else Start.DOCUMENT, count, search.files[int(place["file"])])
        )
    if num_short:
        logger.warning(
            f"{num_short:,} candidates were left out: their {search.num_bytes:,} bytes, enough for {spec.block_size} "
            "tokens at the beginning of the files, have fewer here. If passages are missing, mix the order of documents"
        )
    return targets, num_duplicates, tuple(stretches["count"].tolist()), num_repetitive


def _one_of_each_stretch(groups: Records, num_bytes: int) -> Records:
    """Keep the first of windows that overlap and have equally many copies."""
    groups = groups[np.argsort(groups["place"], order=("file", "document", "offset"), kind="stable")]
    if not len(groups):
        return groups
    places = groups["place"]
    goes_on = same_document(places[1:], places[:-1]) & (distances(places[1:], places[:-1]) < num_bytes)
    goes_on &= groups["count"][1:] == groups["count"][:-1]
    return np.asarray(groups[np.append(True, ~goes_on)])


def _window_ids(tokenizer: TextTokenizer, before: str, text: str) -> TokenArray:
    """Return the ids of a window as they are after the text before it: with the space of its first word."""
    (ids,) = encode_texts(tokenizer, [before + text])
    heads = {before.lstrip(), before.removesuffix(" ").lstrip()}
    for start in range(len(before) + 1):
        if tokenizer.decode(ids[:start].tolist()).lstrip() in heads:
            return ids[start:]
    (ids,) = encode_texts(tokenizer, [text])
    return ids
