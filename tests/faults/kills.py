"""SIGKILL at random moments: a run that is killed again and again ends bit for bit like one that was left alone."""

import hashlib
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fault_tables import Tried, fault_table
from recipe_processes import Ended, Processes, RecipeRun
from safetensors.torch import load_file
from tiny_llama import make_llama, make_tokenizer
from tiny_run import run_config, write_documents

from tfidf_tune.report import Table

_LOSSES = ("CrossEntropyLoss", "TFIDFCrossEntropyLoss")
# Of three kills one waits until a checkpoint is being written.
_IN_A_SAVE = 3
_SAVE_SECONDS = 0.02
_POLL_SECONDS = 0.0005
_TIMINGS = "tokens_per_second_per_gpu"


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        lora (bool): adapters, with dropout; all weights otherwise.
        loss (str): the objective's class.
        num_processes (int): that share the work.
    """

    lora: bool
    loss: str
    num_processes: int

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return "lora_finetune" if self.lora else "full_finetune"


JOBS = [Job(lora, loss, number) for number in (1, 2) for lora in (False, True) for loss in _LOSSES]


@dataclass
class Killed:
    """What came of a job's kills.

    Attributes:
        kills (int): SIGKILLs sent to all processes.
        in_saves (int): of these, while a checkpoint was being written.
        runs (int): runs that came to their end in spite of them.
        steps_seen (set[int]): steps that runs went on from.
        differences (list[str]): what was not as in the run that was left alone.
    """

    kills: int = 0
    in_saves: int = 0
    runs: int = 0
    steps_seen: set[int] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """Write the tiny Llama and the documents that all jobs share."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = write_documents(folder / "documents.txt")
    checkpoint = folder / "llama"
    checkpoint.mkdir()
    return make_tokenizer(make_llama(checkpoint), documents), documents


def run_of(job: Job, folder: Path, inputs: tuple[Path, Path], **overrides: object) -> RecipeRun:
    """Make a job's run, which goes on from where it was.

    Args:
        job (Job): what is trained.
        folder (Path): takes the run's folder, ``run``.
        inputs (tuple[Path, Path]): see :func:`make_inputs`.
        **overrides (object): of the config.

    Returns:
        RecipeRun: the run.
    """
    settings: dict[str, object] = {
        "loss": {"_component_": f"tfidf_tune.loss.{job.loss}"},
        "batch_size": 4 // job.num_processes,
        "save_every_n_steps": 2,
        "save_at_percent": [50, 100],
        "resume_from_checkpoint": True,
    }
    if job.lora:
        settings["model.lora_dropout"] = 0.1
    return RecipeRun(run_config(folder / "run", *inputs, lora=job.lora, **(settings | overrides)), lora=job.lora)


def end_state(run: Path) -> dict[str, str]:
    """What has to be the same in the end: weights, optimizer, windows, random states, and the metrics of each step."""
    state = {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (*run.glob("checkpoint_*/*.safetensors"), *run.glob("resume/*/process_*"))
    }
    for shard in run.glob("resume/*/shard-*"):  # PyTorch writes their tensors in any order
        for name, tensor in load_file(shard).items():
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            state[f"{shard.relative_to(run)} {name}"] = f"{tensor.dtype} {tuple(tensor.shape)} {digest}"
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        state[f"metrics of step {entry['step']}"] = str({key: entry[key] for key in entry if key != _TIMINGS})
    return state


def kill_again_and_again(job: Job, folder: Path, inputs: tuple[Path, Path], *, num_kills: int, seed: int) -> Killed:
    """Kill a job's processes at random moments, start them anew each time, and compare how runs end.

    Args:
        job (Job): what is trained.
        folder (Path): takes the runs.
        inputs (tuple[Path, Path]): see :func:`make_inputs`.
        num_kills (int): SIGKILLs, after which the last run is left alone.
        seed (int): of the moments.

    Returns:
        Killed: what came of it.

    Raises:
        RuntimeError: If a process ends with an error of its own.
    """
    rng, killed = random.Random(seed), Killed()

    def start(site: Path) -> Processes:
        return Processes([run_of(job, site, inputs)], site, num_processes=job.num_processes)

    began = time.monotonic()
    _require_success(start(folder / "alone").wait())
    duration = time.monotonic() - began
    expected = end_state(folder / "alone" / "run")
    while killed.kills < num_kills:
        site = folder / f"killed_{killed.runs}"
        for moment in _moments(rng, duration, num_kills - killed.kills):
            processes = start(site)
            if not _kill(processes, site / "run", moment, killed):
                _require_success(processes.wait())
                break
            killed.steps_seen |= {_newest_step(site / "run")}
        else:
            _require_success(start(site).wait())
        killed.runs += 1
        killed.differences += _differences(expected, site / "run")
        shutil.rmtree(site)
    return killed


def kill_table(folder: Path, *, num_kills: int = 50, jobs: Sequence[Job] = tuple(JOBS)) -> Table:
    """Kill every job, and make the table.

    Args:
        folder (Path): takes the runs.
        num_kills (int): SIGKILLs of each job. Default: 50.
        jobs (Sequence[Job]): what is trained. Default: all.

    Returns:
        Table: a row for each job.
    """
    inputs = make_inputs(folder / "inputs")
    rows = []
    for number, job in enumerate(jobs):
        killed = kill_again_and_again(job, folder / f"job_{number}", inputs, num_kills=num_kills, seed=number)
        cells = (
            job.recipe,
            job.loss,
            str(job.num_processes),
            str(killed.kills),
            str(killed.in_saves),
            str(len(killed.steps_seen)),
            str(killed.runs),
        )
        rows.append(Tried(cells, tuple(killed.differences)))
    return fault_table(
        "kill",
        "Killed at random moments, resumed, and compared with a run that was left alone: weights, optimizer, window, "
        "random states, metrics, bit for bit",
        ("recipe", "loss", "processes", "SIGKILLs", "while saving", "different steps gone on from", "runs compared"),
        rows,
    )


def _moments(rng: random.Random, duration: float, number: int) -> Iterator[float | None]:
    """When to kill, in seconds after the start; None: while a checkpoint is being written."""
    for _ in range(number):
        yield None if rng.randrange(_IN_A_SAVE) == 0 else rng.uniform(0, duration)


def _kill(processes: Processes, run: Path, moment: float | None, killed: Killed) -> bool:
    """Kill at a moment; False if the run ended before."""
    deadline = time.monotonic() + (moment or 0)
    while processes.is_running():
        if time.monotonic() >= deadline if moment is not None else _is_saving(run):
            if moment is None:
                time.sleep(random.uniform(0, _SAVE_SECONDS))
            if not processes.is_running():
                return False
            killed.kills += 1
            killed.in_saves += _is_saving(run)
            processes.kill()
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _is_saving(run: Path) -> bool:
    return any(run.glob(".checkpoint_*")) or any(run.glob("resume/.step_*"))


def _newest_step(run: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in run.glob("resume/step_*")), default=0)


def _differences(expected: dict[str, str], run: Path) -> list[str]:
    found = end_state(run)
    wrong = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
    leftovers = [path.name for path in (*run.glob(".*"), *run.glob("resume/.*"))]
    return [f"{name} differs" for name in wrong[:3]] + [f"{name} is left" for name in leftovers]


def _require_success(ended: Ended) -> None:
    if any(ended.codes):
        raise RuntimeError(f"ended with {ended.codes}; said:\n{ended.output[-4000:]}")
