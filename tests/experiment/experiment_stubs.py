"""Stand-ins for the two processes that an experiment starts: they do nothing but leave what the real ones leave.

    python experiment_stubs.py recipe run RECIPE --config FILE
    python experiment_stubs.py worker

What they do is written to ``journal`` in the folder $STUBS; a file there makes them misbehave: ``fail_<word>`` where
the word is in what they are to do, ``die_<word>`` likewise, ``hang_<word>`` likewise, ``wait_<word>`` until as many
processes wait as the file says.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import yaml

FOLDER = Path(os.environ.get("STUBS", "."))


def note(text):
    with (FOLDER / "journal").open("a") as file:
        file.write(text + "\n")


def told_to(what, text):
    return any(path.name.removeprefix(f"{what}_") in text for path in FOLDER.glob(f"{what}_*"))


def wait_for_others(text):
    """Wait until as many processes as it takes are here at the same time; alone, they would wait in vain."""
    for file in FOLDER.glob("wait_*"):
        if file.name.removeprefix("wait_") in text:
            (FOLDER / f"waiting_{os.getpid()}").touch()
            end = time.monotonic() + 30
            while len(list(FOLDER.glob("waiting_*"))) < int(file.read_text()):
                if time.monotonic() > end:
                    sys.exit("error: nobody else came")
                time.sleep(0.01)


def misbehave(text):
    wait_for_others(text)
    if told_to("die", text):
        os.kill(os.getpid(), signal.SIGKILL)
    if told_to("hang", text):
        with (FOLDER / "hanging").open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(60)
    return told_to("fail", text)


def recipe(config):
    cfg = yaml.safe_load(Path(config).read_text())
    run = Path(cfg["output_dir"])
    assert not list(run.glob("checkpoint_*")), "the recipes refuse that"
    note(f"train {run.parent.name}/{run.name}")
    print("\r 50%|=====     |\x1b[A\r100%|==========|\nstep 1 of 1", flush=True)
    for percent in cfg["save_at_percent"]:
        (run / f"checkpoint_{percent}pct").mkdir()
        if misbehave(f"train {run}"):
            sys.exit("error: no luck today")


def worker():
    for line in sys.stdin:
        told = json.loads(line)
        log, job = told["log"], told["job"]
        folder = Path(job["folder"])
        if told["kind"] == "start":
            note(f"start {folder.name}")
            error = "RuntimeError: no luck today" if misbehave(f"start {folder.name}") else None
            time.sleep(0.3)  # enough for another to come and make it too
            if not error:
                folder.mkdir(parents=True)
            print(json.dumps(error), flush=True)
            continue
        what = f"evaluate {folder.parents[2].parent.name} {folder.parent.name} {','.join(job['tasks'])}"
        note(what)
        with open(log, "a") as file:
            file.write(f"{what} with batches of {job['arguments']['batch_size']} by {os.getpid()}\n")
        temporary = folder.with_name(".temporary")
        temporary.mkdir(parents=True)
        error = "RuntimeError: no luck today" if misbehave(what) else None
        if error:
            shutil.rmtree(temporary)
        else:
            (temporary / "evaluated.json").write_text(json.dumps({"tasks": job["tasks"], "seconds": 1.0}))
            temporary.replace(folder)
        print(json.dumps(error), flush=True)


def write_start(folder, model, seed, *, content="weights", noise="", error=None):
    """A component of the user's that makes a start."""
    print(f"\r50%|\rmaking {model['sizes']} with seed {seed}")
    if noise:  # as what is not Python prints
        os.write(1, f"{noise} {seed}\n".encode())
    (folder / "model").write_text(content)
    if error:
        raise RuntimeError(error)


if __name__ == "__main__":
    recipe(sys.argv[-1]) if sys.argv[1] == "recipe" else worker()
