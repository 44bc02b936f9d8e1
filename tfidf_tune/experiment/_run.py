"""Run an experiment from its file to its report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tfidf_tune._printing import say
from tfidf_tune.experiment._cells import DONE, REPORT, Run
from tfidf_tune.experiment._expand import expand
from tfidf_tune.experiment._launcher import Failure, only_command, run_jobs
from tfidf_tune.experiment._schema import Experiment

if TYPE_CHECKING:
    from tfidf_tune.report import Report
    from tfidf_tune.results import Results


def run_experiment(
    experiment: Experiment, *, overwrite: bool = False, retries: int = 0, jobs: int | None = None
) -> list[Failure]:
    """Do the cells of an experiment that are not done, and write and print the comparison.

    Args:
        experiment (Experiment): the experiment.
        overwrite (bool): discard and repeat cells that were made with different settings. Default: False, refuse.
        retries (int): how often a failed cell is repeated immediately. Default: 0.
        jobs (int | None): how many runs, each a training and its evaluations, are done at the same time. Above 1 their
            output is only in their logs, and on this machine they share CPUs (by OMP_NUM_THREADS, unless that is set)
            and GPUs. Default: None, 1 on this machine, all runs on a cluster.

    Returns:
        list[Failure]: the cells that failed.

    Raises:
        ValueError: If the experiment is invalid, cells were made with different settings, or ``jobs`` is below 1.
        OSError: If the folder is in use, cannot be written, or has other files where a run would be.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}, it has to be at least 1")
    runs = expand(experiment)
    out = Path(experiment.output_dir)
    try:
        with only_command(out) as jobs_lock:
            for run in runs:
                run.check_folder()
            if problems := [line for run in runs for line in run.all_changes()]:
                if not overwrite:
                    raise ValueError(_changed(problems))
                for run in runs:
                    run.discard_changed()
            say(f"All files are in {out}.")
            failures = run_jobs(runs, out, jobs_lock, experiment.launcher, retries=retries, jobs=jobs)
            _report(runs, experiment, out / REPORT)
    except KeyboardInterrupt:
        say("\ninterrupted; the same command continues from here")
        raise
    return failures


def print_cells(experiment: Experiment) -> None:
    """Check an experiment, see :func:`run_experiment`, and print the state of its cells; nothing is written."""
    runs = expand(experiment)
    lines = [(run.cell_title(cell), run.state(cell)) for run in runs for cell in run.cells]
    width = max(len(title) for title, _ in lines)
    say("\n".join(f"{title:<{width}}  {state}" for title, state in lines))
    done = sum(state == DONE for _, state in lines)
    say(f"\n{done} of {len(lines)} cells are done in {experiment.output_dir}.")
    if problems := [line for run in runs for line in run.all_changes()]:
        say(f"\n{_changed(problems)}")


def _changed(problems: Sequence[str]) -> str:
    listed = "\n".join(f"  {problem}" for problem in problems)
    return (
        f"some cells were made with different settings:\n{listed}\n"
        "choose another output_dir, or restore the settings; --overwrite discards these cells and repeats them"
    )


def _report(runs: Sequence[Run], experiment: Experiment, folder: Path) -> None:
    """Write and print the report of the evaluated runs: a frontier if there are learning rates, else a comparison."""
    evaluated = [run.folder for run in runs if any(run.manifests(percent) for percent in run.evaluations)]
    if not evaluated:
        say("\nNothing was evaluated, so there is no report.")
        return
    from tfidf_tune.report import terminal_text
    from tfidf_tune.results import import_results

    try:
        report = _write_report(import_results(evaluated), experiment, folder)
    except ValueError as error:  # a single run, for example; its cells are done
        say(f"\nThere is no comparison: {error}")
        return
    # A terminal shows no figures; one example is enough there.
    shown = replace(report, figures=(), examples=report.examples[:1], provenance={})
    say(f"\n{terminal_text(shown)}\nThe complete report, with figures: {folder / 'index.html'}")


def _write_report(results: "Results", experiment: Experiment, folder: Path) -> "Report":
    from tfidf_tune.report import comparison_report, frontier_report, write_report

    if experiment.learning_rates is None:
        report = comparison_report(results)
    else:
        done = {one.objective for one in results.checkpoints}
        report = frontier_report(results, references=[name for name in experiment.references if name in done])
    write_report(report, folder, results=results)
    return report
