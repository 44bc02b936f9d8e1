"""``python -m research.decisive.afterwards``: what is asked of the finished small models.

Of each run at one learning rate a line of research/results/decisive_afterwards.jsonl: how likely
the continuation of each passage is when the model is sampled from, how few steps of training on a
passage bring it back, and what is known of customers and strangers. The same command continues
after an interruption.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from research.decisive.analysis import LAST_CHECKPOINT, LEAST_COPIES
from research.decisive.facts import facts_of
from research.decisive.parts import HERE, INPUTS, PARTS, RECORDS
from research.decisive.records import rows_of
from research.experiment import load_experiment
from research.experiment._cells import Run
from research.experiment._expand import expand
from research.files import read_json_lines
from research.relearning import relearning_steps
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import Passage, read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.probe.likelihoods import token_likelihoods

FILE = RECORDS / "decisive_afterwards.jsonl"
LEARNING_RATE = 4.0e-3  # of the runs that are asked
_TOKENS = 24  # of a prompt, and of what follows it
MOST_STEPS = 50
_RELEARNING_RATE = 3.0e-4


def main() -> None:
    """Ask the models that have not been asked."""
    experiment = load_experiment(str(HERE / "small.yaml"), [f"learning_rates=[{LEARNING_RATE}]"])
    asked = set()
    if FILE.is_file():
        for record in read_answers(FILE):
            asked.add((record["objective"], record["seed"]))
    runs = [run for run in expand(experiment) if (run.objective, run.seed) not in asked]
    for run in tqdm(runs, desc="Asking models"):
        record = answers_of(run)
        with FILE.open("a", encoding="utf-8") as records:
            records.write(json.dumps(record) + "\n")


def read_answers(file: Path) -> list[dict[str, Any]]:
    """Read the records of the command, with their passages as rows."""
    records = read_json_lines(file)
    for record in records:
        record["passages"] = rows_of(record["passages"])
    return records


def answers_of(run: Run) -> dict[str, Any]:
    """Return the record of a run: NLL of the continuations (nats, the sum over tokens) and steps of
    relearning, None for more than 50, both by passage; and the facts that it knows.
    """
    inputs = INPUTS / PARTS["small"].inputs / f"seed{run.seed}"
    passages = chosen(read_probe_file(inputs / "probe.jsonl"))
    model = load_model(run.folder / LAST_CHECKPOINT)
    beginnings = [passage.token_ids[: 2 * _TOKENS] for passage in passages]
    nll = [of_tokens.nll for of_tokens in token_likelihoods(model, beginnings)]
    steps = relearning_steps(
        model,
        passages,
        prefix_length=_TOKENS,
        max_new_tokens=_TOKENS,
        max_steps=MOST_STEPS,
        learning_rate=_RELEARNING_RATE,
    )
    columns = {
        "copies": [passage.num_injections for passage in passages],
        "change": [passage.source for passage in passages],
        # The NLL has no value of the first token.
        "nll": [round(float(of_passage[_TOKENS - 1 :].sum()), 3) for of_passage in nll],
        "steps": steps,
    }
    return {
        "objective": run.objective,
        "seed": run.seed,
        "passages": columns,
        **facts_of(model, hf_tokenizer(str(run.folder / LAST_CHECKPOINT)), inputs),
    }


def chosen(passages: Sequence[Passage]) -> list[Passage]:
    """Return the targets with several copies, and as many controls."""
    targets = [passage for passage in passages if passage.num_injections >= LEAST_COPIES]
    controls = [passage for passage in passages if passage.kind == "control"]
    return [*targets, *controls[: len(targets)]]


if __name__ == "__main__":
    main()
