"""The values of the paper, and a table of them beside the values of runs."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd

from tfidf_tune._printing import say
from tfidf_tune.compare import comparison_report
from tfidf_tune.report import Report, Table, terminal_text, write_report
from tfidf_tune.report.document import joined, tabulate
from tfidf_tune.results import Results, load_results, write_results

_TABLES = ("memorization", "perplexity", "summarization", "qa")  # 1 to 4


def paper_results() -> pd.DataFrame:
    """Return Tables 1 to 4 of the paper: memorization, perplexity, summarization and question
    answering.

    From "Rebalancing Token Importance in Language Models with TF-IDF Weighted Cross-Entropy Loss".
    The paper gives no intervals for these values. Its table with a qualitative example is not
    counted.

    Returns:
        pandas.DataFrame: a row for each value, with the columns "table" (1 to 4), "model" (as in
            the experiments of this package: "Pythia 1.4B (QLoRA)"), "objective" ("CE" or "TF-IDF"),
            "measure" (the column in the tables of a comparison: "Avg LMS") and "value" (in tokens,
            in percent, or a perplexity).
    """
    return pd.read_csv(Path(__file__).with_name("paper.csv"))


def paper_table(tables: Sequence[Table], models: Mapping[str, str]) -> Table:
    """Show the paper's values next to those of runs of the same model (setting -> model), objective
    and measure.

    Raises:
        ValueError: If the paper has no value of any of the runs.
    """
    who = ["Model", "Objective"]
    measured = []
    for table in tables:
        if table.name in _TABLES:
            own = table.frame.melt(who, var_name="measure", value_name="run")
            measured.append(own.assign(table=1 + _TABLES.index(table.name)))
    runs = (
        pd.concat(measured) if measured else pd.DataFrame(columns=[*who, "measure", "run", "table"])
    )
    paper = paper_results()
    runs = runs.assign(
        model=runs["Model"].map(models), objective=runs["Objective"], run=runs["run"].astype(float)
    )
    frame = runs.merge(paper, on=["table", "model", "objective", "measure"]).dropna(subset="run")
    if frame.empty:
        raise ValueError(
            f"the paper has no values for these runs; name runs of {joined(paper['model'])} under "
            f"{joined(paper['objective'])} as MODEL:OBJECTIVE=FOLDER"
        )
    columns = (
        ("Model", "Model", ""),
        ("Objective", "Objective", ""),
        ("Measure", "measure", ""),
        ("Paper's table", "table", ""),
        ("Paper", "value", ".2f"),
        ("Run", "run", ".2f"),
    )
    note = (
        "Paper: the value that the paper reports, without an interval, since it gives none; its "
        "runs used other passages, seeds and software. Run: from the tables above. Tables of the "
        "paper are counted without its qualitative example."
    )
    return tabulate("paper", "The paper's values and these runs", frame, columns, [note])


def paper_report(results: Results) -> Report:
    """Compare runs, with the paper's values beside theirs."""
    report = comparison_report(results)
    beside = paper_table(report.tables, {one.setting: one.model for one in results.checkpoints})
    return replace(report, tables=[*report.tables, beside])


def main(arguments: Sequence[str]) -> None:
    """Compare evaluated runs, with a table of the paper's values of the same models, objectives and
    measures.
    """
    parser = argparse.ArgumentParser(prog="python -m research.paper", description=main.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="as for `tfidf-tune compare`")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("comparison"), help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    results = load_results(options.runs)
    report = paper_report(results)
    write_report(
        report, options.output_dir, more={"results.jsonl": partial(write_results, results)}
    )
    say(f"{terminal_text(report)}\nReport: {options.output_dir / 'index.html'}")


if __name__ == "__main__":
    main(sys.argv[1:])
