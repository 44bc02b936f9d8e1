"""The run itself: device, dtype, seed, folder."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtune import training, utils

from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._errors import SetupError, setup_errors

_DEVICES = ("cpu", "cuda")


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
        SetupError: If several processes were started, the folder already holds checkpoints or cannot be written, or
            the device cannot be had.
    """
    # Set by torchrun; torch.distributed itself knows nothing before its process group is there.
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise SetupError(f"{world_size} processes were started; the recipes run on one process so far")
    output_dir = Path(cfg.output_dir)
    _check_folder(output_dir)
    with setup_errors(f"device '{cfg.device}' cannot be had here, possible are {', '.join(_DEVICES)} where present"):
        device = utils.get_device(device=cfg.device)
        if device.type not in _DEVICES or not cfg.device.startswith(device.type):
            raise ValueError(f"torch offers '{device.type}' instead")
    with setup_errors("config: dtype"):
        dtype = training.get_dtype(cfg.dtype, device=device)
    return Run(device, dtype, training.set_seed(seed=cfg.seed), output_dir)


def nearest_folder(path: Path) -> Path:
    """The path itself or the nearest of those above it, whichever exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _check_folder(output_dir: Path) -> None:
    earlier = sorted(path.name for path in output_dir.glob("checkpoint_*"))
    if earlier:
        raise SetupError(
            f"output_dir {output_dir} already holds {', '.join(earlier)}: choose another output_dir, or move them away"
        )
    nearest = nearest_folder(output_dir)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise SetupError(f"output_dir {output_dir} cannot be written: {nearest} is no folder or not writable")
