"""The paper's values next to those of runs."""

from collections.abc import Mapping, Sequence

from tfidf_tune.report._document import Table, tabulate
from tfidf_tune.report._wording import joined
from tfidf_tune.results import paper_results

_TABLES = ("memorization", "perplexity", "summarization", "qa")  # the paper's tables 1 to 4


def paper_table(tables: Sequence[Table], models: Mapping[str, str]) -> Table:
    """Show the paper's values next to those of runs of the same model, objective and measure.

    Args:
        tables (Sequence[Table]): of :func:`comparison_tables`.
        models (Mapping[str, str]): setting, as in the tables -> model.

    Raises:
        ValueError: If the paper has no value of any of the runs.
    """
    import pandas as pd

    measured = [
        table.frame.melt(["Model", "Objective"], var_name="measure", value_name="run").assign(table=number)
        for number, name in enumerate(_TABLES, start=1)
        for table in tables
        if table.name == name
    ]
    paper, keys = paper_results(), ["table", "model", "objective", "measure"]
    runs = pd.concat([pd.DataFrame(columns=["Model", "Objective", "measure", "run", "table"]), *measured])
    runs = runs.assign(model=runs["Model"].map(models), objective=runs["Objective"], run=runs["run"].astype(float))
    frame = runs.merge(paper, on=keys).dropna(subset="run")
    if frame.empty:
        raise ValueError(
            f"the paper has no values for these runs ({joined(models.values())}): its models are "
            f"{joined(paper['model'])}, its objectives {joined(paper['objective'])}. Name runs of one as "
            "MODEL:OBJECTIVE=FOLDER, or leave out --paper"
        )
    columns = (
        *(("Model", "Model", ""), ("Objective", "Objective", ""), ("Measure", "measure", "")),
        *(("Paper's table", "table", ""), ("Paper", "value", ".2f"), ("Run", "run", ".2f")),
    )
    note = (
        "Paper: the value that the paper reports, without an interval, since it gives none; its runs used other "
        "passages, seeds and software. Run: from the tables above. Tables of the paper are counted without its "
        "qualitative example."
    )
    return tabulate("paper", "The paper's values and these runs", frame, columns, [note])
