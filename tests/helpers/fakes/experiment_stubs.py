"""Fakes of training and evaluation, which only write the files of the real ones.

They write what they do to ``journal`` in the folder $STUBS. A file ``fail_<text>`` there makes them
fail if the text occurs in what they do; ``hang_<text>`` stops the process.
"""

import os
import signal
import sys
from pathlib import Path

import yaml

import tfidf_tune.tasks
from helpers.processes.fork_jobs import ForkExecutor
from research.experiment import _job, _run

# Keys of an experiment of two cells for each seed.
SMALL = {
    "objectives": {"CE": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}},
    "milestones": [100],
}


def install(setattr=setattr):
    """Replace training, evaluation, starts and the executor."""
    import lm_eval.models.huggingface  # noqa: F401  (jobs are forked: none has to import it)

    setattr(_job, "run_recipe", run_recipe)
    setattr(_job, "make_start", make_start)
    setattr(tfidf_tune.tasks, "evaluate", evaluate)
    setattr(_run, "make_executor", lambda launcher, folder: ForkExecutor(folder))
    # There are no results to compare.
    setattr(_run, "_report", lambda runs, experiment, folder: None)


def folder():
    return Path(os.environ["STUBS"])


def note(text):
    with (folder() / "journal").open("a") as file:
        file.write(text + "\n")


def wants(what, text):
    return any(path.name.removeprefix(f"{what}_") in text for path in folder().glob(f"{what}_*"))


def misbehave(text):
    if wants("hang", text):
        with (folder() / "hanging").open("a") as file:
            file.write(f"{os.getpid()}\n")
        signal.pause()
    return wants("fail", text)


def run_recipe(name, config, matmul_precision):
    cfg = yaml.safe_load(Path(config).read_text())
    run = Path(cfg["output_dir"])
    assert not list(run.glob("checkpoint_*")), "the recipes refuse that"
    note(f"train {run.parent.name}/{run.name}")
    print("\r 50%|=====     |\x1b[A\r100%|==========|\nstep 1 of 1", flush=True)
    os.write(1, b"printed without Python\n")
    for percent in cfg["save_at_percent"]:
        (run / f"checkpoint_{percent}pct").mkdir()
        if misbehave(f"train {run}"):
            sys.exit("error: no luck today")


def make_start(start):
    note(f"start {start.folder.name}")
    if misbehave(f"start {start.folder.name}"):
        raise RuntimeError("no luck today")
    start.folder.mkdir(parents=True)


def evaluate(tasks, output_path, batch_size, **arguments):
    what = (
        f"evaluate {output_path.parents[2].parent.name} {output_path.parent.name} {','.join(tasks)}"
    )
    note(what)
    print(f"{what} with batches of {batch_size} by {os.getpid()}")
    if misbehave(what):
        raise RuntimeError("no luck today")


def write_start(folder, model, seed, *, content="weights", noise="", error=None):
    """A user's component that makes a start."""
    print(f"\r50%|\rmaking {model['sizes']} with seed {seed}")
    if noise:  # as other languages print
        os.write(1, f"{noise} {seed}\n".encode())
    (folder / "model").write_text(content)
    if error:
        raise RuntimeError(error)
