import json
import math

import pandas as pd
import pytest
from matplotlib.figure import Figure as Drawing

from tfidf_tune.report import (
    Continuation,
    Example,
    Figure,
    Report,
    Table,
    html_page,
    markdown,
    write_report,
)


def drawing():
    figure = Drawing(figsize=(2, 1))
    figure.add_subplot().plot([1, 2])
    return figure


FRAME = pd.DataFrame(
    {
        "Objective": ["CE, plain", "Ünï", "diverged"],
        "LMS": [1 / 3, math.nan, math.inf],
        "Max": [128.0, 0.0, math.nan],
    }
)
TABLE = Table("lms", "LMS, by objective", FRAME, ("A note.",), {"LMS": ".2f"}, {"LMS": "lower"})
EXAMPLE = Example("E", "p", "t", (Continuation("CE", "LMS 1", (("a", True), (" b", False))),))
REPORT = Report(
    "Ünï & co",
    "Said.",
    (TABLE,),
    (Figure("one", "One", drawing(), "C."),),
    (EXAMPLE,),
    provenance={"k": "v"},
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "deep" / "report"
    write_report(REPORT, folder)
    return folder


def files(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_every_form_is_written_and_nothing_else(written):
    expected = "figures/one.png figures/one.svg index.html report.json report.md tables/lms.csv"
    assert files(written) == expected.split()
    assert (written / "report.md").read_text(encoding="utf-8") == markdown(REPORT)
    assert (written / "index.html").read_text(encoding="utf-8") == html_page(REPORT)
    assert (written / "figures/one.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (written / "figures/one.svg").read_text(encoding="utf-8")


def test_only_text_that_a_spreadsheet_would_take_for_a_formula_is_changed():
    for text, cell in (
        ("-1", "'-1"),
        ("a-1", "a-1"),
        ("@x", "'@x"),
        ("'q", "'q"),
        ("=1", "'=1"),
        ("\t=1", "'\t=1"),
    ):
        frame = pd.DataFrame({text: [text], "Change": [-1.5]})
        assert (
            Table("t", "T", frame, formats={"Change": "+.1f"}).csv()
            == f"{cell},Change\r\n{cell},-1.5\r\n"
        )


def test_json_is_plain_and_has_full_precision(written):
    def refuse(constant):
        raise AssertionError(constant)

    text = (written / "report.json").read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=refuse)
    assert "Ünï" in text
    (table,) = content["tables"]
    assert table["rows"] == [["CE, plain", 1 / 3, 128], ["Ünï", None, 0], ["diverged", None, None]]
    assert table["columns"][1] == {"name": "LMS", "better": "lower"}
    assert (content["title"], content["verdict"], table["notes"]) == (
        "Ünï & co",
        "Said.",
        ["A note."],
    )
    assert content["examples"][0]["continuations"][0]["pieces"][0] == {"text": "a", "recited": True}
    assert content["provenance"] == {"k": "v"}
    assert content["figures"] == [{"name": "one", "title": "One", "caption": "C."}]


def test_an_older_report_is_replaced_and_other_files_stay(tmp_path):
    folder = tmp_path / "report"
    write_report(REPORT, folder)
    for name in ("notes.txt", "tables/mine.csv"):
        (folder / name).write_text("mine")
    newer = Report("New", tables=(Table("other", "O", pd.DataFrame({"A": ["x"]})),))
    write_report(newer, folder)
    expected = "index.html notes.txt report.json report.md tables/mine.csv tables/other.csv"
    assert files(folder) == expected.split()
    assert "New" in (folder / "report.md").read_text()


@pytest.mark.parametrize("content", ["", "[]", '{"files": ["../precious.csv"]}'])
def test_a_damaged_report_is_replaced_without_harm_to_files_elsewhere(tmp_path, content):
    (tmp_path / "precious.csv").write_text("x")
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.json").write_text(content)
    write_report(Report("New"), folder)
    assert "index.html" in files(folder)
    assert (tmp_path / "precious.csv").exists()


def test_a_folder_with_other_files_and_a_file_are_refused(tmp_path):
    (tmp_path / "index.html").write_text("a page of mine")
    with pytest.raises(ValueError, match=r"has files but no report \(report.json\)"):
        write_report(REPORT, tmp_path)
    assert files(tmp_path) == ["index.html"]
    with pytest.raises(ValueError, match="is a file"):
        write_report(REPORT, tmp_path / "index.html")


# ---- Markdown


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
        "### E\n\n```text\nPrompt\n    a prompt\n\nTruth\n    the truth\n\nCE (LMS 2)\n    so ⟦it "
        "goes⟧\n```\n"
    )
    example = Example("E", "p", "t", (Continuation("CE", "s", (("```` # no heading", False),)),))
    assert "\n`````text\n" in made(examples=(example,))
