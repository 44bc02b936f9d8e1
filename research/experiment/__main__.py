"""``python -m research.experiment FILE``."""

import argparse
import signal
import sys

from research.experiment import CONFIGS, load_experiment, print_cells, run_experiment
from tfidf_tune._printing import prepare_output, say, visible
from tfidf_tune._signals import ENDING, ended_by, handle
from tfidf_tune.commands import whole_number


def main(arguments: list[str]) -> None:
    """Run an experiment, or list the shipped ones; ``arguments`` are those after
    the module's name.
    """
    parser = argparse.ArgumentParser(
        prog="python -m research.experiment",
        description="Train and evaluate models under objectives and seeds, and compare them. The "
        "command continues what was interrupted or failed.",
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", help="a file, or the name of one that --list shows")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="override keys of the file, as for a recipe",
    )
    parser.add_argument(
        "--list", action="store_true", help="show the experiments of the folder research/configs"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and show the state of the cells"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="redo cells that were made with other settings"
    )
    retry_help = "repeat a failed cell up to N times"
    jobs_help = "do N runs at once; default: 1, on a cluster all"
    parser.add_argument("--retry", type=whole_number(0), default=0, metavar="N", help=retry_help)
    parser.add_argument("--jobs", type=whole_number(1), metavar="N", help=jobs_help)
    parser.add_argument(
        "--launcher",
        choices=["local", "slurm"],
        help="where runs are done; default: the file's, local",
    )
    options = parser.parse_intermixed_args(arguments)
    prepare_output()
    if options.list or options.config is None:
        _list()
        return
    launcher = [] if options.launcher is None else [f"launcher.name={options.launcher}"]
    experiment = load_experiment(options.config, [*options.overrides, *launcher])
    if options.dry_run:
        print_cells(experiment)
        return
    # As Ctrl-C does, end all jobs.
    handle([number for number in ENDING if number != signal.SIGINT], _end)
    failures = run_experiment(
        experiment, overwrite=options.overwrite, retries=options.retry, jobs=options.jobs
    )
    if failures:
        listed = "\n".join(
            f"  {failure.title}: {failure.reason}; log: {failure.log}" for failure in failures
        )
        sys.exit(
            f"error: {len(failures)} of the cells failed; the same command tries them again:\n"
            f"{visible(listed)}"
        )


def _end(number: int, _: object) -> None:
    sys.exit(f"error: ended by {signal.Signals(number).name}; the same command continues from here")


def _list() -> None:
    say(
        "python -m research.experiment NAME runs one of these; a file of your own may build on one "
        "by `base:`."
    )
    for path in sorted(CONFIGS.glob("*.yaml")):
        purpose = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        say(f"  {path.stem:<24} {purpose}\n  {'':<24} {path}")


if __name__ == "__main__":
    with ended_by([signal.SIGINT], lambda name: None):
        try:
            main(sys.argv[1:])
        except (ValueError, OSError) as error:
            sys.exit(f"error: {visible(str(error))}")
