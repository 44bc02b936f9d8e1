"""What a run tells its user at the start and at the end: the data, the checkpoints, the next commands."""

import shlex
import sys
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset
from torchtune.datasets import ConcatDataset, PackedDataset

from tfidf_tune._printing import counted
from tfidf_tune.data import InjectedCorpusDataset, Passage, SequenceDataset, TextBlocksDataset, is_packed
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._data import mean_length, probe_files
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._run import Run, milestone_name

_PREFIX_LENGTHS = (32, 50, 100)  # of the task tfidf_memorization


def print_data(cfg: FinetuneConfig, dataset: Dataset[Any], total_steps: int) -> None:
    """Print how much data the run has, and its steps."""
    if not is_main_process():
        return
    parts = dataset._datasets if isinstance(dataset, ConcatDataset) else [dataset]
    for part in parts:
        print(f"Data: {describe_dataset(part)}", file=sys.stderr)
    limit = "" if cfg.max_steps is None else f", max_steps {cfg.max_steps:,}"
    print(f"Training: {counted(total_steps, 'step')} ({counted(cfg.epochs, 'epoch')}{limit})", file=sys.stderr)


def describe_dataset(dataset: Any) -> str:
    """Count documents, sequences and tokens of a data set: ``30 documents, 84 blocks of 256 tokens (21,504)``.

    The tokens of data sets of other packages are estimated from a sample.
    """
    length = len(cast(Sized, dataset))
    source = dataset.ds if isinstance(dataset, PackedDataset) else dataset
    documents = getattr(source, "num_documents", None)
    prefix = f"{counted(documents, 'document')}, " if isinstance(documents, int) else ""
    if isinstance(dataset, TextBlocksDataset):
        text = f"{prefix}{counted(length, 'block')} of {dataset.block_size} tokens ({dataset.blocks.size:,} tokens)"
        text += f"; {counted(dataset.num_removed, 'block')} removed as copies" if dataset.num_removed else ""
        return text + (_describe_passages(dataset.passages) if isinstance(dataset, InjectedCorpusDataset) else "")
    unit = "packed row" if is_packed(dataset) else "sequence"
    if isinstance(source, SequenceDataset):
        return f"{prefix}{counted(length, unit)} ({source.num_tokens:,} tokens)"
    return f"{prefix}{counted(length, unit)} (about {round(length * mean_length(dataset)):,} tokens)"


def _describe_passages(passages: Sequence[Passage]) -> str:
    targets = [passage for passage in passages if passage.kind == "target"]
    lengths = sorted({len(passage.token_ids) for passage in passages})
    tokens = f"{lengths[0]} tokens" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"
    times = max(passage.num_injections for passage in targets)
    controls = counted(len(passages) - len(targets), "control")
    noisy = " with noise" if any(passage.changes for passage in targets) else ""
    return f"; {counted(len(targets), 'target')} of {tokens}, repeated {times} times each{noisy}; {controls}, held out"


def print_next_steps(cfg: FinetuneConfig, dataset: Dataset[Any], run: Run) -> None:
    """Print where the checkpoints are, and the commands that evaluate and compare the run."""
    if not is_main_process():
        return
    folder = run.output_dir
    found = {milestone_name(percent): percent for percent in range(1, 101)}
    checkpoints = sorted(
        (path for path in folder.glob("checkpoint_*") if path.name in found), key=lambda path: found[path.name]
    )
    names = ", ".join(path.name for path in checkpoints)
    print(f"Checkpoints in {folder}: {names}", file=sys.stderr)
    for file, passages in list(probe_files(cfg, dataset))[:1]:
        evaluation = folder / "evaluation"
        evaluate = ["tfidf-tune", "eval", "--model_args", f"pretrained={checkpoints[-1]}"]
        output = ["--batch_size", "32", "--log_samples", "--output_path", str(evaluation)]
        commands = [
            [*evaluate, *_tasks(file, passages), *output],
            ["tfidf-tune", "probe", "audit", "--results", str(evaluation)],
        ]
        cost = ["--tasks", "tfidf_wikitext2_ppl", "--metadata", "wikitext2_source=HELD_OUT", *_block_size(dataset)]
        compare = shlex.join(["tfidf-tune", "compare", str(folder)])
        print(
            "Next, measure what it recites, and make a page of it:",
            *(f"  {shlex.join(command)}" for command in commands),
            "Measure the cost, on text of yours that it was not trained on (put your .jsonl or .txt for HELD_OUT):",
            f"  {shlex.join([*evaluate, *cost, *output])}",
            "With another run, for example of loss=tfidf_tune.loss.CrossEntropyLoss, evaluated by the same commands:",
            f"  {compare} OTHER_RUN",
            sep="\n",
            file=sys.stderr,
        )


def _block_size(dataset: Dataset[Any]) -> list[str]:
    """Blocks as long as those of the training text, which the model surely takes."""
    parts = dataset._datasets if isinstance(dataset, ConcatDataset) else [dataset]
    sizes = [part.block_size for part in parts if isinstance(part, TextBlocksDataset)]
    return [f"block_size={min(sizes)}"] if sizes else []


def _tasks(file: Path, passages: Sequence[Passage]) -> list[str]:
    if all(passage.num_prompt is not None for passage in passages):  # asked for once, from their own prompts
        return ["--tasks", "tfidf_memorization_p50", "--metadata", f"probe_file={file}"]
    shortest = min(len(passage.token_ids) for passage in passages)
    if shortest > max(_PREFIX_LENGTHS):
        return ["--tasks", "tfidf_memorization", "--metadata", f"probe_file={file}"]
    lengths = [length for length in _PREFIX_LENGTHS if length <= shortest // 2] or [max(1, shortest // 2)]
    return [
        "--tasks", "tfidf_memorization_prefixes", "--metadata", f"probe_file={file}",
        f"prefix_lengths=[{','.join(map(str, lengths))}]",
    ]  # fmt: skip
