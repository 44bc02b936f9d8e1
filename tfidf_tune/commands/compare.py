"""``tfidf-tune compare``."""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from tfidf_tune._printing import say


def main(arguments: list[str]) -> None:
    """Compare evaluated runs: print and write the report."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune compare",
        description="Compare evaluated runs: the paper's tables, reductions with 95 % intervals, "
        "figures and examples, as text, CSV, JSON, PNG, SVG and one HTML page. The scores are "
        "written to results.jsonl.",
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        metavar="RUN",
        help=(
            "a run's folder, a folder with lm_eval's output (--log_samples), or one with many of "
            "either below it; OBJECTIVE=FOLDER (or MODEL:OBJECTIVE=FOLDER) names the objective by "
            "hand; or the results.jsonl of an earlier report"
        ),
    )
    add(
        "--output-dir",
        type=Path,
        default=Path("comparison"),
        metavar="DIR",
        help="folder of the report; an older report there is replaced; default: ./%(default)s",
    )
    add("--baseline", metavar="OBJECTIVE", help="default: CE, or the first run's objective")
    add("--title", help="of the report; default: made of the objectives")
    add("--verbose", action="store_true", help="print all tables, not only the first")
    options = parser.parse_args(arguments)
    from tfidf_tune.compare import comparison_report
    from tfidf_tune.report import require_report_folder, terminal_text, write_report
    from tfidf_tune.results import load_results, write_results

    folder = options.output_dir.expanduser()
    require_report_folder(folder)
    results = load_results(options.runs)
    report = comparison_report(results, baseline=options.baseline)
    if options.title is not None:
        report = dataclasses.replace(report, title=options.title)
    write_report(report, folder, more={"results.jsonl": partial(write_results, results)})
    say(f"The page: {folder / 'index.html'}\n")
    say(terminal_text(report, verbose=options.verbose).rstrip("\n"))
