import base64
import dataclasses
import hashlib
import math
import re

import lxml.html
import matplotlib.figure
import pytest
from rich_report import HOSTILE, rich_report

from tfidf_tune.report import Column, Continuation, Example, Figure, Report, Table, html_page
from tfidf_tune.report._document import csv_text

EMPTY = Report(title="Nothing", statements=(), tables=(), figures=(), examples=(), provenance=())


@pytest.fixture(scope="module")
def html() -> str:
    return html_page(rich_report())


@pytest.fixture(scope="module")
def document(html: str) -> lxml.html.HtmlElement:
    return lxml.html.document_fromstring(html)


def table_of(table: Table) -> lxml.html.HtmlElement:
    """The only table of a page."""
    (found,) = lxml.html.document_fromstring(html_page(dataclasses.replace(EMPTY, tables=(table,)))).xpath("//table")
    return found


def cells(table: Table) -> list[list[lxml.html.HtmlElement]]:
    return [row.xpath("td|th") for row in table_of(table).xpath(".//tbody/tr")]


def bold(table: Table) -> list[list[bool]]:
    return [["best" in cell.get("class").split() for cell in row] for row in cells(table)]


def test_the_page_has_language_encoding_ordered_headings_and_anchors(html, document):
    assert html.startswith("<!DOCTYPE html>")
    assert document.get("lang") == "en"
    assert document.xpath("//meta/@charset") == ["utf-8"]
    assert document.xpath("//meta[@name='viewport']/@content") == ["width=device-width, initial-scale=1"]
    assert document.xpath("string(//title)") == rich_report().title
    headings = [heading.text_content() for heading in document.xpath("//h2")]
    assert headings == ["Findings", "Contents", "Tables", "Figures", "Examples", "Provenance"]
    levels = [int(heading.tag[1]) for heading in document.xpath("//h1|//h2|//h3|//h4")]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    ids = document.xpath("//@id")
    anchors = [link[1:] for link in document.xpath("//a/@href") if link.startswith("#")]
    assert len(ids) == len(set(ids))
    assert set(anchors) == set(ids) - {"contents"}
    assert set(document.xpath("//@aria-labelledby")) <= set(ids)


def test_nothing_is_asked_for_from_anywhere(html, document):
    addresses = document.xpath("//@src|//@href|//@srcset|//@action|//@data|//@poster")
    allowed = re.compile(r"#[\w-]+|data:,|data:(image/svg\+xml|text/csv;charset=utf-8);base64,[\w+/=]+")

    assert addresses
    assert [address for address in addresses if not allowed.fullmatch(address)] == []
    assert "url(" not in html
    assert "@import" not in html


def test_every_table_can_be_saved_as_its_csv_from_the_page(document):
    links = document.xpath("//a[@download]")

    assert [link.get("download") for link in links] == [f"{table.name}.csv" for table in rich_report().tables]
    for link, table in zip(links, rich_report().tables, strict=True):
        media_type, data = link.get("href").split(",")
        assert media_type == "data:text/csv;charset=utf-8;base64"
        assert base64.b64decode(data).decode() == csv_text(table)


def test_the_lead_stands_before_the_findings():
    report = dataclasses.replace(EMPTY, statements=("Said.",), lead="Shown <here>: 3 % of it.")
    (section,) = lxml.html.document_fromstring(html_page(report)).xpath("//section[@class='findings']")

    assert [(child.tag, child.text_content().strip()) for child in section] == [
        ("h2", "Findings"),
        ("p", "Shown <here>: 3 % of it."),
        ("ul", "Said."),
    ]
    without = lxml.html.document_fromstring(html_page(dataclasses.replace(report, lead="")))
    assert without.xpath("//section[@class='findings']/p") == []


