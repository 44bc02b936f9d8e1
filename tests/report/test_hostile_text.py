"""Names and passages that try to act where they are shown: in a terminal, Markdown, a spreadsheet,
a page, a figure.
"""

import base64
import csv
import dataclasses
import io
import json
import re
import sys
from itertools import chain

import lxml.etree
import lxml.html
import pandas as pd
import pytest
from helpers.fakes.runs import blocks, controls, evaluation, run, targets, write_run
from markdown_it import MarkdownIt
from matplotlib.figure import Figure as Drawing

from tfidf_tune._printing import say, visible
from tfidf_tune.report import (
    Continuation,
    Example,
    Figure,
    Report,
    Table,
    terminal_text,
    write_report,
)

HOSTILE = (
    "\x1b]0;title\x07\x1b[31mred\x1b[2J",
    "\x9b31m\x9d0;title\x9c",
    "back\b\b\bspace\rreturn\x0b\x0c\x7f",
    "\u202egnirts\u2066\u2028line",
    "nul\x00\ufffe\uffff",
    "half a pair \ud800",
    "<img src=x onerror=alert(1)><script>alert(1)</script><!-- -->",
    "![i](http://host.example/i.png)[l](javascript:alert(1))",
    "<http://host.example> http://host.example www.host.example",
    "[r]: http://host.example",
    "&lt;b&gt; &#60;i&#62; {{ 7 * 7 }}",
    "a | b ` c `` d ``` e ~~~",
    "*em* _em_ __strong__ ~~struck~~ in_side",
    "```\n# out\n<b>",
    "# heading #",
    "> quote",
    "- item",
    "1. one",
    "12) twelve",
    "=== ---",
    "$\\frac{$ $x$ \\$",
    "_hidden",
    "back\\slash\\",
    "=cmd|' /C calc'!A0",
)
UNSAFE = re.compile(
    "[^\n\t -~\xa0-\U0010ffff]|[\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def probed(text, lms):
    """One target and one control that hold a text wherever a sample has one."""
    samples = [
        dataclasses.replace(
            sample, generated_text=f"{text} one two", reference_text=f"{text} one three"
        )
        for sample in (*targets(lms), *controls(0))
    ]
    texts = [dataclasses.replace(sample, passage_id=f"{text} {sample.kind}") for sample in samples]
    prompts = {sample.passage_id: f"{text}\n{text}" for sample in texts}
    return [evaluation(at, texts, prompts=prompts, blocks=blocks(20.0 + lms)) for at in (50, 100)]


def make_runs(folder, objectives):
    """A model's runs under objectives, all with every hostile text in names and samples."""
    shared = " ".join(HOSTILE)
    folder = folder / "runs \x1b[31m<b>"
    for number, name in enumerate(objectives):
        write_run(
            folder / str(number), run(name, probed(shared, 1 + number % 3), model=f"M {shared}")
        )
    return folder


def flat(text):
    return " ".join(visible(text).split())


def require_inert_report(folder):
    """Return the tokens of the Markdown and the document of the page."""
    content = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    for file in folder.glob("tables/*.csv"):
        with file.open(encoding="utf-8", newline="") as stream:
            cells = list(chain.from_iterable(csv.reader(stream)))
        assert not UNSAFE.search("".join(cells))
        for cell in cells:
            assert cell[:1] not in ("=", "+", "-", "@", "\t", "\r", "\n") or float(cell) is not None
    tokens = require_inert_markdown((folder / "report.md").read_text(encoding="utf-8"), content)
    return tokens, require_inert_page(folder, len(content["figures"]))


def require_inert_markdown(text, content):
    assert not UNSAFE.search(text)
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    kinds = [token.type for token in tokens]
    assert {"html_block", "blockquote_open", "hr", "code_block"} & set(kinds) == set()
    assert kinds.count("ordered_list_open") == bool(content["footnotes"])
    assert kinds.count("fence") == len(content["examples"])
    headings = []
    for name in ("tables", "figures", "examples", "sections"):
        headings += content[name]
    once = [name for name in ("examples", "footnotes") if content[name]]
    # And those of the title and of the provenance.
    assert kinds.count("heading_open") == len(headings) + len(once) + 2
    outside_fences = re.sub(r"(?s)\n(`{3,})text\n.*?\n\1\n", "", text)
    assert kinds.count("bullet_list_open") == outside_fences.count("\n\n- ")
    inline = []
    for token in tokens:
        inline += token.children or ()
    active = [token for token in inline if token.type not in ("text", "softbreak", "text_special")]
    assert {token.type for token in active} <= {"image"}
    assert [token.attrs["src"][:8] for token in active] == ["figures/"] * len(content["figures"])
    assert not re.search(r"https?://|www\.", outside_fences)  # GitHub makes links of bare addresses
    return tokens


def require_inert_page(folder, num_figures):
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert not UNSAFE.search(html)
    document = lxml.html.document_fromstring(html)
    images = document.xpath("//img/@src")
    assert len(images) == num_figures
    assert (
        document.xpath(
            "//*[starts-with(name(@*), 'on')] | //a[not(starts-with(@href, '#'))][not(@download)]"
        )
        == []
    )
    assert all("alert" not in script for script in document.xpath("//script/text()"))
    drawings = [
        base64.b64decode(image.removeprefix("data:image/svg+xml;base64,")) for image in images
    ]
    drawings += [file.read_bytes() for file in folder.glob("figures/*.svg")]
    for drawing in drawings:
        lxml.etree.fromstring(drawing, lxml.etree.XMLParser(recover=False))
    return document


def test_hostile_texts_are_shown_everywhere_and_act_nowhere(tmp_path, capsys):
    """Each text at the start and in the middle of everything that a report has."""
    pieces = tuple((text, bool(at % 2)) for at, text in enumerate(HOSTILE))
    rows = [(text, *(f"in {other}" for other in HOSTILE)) for text in HOSTILE]
    frame = pd.DataFrame(rows, columns=pd.Index(["Text", *HOSTILE], dtype=object), dtype=object)
    report = Report(
        title=" ".join(HOSTILE),
        tables=[Table(f"t{at}", text, frame, HOSTILE) for at, text in enumerate(HOSTILE[:2])],
        figures=[
            Figure(f"f{at}", text, Drawing(figsize=(1, 1)), text) for at, text in enumerate(HOSTILE)
        ],
        examples=[
            Example(text, text, text, (Continuation(text, text, pieces),)) for text in HOSTILE
        ],
        provenance={text: text for text in HOSTILE},
        verdict=" ".join(HOSTILE),
        footnotes=HOSTILE,
    )
    write_report(report, tmp_path / "out")
    say(terminal_text(report, verbose=True))
    printed = capsys.readouterr().out
    assert not UNSAFE.search(printed)
    tokens, document = require_inert_report(tmp_path / "out")
    in_markdown = {
        "".join(child.content for child in token.children)
        for before, token in zip(tokens, tokens[1:], strict=False)
        if before.type == "td_open"
    }
    on_page = {flat(cell.text_content()) for cell in document.xpath("//td|//th")}
    for text in HOSTILE:
        assert {flat(text), flat(f"in {text}")} <= in_markdown
        assert {flat(text), flat(f"in {text}")} <= on_page
        assert flat(text) in " ".join(printed.split())


def test_a_comparison_of_hostile_names_lets_none_act(tmp_path, run_command, capsys):
    out = tmp_path / "out"
    runs = make_runs(tmp_path, [" ".join(HOSTILE), "=1"])
    run_command("compare", runs, "--output-dir", out, f"--title={HOSTILE[0]}")
    printed = capsys.readouterr().out
    assert not UNSAFE.search(printed)
    assert f"# {flat(HOSTILE[0])}" in printed
    _, document = require_inert_report(out)
    assert len(document.xpath("//img")) == 3


def test_an_error_shows_hostile_names_and_sends_none(tmp_path, run_command):
    experiment = make_runs(tmp_path, ["CE", "IDF"])
    file = next(experiment.rglob("samples_*.jsonl"))
    file.write_text("{")
    with pytest.raises(
        SystemExit, match=r"^error: .*runs \\u001b\[31m<b>.*jsonl, line 1: not a document"
    ):
        run_command("compare", experiment, "--output-dir", tmp_path / "out")


def test_an_output_without_unicode_gets_question_marks(tmp_path, run_command, monkeypatch):
    folder = write_run(tmp_path / "run", run("Ünï", probed("x", 1)))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    unproven = ["--accept-unproven", "--verbose"]
    run_command("probe", "audit", "--results", folder, "--output-dir", tmp_path / "out", *unproven)
    stream.flush()
    assert b"?n?" in stream.buffer.getvalue()
    assert "Ünï" in (tmp_path / "out" / "report" / "report.md").read_text("utf-8")
