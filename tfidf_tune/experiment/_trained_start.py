"""Checkpoint folders to start from that nobody has to download: a model trained by plain cross-entropy."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from tfidf_tune.experiment._children import end
from tfidf_tune.experiment._processes import decoded, exit_reason
from tfidf_tune.experiment._start import base_section, random_model
from tfidf_tune.training import milestone_name

_COMMAND = (sys.executable, "-m", "tfidf_tune.cli", "run", "full_finetune", "--config")


def trained_model(
    folder: Path,
    model: Mapping[str, Any],
    seed: int,
    *,
    source: str = "embedded",
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    epochs: int = 4,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    num_warmup_steps: int = 20,
    block_size: int = 256,
    device: str = "cpu",
    dtype: str = "fp32",
) -> None:
    """Write a model of :func:`random_model` that the recipe ``full_finetune`` has trained by plain cross-entropy.

    AdamW without weight decay, the learning rate falling linearly to 0, on blocks of text.

    Args:
        folder (Path): an existing folder; gets a complete Hugging Face model.
        model (Mapping[str, Any]): section ``model`` of a training config, see :func:`random_model`.
        seed (int): of the weights and the order of the blocks.
        source (str): text to train on, see :func:`tfidf_tune.data.load_documents`. Default: "embedded".
        source_name (str | None): configuration of a hub data set. Default: None.
        source_split (str): split of a hub data set or of ``embedded``. Default: "train".
        source_column (str): the column that holds the text. Default: "text".
        epochs (int): passes over the text. Default: 4.
        batch_size (int): blocks of a step. Default: 16.
        learning_rate (float): the highest. Default: 3e-3.
        num_warmup_steps (int): steps until it is reached. Default: 20.
        block_size (int): tokens in a block. Default: 256.
        device (str): where it is trained. Default: "cpu".
        dtype (str): ``fp32`` or ``bf16``, of weights and training. Default: "fp32".

    Raises:
        ValueError: If the builder is none that :func:`random_model` knows.
        RuntimeError: If the recipe fails; it has printed why.
    """
    with TemporaryDirectory(dir=folder) as scratch:
        start, run = Path(scratch, "start"), Path(scratch, "run")
        random_model(start, model, seed)
        config = {
            "output_dir": str(run),
            "model": base_section(model),
            "checkpointer": {"_component_": "tfidf_tune.training.HFCheckpointer", "checkpoint_dir": str(start)},
            "tokenizer": {"_component_": "tfidf_tune.data.hf_tokenizer", "path": str(start)},
            "dataset": {
                "_component_": "tfidf_tune.data.text_blocks_dataset",
                "source": source,
                "source_name": source_name,
                "source_split": source_split,
                "source_column": source_column,
                "block_size": block_size,
            },
            "loss": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": learning_rate, "weight_decay": 0.0, "fused": True},
            "lr_scheduler": {
                "_component_": "transformers.get_linear_schedule_with_warmup",
                "num_warmup_steps": num_warmup_steps,
            },
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": f"{run}/logs",
            },
            "seed": seed,
            "batch_size": batch_size,
            "epochs": epochs,
            "save_at_percent": [100],
            "keep_last_n_checkpoints": 0,
            "device": device,
            "dtype": dtype,
            "log_every_n_steps": 10,
        }
        OmegaConf.save(OmegaConf.create(config), Path(scratch, "config.yaml"))
        _train(Path(scratch, "config.yaml"))
        for file in (run / milestone_name(100)).iterdir():
            file.rename(folder / file.name)


def _train(config: Path) -> None:
    """Run the recipe, and print what it prints."""
    process = subprocess.Popen(
        [*_COMMAND, str(config)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        for text in decoded(process.stdout):
            print(text, end="", flush=True)
        status = process.wait()
    finally:
        end(process)
    if status != 0:
        raise RuntimeError(f"the recipe {exit_reason(status)}")