def test_a_model_that_is_the_same_in_every_row_is_left_out_of_the_table_and_stays_in_the_csv():
    columns = (Column("Model"), Column("Objective"), Column("LMS", "", "lower"))
    lone = Table("t", "T", columns, (("A", "CE", 8), ("A", "TF-IDF", 2)))
    several = Table("u", "U", columns, (("A", "CE", 8), ("B", "CE", 2)))
    document = lxml.html.document_fromstring(html_page(dataclasses.replace(EMPTY, tables=(lone, several))))

    headers = [
        [th.text_content().split("\xa0")[0] for th in table.xpath(".//thead//th")]
        for table in document.xpath("//table")
    ]
    assert headers == [["Objective", "LMS"], ["Model", "Objective", "LMS"]]
    assert [[cell.text_content() for cell in row] for row in cells(lone)] == [["CE", "8"], ["TF-IDF", "2"]]
    assert bold(lone) == [[False, False], [False, True]]
    data = document.xpath("//a[@download='t.csv']/@href")[0].split(",")[1]
    assert base64.b64decode(data).decode().splitlines()[1] == "A,CE,8"


def test_markup_in_any_text_stays_text():
    fresh = matplotlib.figure.Figure
    report = Report(
        title=HOSTILE,
        statements=(HOSTILE,),
        tables=(
            Table("t", HOSTILE, (Column(HOSTILE), Column(HOSTILE, "", "lower")), ((HOSTILE, HOSTILE),), (HOSTILE,)),
        ),
        figures=(Figure("f", HOSTILE, fresh(), HOSTILE),),
        examples=(
            Example(HOSTILE, HOSTILE, HOSTILE, (Continuation(HOSTILE, HOSTILE, ((HOSTILE, True), (HOSTILE, False))),)),
        ),
        provenance=((HOSTILE, HOSTILE),),
        lead=HOSTILE,
    )

    document = lxml.html.document_fromstring(html_page(report))

    # title, h1; lead, statement; title, link, 2 headers, 2 cells, note; title, link, caption; title, link, 2 texts,
    # label, scores, 2 pieces; name, value
    assert document.text_content().count(HOSTILE) == 2 + 2 + 7 + 3 + 8 + 2
    # alt; what the link to the CSV is called
    assert sum(HOSTILE in value for value in document.xpath("//@alt|//@aria-label")) == 1 + 1
    assert len(document.xpath("//script")) == 1
    assert document.xpath("//img/@src")[0].startswith("data:image/svg+xml;base64,")
    assert len(document.xpath("//img")) == 1
    assert [name for element in document.iter() for name in element.attrib if name.startswith("on")] == []


def test_a_continuation_is_shown_to_the_letter_with_its_recited_span_marked():
    pieces = ((" as\n\n  it", False), (" was <b> & said", True), ("\tonce.", False))
    example = Example("e", "p", "t", (Continuation("CE", "LMS 3", pieces),))

    document = lxml.html.document_fromstring(html_page(dataclasses.replace(EMPTY, examples=(example,))))
    (text,) = document.xpath("//article//p[mark]")

    assert [aside.text for aside in text.xpath(".//span")] == ["[recited: ", "]"]
    for aside in text.xpath(".//span"):
        aside.drop_tree()
    assert text.text_content() == " as\n\n  it was <b> & said\tonce."
    assert text.xpath("string(mark)") == " was <b> & said"


def test_a_figure_is_drawn_into_the_page_and_says_its_title(document):
    figures = rich_report().figures
    images = document.xpath("//img")

    assert [image.get("alt") for image in images] == [figure.title for figure in figures]
    assert [(image.get("width"), image.get("height")) for image in images] == [
        ("614", "384"),
        ("864", "384"),
        ("614", "461"),
    ]
    for image in images:
        svg = base64.b64decode(image.get("src").split(",")[1]).decode()
        assert re.search(r'<g id="patch_1">\s*<path [^>]*style="fill: none[;"]', svg)  # the page's ground shows


def test_an_empty_report_has_no_empty_sections():
    document = lxml.html.document_fromstring(html_page(EMPTY))

    assert [heading.text for heading in document.xpath("//h1|//h2|//h3")] == ["Nothing"]
    assert document.xpath("//a") == []


