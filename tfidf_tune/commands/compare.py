"""``tfidf-tune compare``."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from tfidf_tune._printing import say, visible


def main(arguments: list[str]) -> None:
    """Compare evaluated runs, or trace their frontier over learning rates: print and write the report.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune compare``.
    """
    parser = argparse.ArgumentParser(
        prog="tfidf-tune compare",
        description="Put evaluated runs side by side: the paper's tables, reductions with 95 % intervals, figures and "
        "examples, as text, CSV, JSON, PNG, SVG and one HTML page. With --frontier: recitation against perplexity "
        "through learning rates, with intervals over seeds.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, a folder with lm_eval's output (--log_samples), or one with many of either below it; "
        "OBJECTIVE=FOLDER (or MODEL:OBJECTIVE=FOLDER) names the objective by hand; with --frontier also a runs.jsonl "
        "that an earlier one wrote",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="where the report goes; an older report there is replaced; default: ./comparison, ./frontier",
    )
    parser.add_argument("--baseline", metavar="OBJECTIVE", help="default: CE, or the first run's objective")
    parser.add_argument("--title", help="of the report; default: made of the objectives")
    parser.add_argument(
        "--frontier",
        action="store_true",
        help="each objective through its learning rates, its operating point, and differences there paired by seed; "
        "writes runs.jsonl too, from which all of it can be made again",
    )
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="OBJECTIVE",
        help="with --frontier: compare with this objective too, beside the baseline; may be given several times",
    )
    options = parser.parse_args(arguments)
    if options.reference and not options.frontier:
        parser.error("--reference is for --frontier; without it, --baseline names what is compared with")
    files = [path for path in options.runs if Path(path).expanduser().is_file()]
    if files and not options.frontier:
        parser.error(f"{visible(files[0])} is a file: give folders, or add --frontier to make the frontier of its runs")
    from tfidf_tune.analysis import load_records, read_runs, write_records
    from tfidf_tune.report import (
        RECORDS_FILE,
        comparison_report,
        frontier_report,
        require_report_folder,
        terminal_text,
        write_report,
    )

    folder = (options.output_dir or Path("frontier" if options.frontier else "comparison")).expanduser()
    require_report_folder(folder)
    more: dict[str, Callable[[Path], object]] = {}
    if options.frontier:
        records, provenance = load_records(options.runs)
        more[RECORDS_FILE] = lambda path: write_records(records, path, provenance)
        report = frontier_report(
            records, baseline=options.baseline, references=options.reference, provenance=provenance
        )
    else:
        report = comparison_report(read_runs(options.runs), baseline=options.baseline)
    if options.title is not None:
        report = dataclasses.replace(report, title=options.title)
    write_report(report, folder, more)
    say(terminal_text(report))
    say(f"Report: {folder / 'index.html'}")
