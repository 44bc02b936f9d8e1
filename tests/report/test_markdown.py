import dataclasses

from matplotlib.figure import Figure as Drawing

from tfidf_tune.report import Column, Continuation, Example, Figure, Report, Table, markdown

EMPTY = Report("Title", (), (), (), (), ())


def made(**parts):
    return markdown(dataclasses.replace(EMPTY, **parts))


def test_a_table_is_aligned_markdown():
    columns = (Column("Model"), Column("LMS", ".2f", "lower"), Column("Passages"))
    table = Table("lms", "How much", columns, (("CE", 8.301, 100), ("TF-IDF", None, 7)), ("A note.",))
    assert made(tables=(table,)) == (
        "# Title\n\n"
        "## How much\n\n"
        "| Model  |  LMS | Passages |\n"
        "| ------ | ---: | -------: |\n"
        "| CE     | 8.30 |      100 |\n"
        "| TF-IDF |    \N{EN DASH} |        7 |\n\n"
        "- A note.\n"
    )


def test_a_model_that_is_the_same_in_every_row_is_left_out():
    columns = (Column("Model"), Column("LMS"))
    assert "| LMS |\n| --: |\n|   8 |\n|   2 |" in made(tables=(Table("t", "T", columns, (("A", 8), ("A", 2))),))
    assert "| Model | LMS |" in made(tables=(Table("t", "T", columns, (("A", 8), ("B", 2))),))
    assert "| Model | LMS |" in made(tables=(Table("t", "T", columns, ()),))
    assert "| Task | LMS |" in made(tables=(Table("t", "T", (Column("Task"), Column("LMS")), (("A", 8), ("A", 2))),))


def test_the_lead_stands_between_title_and_statements():
    assert made(lead="Shown. " * 20, statements=("Said.",)).startswith("# Title\n\nShown. Shown.")
    assert max(map(len, made(lead="Shown. " * 20).splitlines())) <= 100
    assert made(lead="Shown.", statements=("Said.",)) == "# Title\n\nShown.\n\n- Said.\n"


def test_a_bar_or_a_line_end_does_not_break_a_table():
    table = Table("t", "T", (Column("a|b"),), (("x|y\nz",),))
    assert "| a\\|b   |\n| ------ |\n| x\\|y z |" in made(tables=(table,))


def test_statements_are_a_list_that_fits_a_terminal():
    text = made(statements=("TF-IDF " * 40 + "end.", "Second."))
    lines = text.splitlines()
    assert lines[2].startswith("- TF-IDF")
    assert lines[3].startswith("  TF-IDF")
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "- Second."


def test_a_figure_is_a_link_to_its_file():
    assert "## Name\n\n![Name](figures/file.png)\n\nCaption." in made(
        figures=(Figure("file", "Name", Drawing(), "Caption."),)
    )


def test_the_recited_span_stands_between_brackets():
    example = Example(
        "E", "a\nprompt", "the truth", (Continuation("CE", "LMS 2", (("so ", False), ("it goes", True))),)
    )
    assert made(examples=(example,)) == (
        "# Title\n\n## Examples\n\nWhat a model recites stands between ⟦ and ⟧.\n\n"
        "### E\n\n```text\nPrompt\n    a prompt\n\nTruth\n    the truth\n\nCE (LMS 2)\n    so ⟦it goes⟧\n```\n"
    )


def test_a_model_that_writes_a_fence_does_not_end_the_example():
    example = Example("E", "p", "t", (Continuation("CE", "s", (("```` # no heading", False),)),))
    assert "\n`````text\n" in made(examples=(example,))


def test_names_and_numbers_with_a_percent_sign_stay_on_one_line():
    text = made(statements=(*("x" * length + " TF-IDF" * 20 for length in range(1, 9)), "12 % " * 60))
    assert "TF-\n" not in text
    assert (text.count("TF-IDF"), text.count("12 %")) == (160, 60)


def test_provenance_is_a_table_and_an_empty_report_its_title():
    assert "| Baseline | CE    |" in made(provenance=(("Baseline", "CE"),))
    assert markdown(EMPTY) == "# Title\n"
