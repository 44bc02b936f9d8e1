"""``tfidf-tune demo``: print and run the commands that train three small models and compare what
they recite.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tfidf_tune._files import atomic_folder, remove_folder
from tfidf_tune._printing import say
from tfidf_tune._processes import OWN_COMMAND, harness_settings

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
            _make_random(folder)
    _run([_training(start, "demo/llama_650K_start", random, *options.overrides)])
    start = start / "checkpoint_100pct"
    folders = {name: runs / name.lower() for name in _OBJECTIVES}
    _run(
        _training(folders[name], "demo/llama_650K_demo", start, loss, *overrides)
        for name, loss in _OBJECTIVES.items()
    )
    _run(_evaluation(folder, start) for folder in folders.values())
    named = [f"Llama 650K:{name}={folder}" for name, folder in folders.items()]
    arguments = ["compare", *named, "--output-dir", str(runs / "report")]
    say(f"\n$ {shlex.join(['tfidf-tune', *arguments])}")
    sys.exit(subprocess.run([*OWN_COMMAND, *arguments], check=False).returncode)


def _make_random(folder: Path) -> None:
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


def _run(commands: Iterable[tuple[Path, list[str]]]) -> None:
    """Print commands and run them, two at once; end with the exit code of the first that fails, and
    its last lines.
    """

    def run(log: Path, arguments: list[str]) -> int:
        say(f"\n$ {shlex.join(['tfidf-tune', *arguments])} > {log} 2>&1")
        log.parent.mkdir(parents=True, exist_ok=True)
        # A process that waits leaves the cores to the other.
        env = {
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
        }
        with log.open("w") as file:
            return subprocess.run(
                [*OWN_COMMAND, *arguments], stdout=file, stderr=file, env=env, check=False
            ).returncode

    from tqdm import tqdm

    left = [(log, arguments) for log, arguments in commands if arguments]
    with (
        ThreadPoolExecutor(max_workers=2) as pool,
        tqdm(total=len(left), unit="command", disable=not left) as bar,
    ):
        ended = []
        for log, arguments in left:
            future = pool.submit(run, log, arguments)
            future.add_done_callback(lambda _: bar.update())
            ended.append((log, future))
        wait([future for _, future in ended])
    for log, future in ended:
        if future.result():
            say(log.read_text(encoding="utf-8", errors="replace")[-2000:], file=sys.stderr)
            sys.exit(future.result())
