"""Device, dtype, seed, folder and milestones of a run."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtune import training, utils

from tfidf_tune._files import locked_folder, not_writable, require_writable
from tfidf_tune.training._config import FinetuneConfig, shards_model
from tfidf_tune.training._distributed import connect_processes, is_main_process, started_processes
from tfidf_tune.training._errors import SetupError, setup_errors

RESUME_FOLDER = "resume"
BELOW_THRESHOLD = "below_threshold"
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Run:
    """Device and dtype of the weights, seed of this process, folder of a run."""

    device: torch.device
    dtype: torch.dtype
    seed: int
    output_dir: Path
    fsdp_cpu_offload: bool = False

    @property
    def storage_device(self) -> torch.device:
        """Return where the weights are kept between computations."""
        return torch.device("cpu") if self.fsdp_cpu_offload else self.device


@contextmanager
def open_run(cfg: FinetuneConfig) -> Iterator[Run]:
    """Lock the run's folder, choose device, dtype and seed, and connect the processes that torchrun started.

    The main process holds the lock until the block ends, so that what is checked in the block is still true when the
    run writes. Nothing is written here.

    Raises:
        SetupError: If another process holds the folder, the folder holds checkpoints that the run does not resume
            from, or cannot be written, or the device is not available.
    """
    output_dir = Path(cfg.output_dir)
    with hold_folder(output_dir) if is_main_process() else nullcontext():
        with setup_errors():
            _check_folder(output_dir, resume=cfg.resume_from_checkpoint)
        with setup_errors(f"device '{cfg.device}' is not available, possible are {', '.join(_DEVICES)} where present"):
            device = utils.get_device(device=cfg.device)
            if device.type not in _DEVICES or not cfg.device.startswith(device.type):
                raise ValueError(f"torch offers '{device.type}' instead")
        with setup_errors("config: dtype"):
            dtype = training.get_dtype(cfg.dtype, device=device)
        with setup_errors():
            if started_processes() > 1 or shards_model(cfg):
                connect_processes(device)
            # Each process has its own seed, this one plus its rank: dropout differs between them.
            run = Run(device, dtype, training.set_seed(seed=cfg.seed), output_dir, cfg.fsdp_cpu_offload)
        yield run


@contextmanager
def hold_folder(output_dir: Path) -> Iterator[None]:
    """Keep other runs out of a run's folder; a SetupError says why it is not possible."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(output_dir))
        except BlockingIOError as error:
            raise SetupError(
                f"another process is writing into output_dir {output_dir}: wait until it ends, or choose another "
                "output_dir"
            ) from error
        except OSError as error:
            raise SetupError(str(not_writable("output_dir", output_dir, error))) from error
        yield


def milestone_steps(percents: Sequence[int], total_steps: int) -> dict[int, list[int]]:
    """Return the milestones, in percent, by the step that writes them; in a short run a step may have several."""
    steps: dict[int, list[int]] = {}
    for percent in sorted(set(percents)):
        steps.setdefault(-(-total_steps * percent // 100), []).append(percent)
    return steps


def milestone_name(percent: int) -> str:
    """Return the name of a milestone's folder, ``checkpoint_25pct``."""
    return f"checkpoint_{percent}pct"


def _check_folder(output_dir: Path, *, resume: bool) -> None:
    if files := [path.name for path in output_dir.glob("checkpoint_*pct") if not path.is_dir()]:
        raise SetupError(f"output_dir {output_dir} holds {files[0]}, which is not a folder: move it away")
    patterns = ("checkpoint_*", BELOW_THRESHOLD)
    written = ", ".join(sorted(path.name for pattern in patterns for path in output_dir.glob(pattern)))
    resumable = ", ".join(sorted(path.name for path in output_dir.glob(f"{RESUME_FOLDER}/step_*")))
    problem, remedy = "", "choose another output_dir, or move them away"
    if resume and written and not resumable:
        problem = f"holds {written}, but no resume checkpoint"
    elif resumable and not resume:
        problem = f"already holds a run that can be resumed, from {resumable} of its folder {RESUME_FOLDER}"
        remedy = f"set resume_from_checkpoint=True, {remedy}"
    elif written and not resume:
        problem = f"already holds {written}"
    if problem:
        raise SetupError(f"output_dir {output_dir} {problem}: {remedy}")
    require_writable("output_dir", output_dir)
