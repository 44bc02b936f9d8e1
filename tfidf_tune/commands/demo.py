"""``tfidf-tune demo``: print and run the commands that train three small models and compare what
they recite.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tfidf_tune._files import atomic_folder, remove_folder
from tfidf_tune._printing import say
from tfidf_tune._processes import OWN_COMMAND, harness_settings
from tfidf_tune._signals import stop_request

_AT_ONCE = 2
_SECONDS_BETWEEN_LOOKS = 0.1
_OBJECTIVES = {"CE": "loss=ce", "TF-IDF": "loss=tfidf", "Repetition": "loss=repetition"}
_TASKS = "tfidf_memorization,tfidf_membership,tfidf_wikitext2_ppl"
# Perplexity is measured on text that shares no document with the training text.
_HELD_OUT = {
    "wikitext2_source": "embedded",
    "wikitext2_split": "reference_train[80%:]+reference_validation",
    "train_source": "embedded",
    "train_split": "reference_train[:80%]+docstrings_train",
    "num_blocks": 150,
}


def main(arguments: list[str]) -> None:
    """Run the demo; ``arguments`` are those after ``tfidf-tune demo``."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune demo",
        description="Train a Llama of 0.65 million parameters under CE, TF-IDF and repetition "
        "weights on Python's documentation, in which some passages are repeated, and compare what "
        "the models recite. The commands are printed; what an earlier demo in the folder has "
        "finished is not done again.",
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("runs/demo"), help="default: %(default)s"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the order of data and injections; default: %(default)s",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of the training configs"
    )
    options = parser.parse_args(arguments)
    out = options.output_dir.expanduser()
    overrides = [*options.overrides, f"seed={options.seed}"]
    random = out / "random"
    start = out / "start"
    runs = out / f"seed{options.seed}"
    if not random.is_dir():
        say(f"A Llama of random weights, with a tokenizer: {random}")
        with atomic_folder(random) as folder:
            make_random_model(folder)
    _run([_training(start, "demo/llama_650K_start", random, *options.overrides)])
    start = start / "checkpoint_100pct"
    folders = {name: runs / name.lower() for name in _OBJECTIVES}
    _run(
        _training(folders[name], "demo/llama_650K_demo", start, loss, *overrides)
        for name, loss in _OBJECTIVES.items()
    )
    _run(_evaluation(folder, start) for folder in folders.values())
    named = [f"Llama 650K:{name}={folder}" for name, folder in folders.items()]
    _run([(None, ["compare", *named, "--output-dir", str(runs / "report")])])


def make_random_model(folder: Path) -> None:
    """Write a model of random weights and a tokenizer; the sizes are as in the configs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer

    train_embedded_tokenizer(folder, vocab_size=1024)
    eos_id = hf_tokenizer(str(folder)).eos_id
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=eos_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def _training(folder: Path, config: str, start: Path, *overrides: str) -> tuple[Path, list[str]]:
    """Return the log and the command of a training; no command if its last checkpoint, which is
    atomic, is there.
    """
    log = folder.with_suffix(".log")
    if (folder / "checkpoint_100pct").is_dir():
        return log, []
    if folder.is_dir() and any(folder.iterdir()) and not any(folder.glob("*config.yaml")):
        raise ValueError(
            f"{folder} is not of a demo that was interrupted: name another --output-dir"
        )
    remove_folder(folder)
    dirs = [f"checkpointer.checkpoint_dir={start}", f"output_dir={folder}"]
    return log, ["run", "full_finetune", "--config", config, *dirs, *overrides]


def _evaluation(folder: Path, start: Path) -> tuple[Path, list[str]]:
    """Return the log and the command that evaluates a run; no command if each milestone has the
    last of its files.
    """
    log = folder / "evaluation.log"
    results = [
        folder / "evaluation" / checkpoint.name for checkpoint in folder.glob("checkpoint_*pct")
    ]
    if results and all(any(path.rglob("samples_tfidf_wikitext2_ppl_*")) for path in results):
        return log, []
    metadata = harness_settings(
        {"probe_file": str(folder / "probe.jsonl"), "reference_model": str(start), **_HELD_OUT}
    )
    arguments = ["eval", str(folder), "--no-start", "--tasks", _TASKS, "--metadata", *metadata]
    return log, [*arguments, "--model_args", "dtype=float32", "--batch_size", "128"]


def _run(commands: Iterable[tuple[Path | None, list[str]]]) -> None:
    """Print commands and run them, two at once, each with its output in a log if it has one.

    If one fails, no other is started, and the demo ends with its exit code and the last lines of
    its log. A signal ends the commands that run, and then the demo.
    """
    from tqdm import tqdm

    waiting = [(log, arguments) for log, arguments in commands if arguments]
    running: list[tuple[Path | None, subprocess.Popen[bytes]]] = []
    failed: list[tuple[Path | None, int]] = []
    is_logged = any(log is not None for log, _ in waiting)
    with (
        stop_request("ending the commands of the demo; a second signal kills them") as request,
        tqdm(total=len(waiting), unit="command", disable=not is_logged) as bar,
    ):
        try:
            while running or (waiting and not failed):
                if request.signal_number:
                    break
                if waiting and not failed and len(running) < _AT_ONCE:
                    log, arguments = waiting.pop(0)
                    running.append((log, _start(log, arguments)))
                    continue
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                for log, process in list(running):
                    if process.poll() is None:
                        continue
                    running.remove((log, process))
                    bar.update()
                    if process.returncode:
                        failed.append((log, process.returncode))
        finally:
            _end([process for _, process in running])
    if request.signal_number:
        say(
            "interrupted: the same command goes on from here; what is finished is not done again",
            file=sys.stderr,
        )
        sys.exit(128 + request.signal_number)
    if failed:
        log, code = failed[0]
        if log is not None:
            say(log.read_text(encoding="utf-8", errors="replace")[-2000:], file=sys.stderr)
        sys.exit(code if code > 0 else 128 - code)  # ended by a signal: -15 becomes 143


def _start(log: Path | None, arguments: list[str]) -> "subprocess.Popen[bytes]":
    """Print and start a command."""
    text = f"\n$ {shlex.join(['tfidf-tune', *arguments])}"
    # A process that waits leaves the cores to the other.
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with ExitStack() as stack:
        file = None
        if log is not None:
            text += f" > {log} 2>&1"
            log.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(log.open("w"))
        say(text)
        return subprocess.Popen([*OWN_COMMAND, *arguments], stdout=file, stderr=file, env=env)


def _end(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    """Ask processes to end, and wait until they have; an exception meanwhile, such as that of a
    second signal, kills them.
    """
    processes = list(processes)
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()  # nothing, if it has ended
            process.wait()
