import pandas as pd

from tfidf_tune.report import Continuation, Example, Report, Table, markdown


def made(**parts):
    return markdown(Report("Title", **parts))


def table(data, **options):
    return made(tables=(Table("t", "T", pd.DataFrame(data), **options),))


def test_a_table_is_aligned_markdown():
    data = {"Model": ["CE", "TF-IDF"], "LMS": [8.301, None], "Passages": [100, 7]}
    assert table(data, notes=("A note.",), formats={"LMS": ".2f"}) == (
        "# Title\n\n"
        "## T\n\n"
        "| Model  |  LMS | Passages |\n"
        "| ------ | ---: | -------: |\n"
        "| CE     | 8.30 |      100 |\n"
        "| TF-IDF |    \N{EN DASH} |        7 |\n\n"
        "- A note.\n"
    )
    assert "| a\\|b   |\n| ------ |\n| x\\|y z |" in table({"a|b": ["x|y\nz"]})


def test_a_model_that_is_the_same_in_every_row_is_left_out():
    assert "| LMS |\n| --: |\n|   8 |\n|   2 |" in table({"Model": ["A", "A"], "LMS": [8, 2]})
    assert "| Model | LMS |" in table({"Model": ["A", "B"], "LMS": [8, 2]})
    assert "| Model | LMS |" in table({"Model": [], "LMS": []})
    assert "| Task | LMS |" in table({"Task": ["A", "A"], "LMS": [8, 2]})


def test_a_recited_span_stands_between_brackets_and_a_written_fence_does_not_end_the_example():
    pieces = (("so ", False), ("it goes", True))
    example = Example("E", "a\nprompt", "the truth", (Continuation("CE", "LMS 2", pieces),))
    assert made(examples=(example,), mark="what a model recites") == (
        "# Title\n\n## Examples\n\nBetween ⟦ and ⟧: what a model recites.\n\n"
        "### E\n\n```text\nPrompt\n    a prompt\n\nTruth\n    the truth\n\nCE (LMS 2)\n    so ⟦it goes⟧\n```\n"
    )
    example = Example("E", "p", "t", (Continuation("CE", "s", (("```` # no heading", False),)),))
    assert "\n`````text\n" in made(examples=(example,))


def test_provenance_is_a_table_and_an_empty_report_its_title():
    assert "| Baseline | CE    |" in made(provenance={"Baseline": "CE"})
    assert made() == "# Title\n"
