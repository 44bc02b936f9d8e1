"""What a run says of its data."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

from omegaconf import OmegaConf
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._printing import counted
from tfidf_tune.corpus.advice import Advice, advice_for
from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.corpus.sources import TextSource
from tfidf_tune.data import InjectedCorpusDataset, SequenceDataset, TextBlocksDataset, is_packed
from tfidf_tune.data.source_repeats import repeats_of_source
from tfidf_tune.passages import Passage
from tfidf_tune.probe.run_identity import objective_name
from tfidf_tune.training._data import parts_of, passages_of
from tfidf_tune.training._distributed import is_main_process, print_once
from tfidf_tune.training.components import sections


def print_data(cfg: FinetuneConfig, dataset: Dataset[Any], total_steps: int) -> None:
    """Print how much data the run has, and its steps."""
    for part in parts_of(dataset):
        print_once(f"Data: {_describe(part)}")
    world_size, _ = get_world_size_and_rank()
    limit = "" if cfg.max_steps is None else f", max_steps {cfg.max_steps:,}"
    text = f"Training: {counted(total_steps, 'step')} ({counted(cfg.epochs, 'epoch')}{limit})"
    left_out = len(cast(Sized, dataset)) % world_size
    if left_out:
        text += f"; {left_out} left out of each epoch, so that processes have equally many"
    print_once(text)


def print_advice(cfg: FinetuneConfig) -> None:
    """Print which objective fits the user's own text, by what repeats in it, as ``tfidf-tune data
    copies`` does; what the run does already is only named.
    """
    if not is_main_process():
        return
    for _, section in sections("dataset", cfg.dataset):
        place = _own_text(section)
        if place is None:
            continue
        advised = _advice_for_section(section, place)
        if advised is None:
            print_once(
                f"What repeats in {place.source}, and which objective fits it: tfidf-tune data "
                f"copies {place.source}"
            )
            continue
        for advice in advised:
            is_followed = _is_followed(advice, OmegaConf.to_container(cfg.loss), section)
            print_once(f"Advice: {advice.as_followed if is_followed else advice}")


def advised_setting(cfg: FinetuneConfig) -> str | None:
    """Return the overrides that the first advice for the user's own text names; None if there is no
    advice.
    """
    for _, section in sections("dataset", cfg.dataset):
        place = _own_text(section)
        advised = place and _advice_for_section(section, place)
        if advised:
            return advised[0].setting
    return None


def _own_text(section: Mapping[str, Any]) -> TextSource | None:
    """Return the source of a data set that trains on a text as it is; None of other data sets."""
    _, _, kind = str(section["_component_"]).rpartition(".")
    column = section.get("source_column")
    is_sft = kind == "sft_dataset"
    if kind not in ("text_blocks_dataset", "sft_dataset") or (is_sft and column):
        return None
    sample_by = section.get("sample_by", "line")
    return TextSource(section["source"], column=column or "text", sample_by=sample_by)


def _advice_for_section(section: Mapping[str, Any], place: TextSource) -> list[Advice] | None:
    is_sft = str(section["_component_"]).endswith(".sft_dataset")
    repeats = repeats_of_source(place, learned=is_sft, cache_dir=section.get("cache_dir"))
    return None if repeats is None else advice_for(repeats)


def _is_followed(advice: Advice, loss: Any, section: Mapping[str, Any]) -> bool:
    """Return whether a run has the settings of an advice."""
    deduplication = Deduplication.of(section.get("deduplicate", "none"))
    is_set = {
        "loss=ce": objective_name(loss) == "CE",
        "loss=repetition": objective_name(loss) == "Repetition",
        "dataset.deduplicate=minhash": deduplication.method == "minhash",
    }
    return all(is_set[setting] for setting in advice.setting.split())


def _describe(dataset: Any) -> str:
    """Count documents, sequences and tokens: ``30 documents, 84 blocks of 256 tokens (21,504)``."""
    source = dataset.ds if isinstance(dataset, PackedDataset) else dataset
    text = ""
    if hasattr(source, "num_documents"):
        text += f"{counted(source.num_documents, 'document')}, "
    if isinstance(dataset, TextBlocksDataset):
        text += (
            f"{counted(len(dataset), 'block')} of {dataset.block_size} tokens "
            f"({dataset.blocks.size:,} tokens)"
        )
        if dataset.num_removed:
            removed = "block" if isinstance(dataset, InjectedCorpusDataset) else "document"
            text += f"; {counted(dataset.num_removed, removed)} removed as copies"
    else:
        text += counted(len(dataset), "packed row" if is_packed(dataset) else "sequence")
        if isinstance(source, SequenceDataset):
            text += f" ({source.num_tokens:,} tokens)"
            if source.num_removed:
                text += f"; {counted(source.num_removed, 'document')} removed as copies"
    passages = passages_of(dataset)
    if passages:
        text += _describe_passages(dataset, passages)
    return text


def _describe_passages(dataset: Any, passages: Sequence[Passage]) -> str:
    targets = [passage for passage in passages if passage.kind == "target"]
    # Of an answer alone.
    lengths = sorted({len(passage.token_ids) - (passage.num_prompt or 0) for passage in passages})
    tokens = f"{lengths[-1]} tokens"
    if len(lengths) > 1:
        tokens = f"{lengths[0]} to {tokens}"
    controls = counted(len(passages) - len(targets), "control")
    if not targets:  # what is left of the text has none
        return f"; no targets, so that recitation is not measured; {controls} of {tokens}, held out"
    counts = sorted(passage.num_injections for passage in targets)
    times = counted(counts[-1], "time")
    if counts[0] != counts[-1]:
        times = f"{counts[0]:,} to {times}"
    if isinstance(dataset, InjectedCorpusDataset):
        times = f"each injected {times}"
    else:
        times = f"each {times} in the text"
    noisy = " with noise" if any(passage.changes for passage in targets) else ""
    return f"; {counted(len(targets), 'target')} of {tokens}, {times}{noisy}; {controls}, held out"
