"""Weights as data, for trainers that take a weight for each token but have no hook for a loss."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from tfidf_tune._config import DEFAULT_COLLATE, FinetuneConfig
from tfidf_tune._files import update_files
from tfidf_tune.data import is_packed
from tfidf_tune.passages import write_probe_file
from tfidf_tune.training import _data as data
from tfidf_tune.training._errors import SetupError
from tfidf_tune.training._run import Run
from tfidf_tune.training._train import count_steps
from tfidf_tune.training.components import build_loss
from tfidf_tune.weighting import TokenBatch

_LISTS = {
    "tokens": pa.list_(pa.int32()),
    "labels": pa.list_(pa.int32()),
    "weights": pa.list_(pa.float32()),
}
_SCHEMA = pa.schema({"step": pa.int32(), **_LISTS})
_ROWS_AT_ONCE = 1024


def export_weights(
    cfg: FinetuneConfig, tokenizer: Any, dataset: Dataset[Any], file: Path
) -> tuple[int, int]:
    """Write what a run of a config on one process trains on, all epochs in the order of training,
    as Parquet.

    A row is a sequence without padding: "step" (int32, from 1), and three lists of its length n:
    "tokens" (int32), "labels" (int32, the token that each position predicts; -100 where it predicts
    none) and "weights" (float32, 0 where the label is -100). The objective of a step is the sum
    over its rows of weight times negative log-likelihood of the label, divided by the number of its
    labels. The passages that the run would measure are written to the same folder, under the name
    of the file with the ending ".probe.jsonl".

    Returns:
        tuple[int, int]: steps and sequences.

    Raises:
        SetupError: If the weights depend on the model's predictions, or the data set is packed.
    """
    loss = build_loss(cfg).train()
    if loss.weighting.needs_predictions:
        objective = type(loss.weighting).__name__.removesuffix("Weighting")
        raise SetupError(
            f"config: loss: the weights of {objective} depend on the predictions of the model that "
            "is trained: export an objective of labels alone, such as TFIDFCrossEntropyLoss"
        )
    if is_packed(dataset):
        raise SetupError(
            "config: dataset.packed is true, but a row of the export is a sequence: set it to false"
        )
    if cfg.collate_fn != DEFAULT_COLLATE:
        raise SetupError(
            f"config: collate_fn is {cfg.collate_fn}, whose padding the export does not know: "
            "leave it out"
        )
    data.set_special_tokens(loss, tokenizer)
    # The seed is checked.
    run = Run(torch.device("cpu"), torch.float32, cast(int, cfg.seed), Path(cfg.output_dir))
    # With the tokens that are not padding, which tell the lengths, whatever the weighting counts.
    dataloader = data.build_dataloader(cfg, dataset, tokenizer, run, counts_tokens=True)
    num_steps = count_steps(cfg, dataloader)

    def rows() -> Iterator[dict[str, Any]]:
        steps = islice(data.step_batches(cfg, dataloader), num_steps)
        for step, batches in enumerate(steps, start=1):
            first_pass = step <= data.steps_per_epoch(cfg, dataloader)
            for batch in data.agree_on_step(batches).batches:
                labels = batch["labels"]
                unpadded = batch[data.UNPADDED_TOKENS]
                weights = loss.weighting(TokenBatch(labels, None, unpadded, first_pass=first_pass))
                # The first token of a sequence is no label.
                lengths = 1 + (unpadded >= 0).sum(-1)
                for row, length in enumerate(lengths.tolist()):
                    yield {
                        "step": step,
                        "tokens": batch["tokens"][row, :length].numpy(),
                        "labels": labels[row, :length].numpy(),
                        "weights": weights[row, :length].numpy(),
                    }

    def write_weights(path: Path) -> None:
        in_order = rows()
        with pq.ParquetWriter(path, _SCHEMA) as writer:
            while chunk := list(islice(in_order, _ROWS_AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(chunk, _SCHEMA))

    files: dict[str, Callable[[Path], object]] = {file.name: write_weights}
    passages = data.all_passages(cfg, dataset)
    if passages:
        files[file.with_suffix(".probe.jsonl").name] = partial(write_probe_file, passages=passages)
    update_files(file.parent, files)
    return num_steps, pq.read_metadata(file).num_rows
