"""``tfidf-tune compare``."""

import argparse
import dataclasses
from pathlib import Path

from tfidf_tune._printing import say


def main(arguments: list[str]) -> None:
    """Compare evaluated runs, or trace their frontier over learning rates: print and write the report.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune compare``.
    """
    parser = argparse.ArgumentParser(
        prog="tfidf-tune compare",
        description="Compare evaluated runs: the paper's tables, reductions with 95 % intervals, figures and examples, "
        "as text, CSV, JSON, PNG, SVG and one HTML page. With --frontier: recitation against perplexity through "
        "learning rates, with intervals over seeds. The scores are written to results.jsonl.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, a folder with lm_eval's output (--log_samples), or one with many of either below it; "
        "OBJECTIVE=FOLDER (or MODEL:OBJECTIVE=FOLDER) names the objective by hand; or the results.jsonl of an earlier "
        "report",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder of the report; an older report there is replaced; default: ./comparison, ./frontier",
    )
    parser.add_argument("--baseline", metavar="OBJECTIVE", help="default: CE, or the first run's objective")
    parser.add_argument("--title", help="of the report; default: made of the objectives")
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="each objective through its learning rates, its operating point, and differences there paired by seed",
    )
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="OBJECTIVE",
        help="with --frontier: compare with this objective as well as the baseline; may be given several times",
    )
    parser.add_argument(
        "--paper",
        action="store_true",
        help="add a table with the values that the paper reports for the same models, objectives and measures",
    )
    options = parser.parse_args(arguments)
    if options.reference and not options.frontier:
        parser.error("--reference is for --frontier; without it, --baseline names what is compared with")
    if options.paper and options.frontier:
        parser.error("--paper is for comparisons without --frontier: the paper has one learning rate for each model")
    from tfidf_tune.results import load_results, require_runs

    require_runs(options.runs)  # before pandas is imported
    from tfidf_tune.report import comparison_report, frontier_report, require_report_folder, terminal_text, write_report

    folder = (options.output_dir or Path("frontier" if options.frontier else "comparison")).expanduser()
    require_report_folder(folder)
    results = load_results(options.runs)
    if options.frontier:
        report = frontier_report(results, baseline=options.baseline, references=options.reference)
    else:
        report = comparison_report(results, baseline=options.baseline, paper=options.paper)
    if options.title is not None:
        report = dataclasses.replace(report, title=options.title)
    write_report(report, folder, results=results)
    say(terminal_text(report))
    say(f"Report: {folder / 'index.html'}")
