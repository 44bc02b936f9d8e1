"""What a run says of its data."""

from collections.abc import Sequence, Sized
from typing import Any, cast

from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._printing import counted
from tfidf_tune.corpus.advice import advice_for
from tfidf_tune.corpus.sources import TextSource
from tfidf_tune.data import InjectedCorpusDataset, SequenceDataset, TextBlocksDataset, is_packed
from tfidf_tune.data.source_repeats import repeats_of_source
from tfidf_tune.passages import Passage
from tfidf_tune.training._data import parts_of, passages_of
from tfidf_tune.training._distributed import is_main_process, print_once
from tfidf_tune.training.components import sections


def print_data(cfg: FinetuneConfig, dataset: Dataset[Any], total_steps: int) -> None:
    """Print how much data the run has, and its steps."""
    for part in parts_of(dataset):
        print_once(f"Data: {_describe(part)}")
    world_size, _ = get_world_size_and_rank()
    left_out = len(cast(Sized, dataset)) % world_size
    over = (
        f"; {left_out} left out of each epoch, so that processes have equally many"
        if left_out
        else ""
    )
    limit = "" if cfg.max_steps is None else f", max_steps {cfg.max_steps:,}"
    print_once(
        f"Training: {counted(total_steps, 'step')} ({counted(cfg.epochs, 'epoch')}{limit}){over}"
    )


def print_advice(cfg: FinetuneConfig) -> None:
    """Print which objective fits the user's own text, by what repeats in it, as ``tfidf-tune data
    copies`` does.
    """
    if not is_main_process():
        return
    for _, section in sections("dataset", cfg.dataset):
        kind = str(section["_component_"]).rpartition(".")[2]
        column = section.get("source_column")
        if kind not in ("text_blocks_dataset", "sft_dataset") or (kind == "sft_dataset" and column):
            continue
        place = TextSource(
            section.source, column=column or "text", sample_by=section.get("sample_by", "line")
        )
        found = repeats_of_source(
            place, learned=kind == "sft_dataset", cache_dir=section.get("cache_dir")
        )
        if found is None:
            print_once(
                f"What repeats in {place.source}, and which objective fits it: tfidf-tune data "
                f"copies {place.source}"
            )
            continue
        if section.get("deduplicate", "none") != "none":
            found = found._replace(
                near_copies=0, differing_copies=max(0, found.differing_copies - found.near_copies)
            )
        for advice in advice_for(found):
            print_once(f"Advice: {advice}")


def _describe(dataset: Any) -> str:
    """Count documents, sequences and tokens: ``30 documents, 84 blocks of 256 tokens (21,504)``."""
    source = dataset.ds if isinstance(dataset, PackedDataset) else dataset
    text = (
        f"{counted(source.num_documents, 'document')}, " if hasattr(source, "num_documents") else ""
    )
    if isinstance(dataset, TextBlocksDataset):
        text += (
            f"{counted(len(dataset), 'block')} of {dataset.block_size} tokens "
            f"({dataset.blocks.size:,} tokens)"
        )
        text += (
            f"; {counted(dataset.num_removed, 'block')} removed as copies"
            if dataset.num_removed
            else ""
        )
    else:
        text += counted(len(dataset), "packed row" if is_packed(dataset) else "sequence")
        text += f" ({source.num_tokens:,} tokens)" if isinstance(source, SequenceDataset) else ""
    passages = passages_of(dataset)
    return text + (_describe_passages(dataset, passages) if passages else "")


def _describe_passages(dataset: Any, passages: Sequence[Passage]) -> str:
    targets = [passage for passage in passages if passage.kind == "target"]
    # Of an answer alone.
    lengths = sorted({len(passage.token_ids) - (passage.num_prompt or 0) for passage in passages})
    tokens = (
        f"{lengths[0]} tokens" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"
    )
    controls = counted(len(passages) - len(targets), "control")
    if not targets:  # what is left of the text has none
        return f"; no targets, so that recitation is not measured; {controls} of {tokens}, held out"
    counts = sorted(passage.num_injections for passage in targets)
    times = (
        f"{'' if counts[0] == counts[-1] else f'{counts[0]:,} to '}{counted(counts[-1], 'time')}"
    )
    times = (
        f"each injected {times}"
        if isinstance(dataset, InjectedCorpusDataset)
        else f"each {times} in the text"
    )
    noisy = " with noise" if any(passage.changes for passage in targets) else ""
    return f"; {counted(len(targets), 'target')} of {tokens}, {times}{noisy}; {controls}, held out"
