import math

import lxml.html
import pandas as pd
import pytest
from helpers.fakes.rich_report import rich_report

from tfidf_tune.report import Continuation, Example, Report, Table, html_page
from tfidf_tune.report._markdown import markdown


def page(report):
    return lxml.html.document_fromstring(html_page(report))


@pytest.fixture(scope="module")
def html():
    return html_page(rich_report())


@pytest.fixture(scope="module")
def document(html):
    return lxml.html.document_fromstring(html)


def table_of(data, **options):
    """The only table of a page."""
    table = Table("t", "T", pd.DataFrame(data, dtype=object), **options)
    (found,) = page(Report("Title", tables=(table,))).xpath("//table")
    return found


def cells(table):
    return [row.xpath("td|th") for row in table.xpath(".//tbody/tr")]


def bold(table):
    return [["best" in cell.get("class").split() for cell in row] for row in cells(table)]


def test_the_page_has_language_encoding_ordered_headings_and_anchors(html, document):
    assert html.startswith("<!DOCTYPE html>")
    assert document.get("lang") == "en"
    assert document.xpath("//meta/@charset") == ["utf-8"]
    assert document.xpath("//meta[@name='viewport']/@content") == [
        "width=device-width, initial-scale=1"
    ]
    assert (
        document.xpath("string(//title)") == document.xpath("string(//h1)") == rich_report().title
    )
    headings = [heading.text_content() for heading in document.xpath("//h2")]
    assert headings == [
        "Memorization of injected passages",
        *(figure.title for figure in rich_report().figures),
        "Tables",
        "Examples",
        "Footnotes",
        "Provenance",
    ]
    levels = [int(heading.tag[1]) for heading in document.xpath("//h1|//h2|//h3|//h4")]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    ids = document.xpath("//@id")
    anchors = [link[1:] for link in document.xpath("//a/@href") if link.startswith("#")]
    assert len(ids) == len(set(ids))
    assert set(anchors) <= set(ids)
    assert set(document.xpath("//@aria-labelledby")) <= set(ids)
    outside = document.xpath("//main//h2[not(ancestor::details)]/@id")
    assert outside == ["table-memorization", "figure-lms_progress", "figure-frontier"]
    _, verdict = document.xpath("//header/*")
    assert verdict.text_content() == rich_report().verdict
    assert [len(document.xpath(f"//details//{tag}")) for tag in ("table", "article", "dl")] == [
        2,
        2,
        1,
    ]
    assert verdict.xpath(".//sup/a/@href") == ["#footnote-1", "#footnote-2"]
    footnotes = [(one.get("id"), one.text_content()) for one in document.xpath("//section/ol/li")]
    assert footnotes == [("footnote-1", "Few passages."), ("footnote-2", "A single seed.")]


def test_a_continuation_is_shown_to_the_letter_with_its_recited_span_marked():
    pieces = ((" as\n\n  it", False), (" was <b> & said", True), ("\tonce.", False))
    document = page(
        Report("Title", examples=(Example("e", "p", "t", (Continuation("CE", "LMS 3", pieces),)),))
    )
    (text,) = document.xpath("//article//p[mark]")
    assert [aside.text for aside in text.xpath(".//span")] == ["[recited: ", "]"]
    for aside in text.xpath(".//span"):
        aside.drop_tree()
    assert text.text_content() == " as\n\n  it was <b> & said\tonce."
    assert text.xpath("string(mark)") == " was <b> & said"


def test_line_ends_that_would_fill_a_page_are_shown_as_signs_and_a_match_of_them_is_named():
    pieces = (("so\n\n", False), ("\n \n\n" * 40, True))
    example = Example("e", "p", "t", (Continuation("CE", "LMS 120", pieces),))
    document = page(Report("Title", examples=(example,)))
    (text,) = document.xpath("//article//p[mark]")
    assert text.xpath("string(mark)") == f"[recited, only white space: {'⏎' * 120}\n]"
    assert text.text_content().startswith("so\n\n[")
    assert f"⟦{'⏎' * 120}" in markdown(Report("Title", examples=(example,)))


def test_numbers_are_shown_in_the_format_of_their_column_and_sorted_with_full_precision():
    data = {
        "a": ["x", "y"],
        "b": [1 / 3, None],
        "c": [2, math.nan],
        "d": [1234.0, 7],
        "e": [math.inf, 1.0],
    }
    table = table_of({**data, "f": [1, "2 of 3"]}, formats={"b": ".2f", "c": "+.1f", "e": ".2f"})
    first, second = cells(table)
    assert [cell.text_content() for cell in first] == ["x", "0.33", "+2.0", "1234", "inf", "1"]
    assert [cell.get("data-value") for cell in first] == [
        None,
        repr(1 / 3),
        "2",
        "1234",
        "Infinity",
        "1",
    ]
    assert [cell.text_content() for cell in second] == [
        "y",
        "\N{EN DASH}",
        "\N{EN DASH}",
        "7",
        "1.00",
        "2 of 3",
    ]
    assert ["missing" in cell.get("class").split() for cell in second] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert ["number" in cell.get("class").split() for cell in second] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]


def test_the_best_of_each_group_is_bold_and_headers_name_the_better_end():
    data = {
        "Model": ["A", "A", "A", "B", "B"],
        "LMS": [2.04, 1.96, 2.1, 9.0, 8.0],
        "F1": [5, 7, 7, 1, None],
    }
    better = {"LMS": "lower", "F1": "higher"}
    formats = {"LMS": ".1f"}
    table = table_of({**data, "Control": [1.0, 0.0, 0.0, 0.0, 0.0]}, better=better, formats=formats)
    assert [row[1:] for row in bold(table)] == [  # what looks equal is equally best
        [True, False, False],
        [True, True, False],
        [False, True, False],
        [False, False, False],
        [True, False, False],
    ]
    assert [header.text_content() for header in table.xpath(".//thead//th")] == [
        "Model",
        "LMS\N{NO-BREAK SPACE}↓, lower is better",
        "F1\N{NO-BREAK SPACE}↑, higher is better",
        "Control",
    ]
