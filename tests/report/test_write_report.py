import csv
import json
import math

import pytest
from matplotlib.figure import Figure as Drawing

from tfidf_tune.report import (
    Column,
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


TABLE = Table(
    "lms",
    "LMS, by objective",
    (Column("Objective"), Column("LMS", ".2f", "lower"), Column("Max")),
    (("CE, plain", 1 / 3, 128), ("Ünï", None, 0), ("diverged", math.inf, 1), ("nobody", math.nan, 2)),
    ("A note.",),
)
EXAMPLE = Example("E", "p", "t", (Continuation("CE", "LMS 1", (("a", True), (" b", False))),))
REPORT = Report(
    "Ünï & co", ("Said.",), (TABLE,), (Figure("one", "One", drawing(), "C."),), (EXAMPLE,), (("k", "v"),), "Lead."
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "deep" / "report"
    write_report(REPORT, folder)
    return folder


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_form_is_written_and_nothing_else(written):
    assert files(written) == [
        "figures/one.png",
        "figures/one.svg",
        "index.html",
        "report.json",
        "report.md",
        "tables/lms.csv",
    ]
    assert (written / "report.md").read_text(encoding="utf-8") == markdown(REPORT)
    assert (written / "index.html").read_text(encoding="utf-8") == html_page(REPORT)
    assert (written / "figures/one.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (written / "figures/one.svg").read_text(encoding="utf-8")


def test_csv_has_full_precision_and_empty_cells_for_what_is_missing(written):
    with (written / "tables/lms.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["Objective", "LMS", "Max"]
    assert float(rows[1][1]) == 1 / 3
    assert rows[1:] == [
        ["CE, plain", repr(1 / 3), "128"],
        ["Ünï", "", "0"],
        ["diverged", "", "1"],
        ["nobody", "", "2"],
    ]


def test_json_is_plain_and_has_full_precision(written):
    def refuse(constant):
        raise AssertionError(constant)

    content = json.loads((written / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    (table,) = content["tables"]
    assert table["rows"] == [["CE, plain", 1 / 3, 128], ["Ünï", None, 0], ["diverged", None, 1], ["nobody", None, 2]]
    assert table["columns"][1] == {"name": "LMS", "better": "lower"}
    assert (content["title"], content["statements"], table["notes"]) == ("Ünï & co", ["Said."], ["A note."])
    assert content["lead"] == "Lead."
    assert content["examples"][0]["continuations"][0]["pieces"][0] == {"text": "a", "recited": True}
    assert content["provenance"] == {"k": "v"}
    assert content["figures"] == [{"name": "one", "title": "One", "caption": "C."}]


def test_the_same_report_makes_the_same_files(written, tmp_path):
    write_report(REPORT, tmp_path / "again")
    for name in files(written):
        assert (tmp_path / "again" / name).read_bytes() == (written / name).read_bytes(), name


def test_an_older_report_is_replaced_and_other_files_stay(tmp_path):
    folder = tmp_path / "report"
    write_report(REPORT, folder)
    for name in ("notes.txt", "tables/mine.csv"):
        (folder / name).write_text("mine")
    newer = Report("New", (), (Table("other", "O", (Column("A"),), (("x",),)),), (), (), ())
    write_report(newer, folder)
    assert files(folder) == [
        "index.html",
        "notes.txt",
        "report.json",
        "report.md",
        "tables/mine.csv",
        "tables/other.csv",
    ]
    assert "New" in (folder / "report.md").read_text()


def test_a_report_that_lists_files_elsewhere_harms_none(tmp_path):
    (tmp_path / "precious.csv").write_text("x")
    folder = tmp_path / "report"
    folder.mkdir()
    listed = {"files": ["../precious.csv", str(tmp_path / "precious.csv")]}
    (folder / "report.json").write_text(json.dumps(listed))
    write_report(REPORT, folder)
    assert (tmp_path / "precious.csv").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"title": "x"}', '{"files": 3}'])
def test_a_report_that_was_cut_off_is_replaced(tmp_path, content):
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.json").write_text(content)
    write_report(REPORT, folder)
    assert "index.html" in files(folder)


def test_a_folder_with_other_files_and_a_file_are_refused(tmp_path):
    (tmp_path / "index.html").write_text("a page of mine")
    with pytest.raises(ValueError, match=r"has files but no report \(report.json\)"):
        write_report(REPORT, tmp_path)
    assert files(tmp_path) == ["index.html"]
    with pytest.raises(ValueError, match="is a file"):
        write_report(REPORT, tmp_path / "index.html")
