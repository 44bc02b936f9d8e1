"""Probe files from a user's own training text, so that a model trained elsewhere can be audited.

Windows of text that occur more than once lead to candidates
(:mod:`tfidf_tune.corpus.window_index`). Their documents are tokenized, and passages are chosen and
counted on token ids. A passage holds a window that each of its occurrences has, because the window
was chosen by the text of the passage alone: so the index knows the documents of all occurrences.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tfidf_tune._files import file_sha256
from tfidf_tune._tokenizer import TextTokenizer, tokenizer_identity
from tfidf_tune.corpus import sources
from tfidf_tune.corpus.holdout import read_holdout
from tfidf_tune.corpus.jobs import TaskRunner
from tfidf_tune.corpus.sources import EMBEDDED
from tfidf_tune.corpus.window_index import build
from tfidf_tune.passages._search import (
    Search,
    require_enough,
    sample_text,
    share_without_window,
    windows_to_index,
)
from tfidf_tune.passages._targets import Chosen, frequent_targets, near_targets
from tfidf_tune.passages._unseen import choose_controls, draw_unseen
from tfidf_tune.passages.of_holdout import choose_by_coin
from tfidf_tune.passages.probe_file import Passage, PassageDraft, make_passages, read_probe_file
from tfidf_tune.passages.probe_spec import ProbeSpec
from tfidf_tune.passages.stretches import Start

_FORMAT = 3  # of the steps on disk; an interrupted search of another format is not continued


@dataclass(frozen=True)
class MadeProbe:
    """The passages, targets first, and statistics of the search.

    Counts of the training text: documents, tokens, occurrences of each duplicated stretch of the
    candidates (stretches may overlap), targets that are duplicates, passages left out because they
    repeat a few tokens, passages of the controls' source refused because they are partly in the
    training text or cannot be compared with it, and targets by where they start. ``num_tokens`` is
    estimated from a sample if ``is_estimate``. ``unsearched_share`` is the share of the passages of
    a sample that hold no window of the index: copies of such passages are not found.
    """

    passages: tuple[Passage, ...]
    num_documents: int
    num_tokens: int
    stretch_repeats: tuple[int, ...]
    num_duplicates: int
    num_repetitive: int
    num_refused: int
    starts: dict[Start, int]
    is_estimate: bool = False
    unsearched_share: float = 0.0


def search_arguments(tokenizer: TextTokenizer, spec: ProbeSpec) -> dict[str, Any]:
    """Return what the passages follow from, JSON data: the specification, hashes of texts and
    controls, the tokenizer.

    Data sets of the hub are known by their names only.
    """
    of_hub = [source for source in spec.sources if not sources.is_local(source)]
    texts = sources.content_hashes([source for source in spec.sources if source not in of_hub])
    texts |= {source: sources.source_fingerprint(source, column=spec.column) for source in of_hub}
    arguments = {
        **asdict(spec),
        "sample_by": spec.document_is,
        "texts": texts,
        "tokenizer": tokenizer_identity(tokenizer),
        "format": _FORMAT,
    }
    if spec.controls_column is None:  # as before there was such a field
        del arguments["controls_column"]
    if spec.holdout is None:
        del arguments["holdout"]
    else:
        manifest = read_holdout(spec.holdout)
        arguments["holdout"] = str(manifest.manifest.resolve())
        arguments["texts"] = {arguments["holdout"]: manifest.sha256}
        cuts = manifest.contents["cuts"]
        if cuts["documents"]:
            arguments["without_coin"] = {
                "documents": cuts["documents"],
                "groups": cuts["groups"],
                "largest_group": manifest.largest_group,
            }
        return arguments
    if spec.num_controls:
        unseen = spec.controls_source or EMBEDDED
        arguments["controls"] = sources.source_fingerprint(
            unseen, column=spec.controls_column or spec.column, sample_by=spec.document_is
        )
    if spec.held_out:
        number = len(_held_out(spec))
        sha256 = file_sha256(Path(spec.held_out).expanduser())
        arguments["held_out"] = {"file": spec.held_out, "sha256": sha256, "passages": number}
    return arguments


def _held_out(spec: ProbeSpec) -> list[Passage]:
    if not spec.held_out:
        return []
    return [passage for passage in read_probe_file(spec.held_out) if passage.kind == "control"]


def longest_control(probe_file: str) -> int:
    """Return the most tokens of a control that is no answer to a prompt; 0 if there is none."""
    longest = 0
    for passage in read_probe_file(probe_file):
        if passage.kind == "control" and passage.num_prompt is None:
            longest = max(longest, len(passage.token_ids))
    return longest


def make_probe(
    tokenizer: TextTokenizer,
    spec: ProbeSpec,
    work: Path | None = None,
    runner: TaskRunner | None = None,
) -> MadeProbe:
    """Choose the passages of a probe file from text of any size; memory does not grow with the
    text.

    A passage is ``block_size`` tokens within one document. Duplicates are found at any offset, in
    one or several documents; each duplicated stretch gives one passage. Randomly drawn passages
    occur once. No two passages share a token, and none consists of a few repeated tokens.
    ``num_injections`` is exact: the occurrences of the token ids without overlap. Of
    near-duplicates, most are found whose windows have a Jaccard similarity of three-word n-grams
    above 0.5, and ``num_injections`` counts the documents that are connected by such pairs.

    Args:
        tokenizer (TextTokenizer): the tokenizer of the model; no BOS is added. If it changes text
            before it splits it (lower case, NFKC), ``num_injections`` is a lower bound.
        spec (ProbeSpec): what to choose.
        work (Path | None): folder of the steps. Steps that are finished there, of a call with the
            same :func:`search_arguments`, are not repeated. Default: None, a temporary folder
        runner (TaskRunner | None): where the tasks run, one for each file. Default: None, this
            process

    Returns:
        MadeProbe: the passages. ``source`` is the file of the first occurrence. ``positions`` of a
            target are ``[document, offset in the document]`` of its occurrences, in tokens, with
            documents counted over all sources, without the empty ones; they are left empty for
            near-duplicates, if one is in a document of more than 32 KiB, and if there are more than
            10,000.

    Raises:
        FileNotFoundError: If a source looks like a path and does not exist.
        ValueError: If a source cannot be read, see :func:`load_documents`, or has too few passages.
        ChildProcessError: If a task on another machine failed.
    """
    if spec.holdout is not None:
        return _by_coin(tokenizer, spec)
    if work is None:
        with TemporaryDirectory() as folder:
            return make_probe(tokenizer, spec, Path(folder) / "work", runner)
    runner = runner or TaskRunner()
    units = _units(spec)
    files = tuple(_complete_name(unit) for unit in units)
    sources.require_distinct(files)
    held_out = _held_out(spec)
    rng = np.random.default_rng(spec.seed)
    # What is searched for: windows whose length follows from a sample, and stretches of the
    # candidates of controls.
    sample = sample_text(tokenizer, spec, files)
    index = windows_to_index(spec, files, sample, work)
    unseen = draw_unseen(tokenizer, spec, rng, index.longest_word)
    index = replace(index, num_shared_bytes=unseen.num_bytes)
    # All text is read once for that; then the documents of the candidates.
    stretches = unseen.stretches(tokenizer, index)
    known = np.array([*chain.from_iterable(stretches)], dtype=np.uint64)
    built = build(index, known, runner)
    search = Search(tokenizer, spec, rng, runner, units, index, built, held_out)
    chosen = near_targets(search) if index.near else frequent_targets(search)
    num_tokens = round(built.counts["bytes"] / sample.bytes_in_token)
    _require_targets(search, chosen, num_tokens)
    controls, num_refused = choose_controls(search, unseen, stretches)
    drafts = [target.draft for target in chosen.targets]
    for control in controls:
        source = spec.controls_source or EMBEDDED
        drafts.append(PassageDraft(control.token_ids, [], source, {"document": control.document}))
    num_duplicates = 0
    if spec.passages != "random":
        num_duplicates = sum(target.num_copies > 1 for target in chosen.targets)
    return MadeProbe(
        passages=tuple(make_passages(tokenizer, drafts, len(chosen.targets))),
        num_documents=built.counts["documents"],
        num_tokens=num_tokens,
        stretch_repeats=chosen.stretch_repeats,
        num_duplicates=num_duplicates,
        num_repetitive=chosen.num_repetitive,
        num_refused=num_refused,
        starts=Counter(target.start for target in chosen.targets),
        is_estimate=sample.num_bytes < built.counts["bytes"],
        unsearched_share=share_without_window(search, sample),
    )


def _by_coin(tokenizer: TextTokenizer, spec: ProbeSpec) -> MadeProbe:
    """Choose the passages of a holdout."""
    chosen = choose_by_coin(tokenizer, spec)
    drafts = [*chosen.targets, *chosen.controls]
    copies = [draft.fields["num_injections"] for draft in chosen.targets]
    return MadeProbe(
        passages=tuple(make_passages(tokenizer, drafts, len(chosen.targets))),
        num_documents=chosen.num_documents,
        num_tokens=chosen.num_tokens,
        stretch_repeats=(),
        num_duplicates=sum(number > 1 for number in copies),
        num_repetitive=chosen.num_repetitive,
        num_refused=chosen.num_refused,
        starts=chosen.starts,
    )


def _complete_name(unit: Path | str) -> str:
    """Return the complete path of a file, or the name of a source that is none."""
    return str(unit.resolve()) if isinstance(unit, Path) else unit


def _units(spec: ProbeSpec) -> list[Path | str]:
    """Return what is a task of its own: each file, and any other source."""
    units: list[Path | str] = []
    for source in spec.sources:
        if sources.is_local(source):
            units += sources.local_files(source)
        else:
            units.append(source)
    return units


def _require_targets(search: Search, chosen: Chosen, num_tokens: int) -> None:
    remark = ""
    if chosen.num_repetitive:
        remark = (
            f" {chosen.num_repetitive} more repeat a few tokens, fewer than one in eight of which "
            "are different."
        )
    text = (
        f"{', '.join(search.spec.sources)} ({search.built.counts['documents']} documents of "
        f"{num_tokens} tokens in all)"
    )
    require_enough(search.spec, len(chosen.targets), "num_targets", text, remark)
