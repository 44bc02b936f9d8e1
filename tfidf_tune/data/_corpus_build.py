"""How the memorization corpus is built: read, choose, inject, save."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from tfidf_tune.data._encoding import (
    TextTokenizer,
    TokenArray,
    encode_texts,
    tokenizer_fingerprint,
    tokenizer_name,
)
from tfidf_tune.data._injection import (
    Candidate,
    Injection,
    choose_passages,
    inject_aligned,
    inject_concatenated,
)
from tfidf_tune.data._passages import Passage, passage_text, write_probe_file
from tfidf_tune.data._sources import load_documents
from tfidf_tune.data._text_blocks import text_blocks

_ALL = -1


@dataclass(frozen=True)
class CorpusSpec:
    """The arguments of :func:`injected_corpus_dataset` that decide on the corpus.

    Raises:
        ValueError: If ``layout`` is unknown, a size is out of range, or ``min_target_tokens`` is below
            ``block_size`` in the aligned layout.
    """

    source: str
    source_name: str | None
    source_split: str
    source_column: str
    num_base: int
    target_source: str
    target_name: str | None
    target_split: str
    target_column: str
    num_targets: int
    min_target_tokens: int
    num_repeats: int
    num_controls: int
    block_size: int
    layout: str
    seed: int

    def __post_init__(self) -> None:
        if self.layout not in ("aligned", "concatenated"):
            raise ValueError(f"layout must be 'aligned' or 'concatenated', got {self.layout!r}")
        for name in ("num_targets", "min_target_tokens", "num_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_base < 1 and self.num_base != _ALL:
            raise ValueError(f"num_base must be positive or {_ALL} for all there are, got {self.num_base}")
        if self.num_controls < 0:
            raise ValueError(f"num_controls must not be negative, got {self.num_controls}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.layout == "aligned" and self.min_target_tokens < self.block_size:
            raise ValueError(
                f"min_target_tokens {self.min_target_tokens} is below block_size {self.block_size}, but in "
                "the aligned layout a target fills a block: raise min_target_tokens or use layout 'concatenated'"
            )


def build_corpus(folder: Path, tokenizer: TextTokenizer, spec: CorpusSpec) -> dict[str, int]:
    """Build the corpus and write ``blocks.npy`` and ``probe.jsonl``.

    Args:
        folder (Path): where to write.
        tokenizer (TextTokenizer): the tokenizer.
        spec (CorpusSpec): what to build.

    Returns:
        dict[str, int]: ``num_blocks``, and ``num_left_out``: how many of the base documents read were
            left out for being a target or control.

    Raises:
        FileNotFoundError: If a source looks like a path and nothing is there.
        ValueError: If a source cannot be read, or has too few base sequences or too few long passages.
    """
    chosen = _choose(tokenizer, spec)
    left_out: list[str] = []
    documents = _base_documents(spec, {passage.text for passage in chosen}, left_out)
    targets = [target.token_ids for target in chosen[: spec.num_targets]]
    inject = _aligned if spec.layout == "aligned" else _concatenated
    injection = inject(tokenizer, documents, targets, spec)
    np.save(folder / "blocks.npy", injection.blocks)
    write_probe_file(folder / "probe.jsonl", _passages(tokenizer, spec, chosen, injection))
    return {"num_blocks": len(injection.blocks), "num_left_out": len(left_out)}


def _choose(tokenizer: TextTokenizer, spec: CorpusSpec) -> list[Candidate]:
    documents = load_documents(
        spec.target_source, name=spec.target_name, split=spec.target_split, column=spec.target_column
    )
    needed = spec.num_targets + spec.num_controls
    chosen = choose_passages(
        tokenizer, documents, count=needed, min_tokens=spec.min_target_tokens, block_size=spec.block_size
    )
    if len(chosen) < needed:
        raise ValueError(
            f"found {len(chosen)} distinct passages of at least {spec.min_target_tokens} tokens in "
            f"{spec.target_source!r}, needed {spec.num_targets} targets + {spec.num_controls} controls: "
            "lower num_targets / num_controls or min_target_tokens, or name a larger target_source"
        )
    return chosen


def _base_documents(spec: CorpusSpec, known: set[str], left_out: list[str]) -> Iterator[str]:
    for text in load_documents(spec.source, name=spec.source_name, split=spec.source_split, column=spec.source_column):
        if text in known:
            left_out.append(text)
        else:
            yield text


def _aligned(
    tokenizer: TextTokenizer, documents: Iterator[str], targets: Sequence[TokenArray], spec: CorpusSpec
) -> Injection:
    num_blocks = None if spec.num_base == _ALL else spec.num_base
    base = text_blocks(tokenizer, documents, spec.block_size, num_blocks, add_eos=True)
    _check_base(spec, len(base), f"blocks of {spec.block_size} tokens")
    first_blocks = np.stack([target[: spec.block_size] for target in targets])
    return inject_aligned(base, first_blocks, num_repeats=spec.num_repeats, seed=spec.seed)


def _concatenated(
    tokenizer: TextTokenizer, documents: Iterator[str], targets: Sequence[TokenArray], spec: CorpusSpec
) -> Injection:
    wanted = documents if spec.num_base == _ALL else islice(documents, spec.num_base)
    base = [ids for _, ids in encode_texts(tokenizer, wanted)]
    _check_base(spec, len(base), "documents")
    return inject_concatenated(
        base,
        targets,
        num_repeats=spec.num_repeats,
        block_size=spec.block_size,
        eos_id=tokenizer.eos_id,
        seed=spec.seed,
    )


def _check_base(spec: CorpusSpec, found: int, unit: str) -> None:
    needed = 1 if spec.num_base == _ALL else spec.num_base
    if found < needed:
        raise ValueError(
            f"found {found} base {unit} in {spec.source!r}, needed {needed}: lower num_base, set it to "
            f"{_ALL} for all there are, or name a larger source"
        )


def _passages(
    tokenizer: TextTokenizer, spec: CorpusSpec, chosen: Sequence[Candidate], injection: Injection
) -> list[Passage]:
    name, fingerprint = tokenizer_name(tokenizer), tokenizer_fingerprint(tokenizer)
    passages = []
    for index, candidate in enumerate(chosen):
        is_target = index < spec.num_targets
        kind, number = ("target", index) if is_target else ("control", index - spec.num_targets)
        token_ids = candidate.token_ids[: spec.block_size].tolist()
        positions = injection.positions[index] if is_target else []
        passages.append(
            Passage(
                id=f"{kind}-{number:04d}",
                kind=kind,
                text=passage_text(tokenizer, token_ids),
                token_ids=token_ids,
                num_injections=len(positions),
                positions=positions,
                source=spec.target_source,
                tokenizer=name,
                tokenizer_fingerprint=fingerprint,
            )
        )
    return passages
