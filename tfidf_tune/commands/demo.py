"""``tfidf-tune demo``: the experiment ``demo`` with few options."""

import argparse
from pathlib import Path

from tfidf_tune.commands.experiment import run


def main(arguments: list[str]) -> None:
    """Run the demo; ``arguments`` are those after ``tfidf-tune demo``."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune demo",
        description="Train a Llama of 0.65 million parameters under CE, TF-IDF and repetition weights on Python's "
        "documentation, in which some passages are repeated, and compare what the models recite.",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    seed_help = "seed of the order of data and of injections; default: %(default)s"
    parser.add_argument("--seed", type=int, default=0, help=seed_help)
    options = parser.parse_args(arguments)
    from tfidf_tune.experiment import load_experiment

    chosen = {"output_dir": str(options.output_dir.expanduser()), "seeds": [options.seed]}
    run(load_experiment("demo").model_copy(update=chosen))
