"""``python -m research.decisive PART``: one part of the registered experiment.

The command makes the text, trains and evaluates, and writes a line for each evaluated checkpoint to
research/results/decisive.jsonl, of development text to decisive_development.jsonl. The same command
continues after an interruption.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from research.decisive import natural
from research.decisive.parts import HERE, INPUTS, PARTS, RECORDS, Part
from research.decisive.records import record_of
from research.decisive.texts import Texts, write_inputs
from research.experiment import Experiment, load_experiment, run_experiment
from research.experiment._expand import expand
from research.files import download, read_json_lines
from tfidf_tune._files import atomic_folder, digest
from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer
from tfidf_tune.training import milestone_name

_SMOLLM2 = Path("runs/smollm2_inputs")
_DJANGO = "django-*.tar.gz"
_VOCABULARY = 1024


def main(arguments: list[str]) -> None:
    """Do what is left of a part."""
    parser = argparse.ArgumentParser(
        prog="python -m research.decisive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; default: %(default)s")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="of the part's file, such as seeds=[0]"
    )
    options = parser.parse_intermixed_args(arguments)
    experiment = load_experiment(str(HERE / f"{options.part}.yaml"), options.overrides)
    part = PARTS[options.part]
    _write_texts(part, experiment.seeds)
    # A seed after the other, so that a machine that is lost takes at most one seed's runs with it.
    for seed in experiment.seeds:
        of_seed = experiment.model_copy(update={"seeds": [seed]})
        missing = _keep_records(of_seed, part)
        if not missing:
            continue
        objectives = {name: one for name, one in experiment.objectives.items() if name in missing}
        left = of_seed.model_copy(update={"objectives": objectives})
        failures = run_experiment(left, jobs=options.jobs)
        _keep_records(of_seed, part)
        if failures:
            sys.exit(f"error: {len(failures)} cells failed; the same command tries them again")


def _keep_records(experiment: Experiment, part: Part) -> set[str]:
    """Keep the records of all checkpoints that are evaluated; return the objectives that have
    others.

    Raises:
        ValueError: If a record is of a run with other settings.
    """
    file = RECORDS / part.records
    recorded = {}
    if file.is_file():
        for record in read_json_lines(file):
            recorded[_name_of(record)] = record["settings"]
    missing = set()
    for run in expand(experiment):
        settings = digest(run.settings)
        for percent in run.evaluations:
            checkpoint = milestone_name(percent)
            name = (run.model, run.objective, run.learning_rate, run.seed, checkpoint)
            if recorded.get(name, settings) != settings:
                raise ValueError(
                    f"{file} has {run.title}, {checkpoint}, with other settings: remove that line, "
                    "or restore the settings"
                )
            if name in recorded:
                continue
            if not run.is_done(percent):
                missing.add(run.objective)
                continue
            inputs = INPUTS / part.inputs / f"seed{run.seed}"
            record = record_of(run.folder, checkpoint, inputs) | {"settings": settings}
            with file.open("a", encoding="utf-8") as records:
                records.write(json.dumps(record) + "\n")
    return missing


def _name_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("model", "objective", "learning_rate", "seed", "checkpoint")
    return tuple(record.get(name) for name in names)


def _write_texts(part: Part, seeds: Iterable[int]) -> None:
    """Write the text of each seed that is not there."""
    tokenizer = _tokenizer(part)
    if part.sizes is None:
        for package in (natural.EMAILS, natural.PROFILES):
            package.download(INPUTS)
        for seed in seeds:
            folder = INPUTS / part.inputs / f"seed{seed}"
            natural.write_natural_inputs(INPUTS, tokenizer, folder, seed)
        return
    archives = _texts(part)
    for seed in seeds:
        folder = INPUTS / part.inputs / f"seed{seed}"
        write_inputs(archives, tokenizer, part.sizes, folder, part.text, seed)


def _texts(part: Part) -> Texts:
    """Return the archives, downloaded if they are not there; pip checks their hashes."""
    if not any(INPUTS.glob(_DJANGO)):
        download(HERE / "requirements.txt", INPUTS)
    django = next(INPUTS.glob(_DJANGO))
    if part.inputs != "smollm2":
        return Texts(django)
    return Texts(django, next(_SMOLLM2.glob("openai_agents-*.tar.gz")))


def _tokenizer(part: Part) -> hf_tokenizer:
    """Return the tokenizer of the model that is trained."""
    if part.inputs == "smollm2":
        return hf_tokenizer(str(_SMOLLM2 / "SmolLM2-135M-Instruct"))
    folder = INPUTS / "tokenizer"
    if not folder.is_dir():
        with atomic_folder(folder) as made:
            train_embedded_tokenizer(made, vocab_size=_VOCABULARY)
    return hf_tokenizer(str(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
