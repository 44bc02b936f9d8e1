"""Small runs that tests kill and break, and the state in which they have to end."""

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from helpers.fakes.tiny_run import read_metrics, run_config
from helpers.processes.recipes import Processes, RecipeRun, nothing

LOSSES: dict[str, dict[str, Any]] = {
    "CE": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
    "TF-IDF": {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"},
    "repetition": {
        "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
        "weighting": {
            "_component_": "tfidf_tune.weighting.RepetitionWeighting",
            "h": 2,
            "k": 1,
            "sample": 1,
            "min_length": 1,
            "num_buckets": 2**16,
            "sync": True,
        },
    },
}


@dataclass(frozen=True)
class Job:
    """What is trained, for 12 steps: all weights, or adapters with dropout; on
    how many processes.
    """

    lora: bool = False
    num_processes: int = 1
    loss: str = "TF-IDF"


def start(
    job: Job,
    folder: Path,
    inputs: tuple[Path, Path],
    name: str,
    *,
    before: Callable[[int], None] = nothing,
    **overrides: Any,
) -> Processes:
    """Start or resume the job's run in ``folder/run``; ``inputs`` are a
    checkpoint and documents.
    """
    settings: dict[str, Any] = {
        "loss": LOSSES[job.loss],
        "batch_size": 4 // job.num_processes,
        "max_steps": 12,
        "save_every_n_steps": 2,
        "save_at_percent": [50, 100],
        "resume_from_checkpoint": True,
        **({"model.lora_dropout": 0.1} if job.lora else {}),
    }
    cfg = run_config(folder / "run", *inputs, lora=job.lora, **(settings | overrides))
    return Processes(
        [RecipeRun(cfg, job.lora)], folder / name, num_processes=job.num_processes, before=before
    )


def finish(job: Job, folder: Path, inputs: tuple[Path, Path]) -> dict[str, str]:
    """Run or resume the job to its end, and return :func:`end_state`."""
    ended = start(job, folder, inputs, "finished").wait()
    assert not any(ended.codes), ended.output[-4000:]
    return end_state(folder / "run")


def end_state(run: Path) -> dict[str, str]:
    """Describe weights, optimizer, windows, random states, and the metrics of each step; temporary
    files too.
    """
    state = {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (*run.glob("checkpoint_*/*.safetensors"), *run.glob("resume/*/process_*"))
    }
    for shard in run.glob("resume/*/shard-*"):  # PyTorch writes their tensors in any order
        for name, tensor in load_file(shard).items():
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            state[f"{shard.relative_to(run)} {name}"] = (
                f"{tensor.dtype} {tuple(tensor.shape)} {digest}"
            )
    state |= {f"metrics of step {entry['step']}": json.dumps(entry) for entry in read_metrics(run)}
    return state | {str(path): "left behind" for path in (*run.glob(".*"), *run.glob("resume/.*"))}


def newest_step(run: Path) -> int:
    """Return the step of the newest resume checkpoint, 0 if there is none."""
    return max(
        (int(path.name.removeprefix("step_")) for path in run.glob("resume/step_*")), default=0
    )


def can_mount() -> bool:
    """Return whether this process may mount a small file system, as root may."""
    with tempfile.TemporaryDirectory() as name:
        made = (
            subprocess.run(
                ["mount", "-t", "tmpfs", "tmpfs", name], capture_output=True, check=False
            ).returncode
            == 0
        )
        if made:
            subprocess.run(["umount", name], check=True)
    return made


def mount(folder: Path, options: str) -> None:
    """Mount or remount a file system in memory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
