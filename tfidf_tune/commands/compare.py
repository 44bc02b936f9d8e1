"""``tfidf-tune compare``."""

import argparse
import dataclasses
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Compare evaluated runs: print the findings and tables, write the report.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune compare``.
    """
    parser = argparse.ArgumentParser(
        prog="tfidf-tune compare",
        description="Put evaluated runs side by side: the paper's tables, reductions with 95 % intervals, figures and "
        "examples, as text, CSV, JSON, PNG, SVG and one HTML page.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, a folder with lm_eval's output (--log_samples), or one with many of either below it; "
        "OBJECTIVE=FOLDER (or MODEL:OBJECTIVE=FOLDER) names the objective by hand",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("comparison"),
        metavar="DIR",
        help="where the report goes; an older report there is replaced; default: ./%(default)s",
    )
    parser.add_argument("--baseline", metavar="OBJECTIVE", help="default: CE, or the first run's objective")
    parser.add_argument("--title", help="of the report; default: made of the objectives")
    options = parser.parse_args(arguments)
    from tfidf_tune.analysis import read_runs
    from tfidf_tune.report import comparison_report, markdown, require_report_folder, write_report

    folder = options.output_dir.expanduser()
    require_report_folder(folder)
    report = comparison_report(read_runs(options.runs), baseline=options.baseline)
    if options.title is not None:
        report = dataclasses.replace(report, title=options.title)
    write_report(report, folder)
    print(markdown(report))
    print(f"Report: {folder / 'index.html'}")
