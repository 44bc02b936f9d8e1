"""The run itself: device, dtype, seed, folder."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torchtune import training, utils

from tfidf_tune.training._config import FinetuneConfig


@dataclass(frozen=True)
class Run:
    """Where and how a run computes.

    Attributes:
        device (torch.device): the device of model and batches.
        dtype (torch.dtype): the dtype of the weights.
        seed (int): seed of initialisation, dropout and data order.
        output_dir (Path): folder of the run; it is made when there is something to write.
    """

    device: torch.device
    dtype: torch.dtype
    seed: int
    output_dir: Path


def open_run(cfg: FinetuneConfig) -> Run:
    """Settle device, dtype and seed; nothing is written yet.

    Args:
        cfg (FinetuneConfig): the checked config.

    Returns:
        Run: the run.

    Raises:
        ValueError: If the folder already holds checkpoints, the device or dtype cannot be had, or several processes
            were started.
    """
    output_dir = Path(cfg.output_dir).expanduser()
    earlier = sorted(path.name for path in output_dir.glob("checkpoint_*"))
    if earlier:
        raise ValueError(
            f"output_dir {output_dir} already holds {', '.join(earlier)}: choose another output_dir, or move them away"
        )
    world_size, _ = utils.get_world_size_and_rank()
    if world_size > 1:
        raise ValueError(f"{world_size} processes were started; the recipes run on one process so far")
    try:
        device = utils.get_device(device=cfg.device)
        dtype = training.get_dtype(cfg.dtype, device=device)
    except RuntimeError as error:
        raise ValueError(f"device '{cfg.device}' with dtype '{cfg.dtype}' cannot be had here: {error}") from error
    return Run(device, dtype, training.set_seed(seed=cfg.seed), output_dir)