def test_numbers_are_shown_in_their_columns_format_and_kept_whole_for_sorting():
    columns = (Column("a"), Column("b", ".2f"), Column("c", "+.1f"), Column("d"), Column("e", ".2f"))
    table = Table("t", "T", columns, (("x", 1 / 3, 2, 1234, math.inf), ("y", None, math.nan, 7, 1.0)))

    first, second = cells(table)

    assert [cell.text_content() for cell in first] == ["x", "0.33", "+2.0", "1234", "inf"]
    assert [cell.get("data-value") for cell in first] == [None, repr(1 / 3), "2", "1234", "Infinity"]
    assert [cell.text_content() for cell in second] == ["y", "\N{EN DASH}", "+nan", "7", "1.00"]
    assert ["missing" in cell.get("class").split() for cell in second] == [False, True, True, False, False]
    assert ["number" in cell.get("class").split() for cell in second] == [False, True, True, True, True]
    mixed = Table("t", "T", (Column("a"), Column("b")), (("x", 1), ("y", "2 of 3")))
    assert ["number" in row[1].get("class").split() for row in cells(mixed)] == [False, False]


def test_the_best_of_each_group_is_bold_and_what_looks_equal_is_equally_best():
    columns = (Column("Model"), Column("LMS", ".1f", "lower"), Column("F1", "", "higher"), Column("Control", ".1f"))
    rows = (("A", 2.04, 5, 1.0), ("A", 1.96, 7, 0.0), ("A", 2.1, 7, 0.0), ("B", 9.0, 1, 0.0), ("B", 8.0, None, 0.0))

    assert bold(Table("t", "T", columns, rows)) == [
        [False, True, False, False],
        [False, True, True, False],
        [False, False, True, False],
        [False, False, False, False],
        [False, True, False, False],
    ]


RANKED = (Column("Task"), Column("Perplexity", ".1f", "lower"))


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ((("CE", 8.0), ("TF-IDF", 9.0)), [True, False]),  # no first cell repeats: the best of all rows
        ((("A", math.inf), ("A", 8.0)), [False, True]),
        *(((("A", other), ("A", 8.0)), [False, False]) for other in (None, math.nan, "n/a")),  # nothing to compare
        ((("A", 8.0),), [False]),
    ],
)
def test_a_value_is_best_only_among_others(rows, best):
    assert [row[1] for row in bold(Table("t", "T", RANKED, rows))] == best


def test_headers_say_which_end_is_better_and_the_page_what_that_means():
    ranked = Table("t", "T", (Column("Model"), Column("LMS", "", "lower"), Column("F1", "", "higher")), ())
    unranked = Table("u", "U", (Column("a"), Column("b")), ())
    assert [header.text_content() for header in table_of(ranked).xpath(".//thead//th")] == [
        "Model",
        "LMS\N{NO-BREAK SPACE}↓, lower is better",
        "F1\N{NO-BREAK SPACE}↑, higher is better",
    ]
    assert "lower is better, ↑" in html_page(dataclasses.replace(EMPTY, tables=(unranked, ranked)))
    assert "lower is better, ↑" not in html_page(dataclasses.replace(EMPTY, tables=(unranked,)))


def test_short_words_with_a_hyphen_and_per_cent_signs_stay_on_their_line():
    statement = "TF-IDF lowers it by 62.4 % (-0.8 %) <in> a-word-that-is-much-too-long-for-it."
    document = lxml.html.document_fromstring(html_page(dataclasses.replace(EMPTY, statements=(statement,))))
    (item,) = document.xpath("//section//li")

    assert item.text_content() == statement
    assert item.xpath("span[@class='together']/text()") == ["TF-IDF", "62.4 %", "(-0.8 %"]


def test_the_pages_policy_names_its_scripts_by_their_hashes_and_nothing_else():
    document = lxml.html.document_fromstring(html_page(dataclasses.replace(EMPTY, title="A & <b>")))
    (policy,) = document.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")
    scripts = [script.text for script in document.xpath("//script")]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]

    assert document.xpath("string(//h1)") == "A & <b>"
    assert policy.split("; ")[:2] == [
        "default-src 'none'",
        "script-src " + " ".join(f"'sha256-{digest}'" for digest in hashes),
    ]
