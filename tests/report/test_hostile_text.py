"""Names and passages that try to act where they are shown: in a terminal, Markdown, a spreadsheet, a page, a figure."""

import base64
import csv
import dataclasses
import io
import json
import re
import sys

import lxml.etree
import lxml.html
import pytest
from markdown_it import MarkdownIt
from run_fakes import blocks, controls, evaluation, run, targets, write_run

from tfidf_tune import cli
from tfidf_tune._printing import visible
from tfidf_tune.report import Column, Table
from tfidf_tune.report._document import csv_text

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
    "+1",
    "-1",
    "@SUM(A1)",
)
UNSAFE = re.compile("[^\n\t -~\xa0-\U0010ffff]|[\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def probed(text, lms):
    """One target and one control that hold a text wherever a sample has one."""
    samples = [
        dataclasses.replace(sample, generated_text=f"{text} one two", reference_text=f"{text} one three")
        for sample in (*targets(lms), *controls(0))
    ]
    texts = [dataclasses.replace(sample, passage_id=f"{text} {sample.kind}") for sample in samples]
    prompts = {(sample.passage_id, 0, sample.prefix_length): f"{text}\n{text}" for sample in texts}
    return [evaluation(at, texts, prompts=prompts, blocks=blocks(20.0 + lms)) for at in (50, 100)]


def run_command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", *map(str, arguments)])
    cli.main()
    return capsys.readouterr().out


def make_runs(folder, texts):
    """One model under an objective for each text."""
    shared = " ".join(texts)
    for number, text in enumerate(texts):
        made = run(text, probed(shared, 1 + number % 3), model=f"M {shared}")
        write_run(folder / "runs \x1b[31m<b>" / str(number), made)
    return folder / "runs \x1b[31m<b>"


def flat(text):
    return " ".join(visible(text).split())


def rendered(markdown):
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(markdown)


def inline(tokens):
    return [child for token in tokens for child in token.children or ()]


def require_inert_markdown(text, num_headings, num_figures, num_examples):
    assert not UNSAFE.search(text)
    tokens = rendered(text)
    kinds = [token.type for token in tokens]
    assert {"html_block", "blockquote_open", "ordered_list_open", "hr", "code_block"} & set(kinds) == set()
    assert kinds.count("fence") == num_examples
    assert kinds.count("heading_open") == num_headings
    outside_fences = re.sub(r"(?s)\n(`{3,})text\n.*?\n\1\n", "", text)
    assert kinds.count("bullet_list_open") == outside_fences.count("\n\n- ")
    active = [token for token in inline(tokens) if token.type not in ("text", "softbreak", "text_special")]
    assert {token.type for token in active} <= {"image"}
    assert [token.attrs["src"][:8] for token in active] == ["figures/"] * num_figures
    assert not re.search(r"https?://|www\.", outside_fences)  # GitHub makes links of bare addresses
    return tokens


def require_inert_pages(folder, num_figures):
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert not UNSAFE.search(html)
    document = lxml.html.document_fromstring(html)
    images = document.xpath("//img/@src")
    assert len(images) == num_figures
    assert document.xpath("//*[starts-with(name(@*), 'on')] | //a[not(starts-with(@href, '#'))][not(@download)]") == []
    assert all("alert" not in script for script in document.xpath("//script/text()"))
    drawings = [base64.b64decode(image.removeprefix("data:image/svg+xml;base64,")) for image in images]
    drawings += [file.read_bytes() for file in folder.glob("figures/*.svg")]
    for drawing in drawings:
        lxml.etree.fromstring(drawing, lxml.etree.XMLParser(recover=False))
    return document


def require_inert_tables(folder):
    for file in folder.glob("tables/*.csv"):
        with file.open(encoding="utf-8", newline="") as stream:
            cells = [cell for row in csv.reader(stream) for cell in row]
        assert not UNSAFE.search("".join(cells))
        for cell in cells:
            assert cell[:1] not in ("=", "+", "-", "@", "\t", "\r", "\n") or float(cell) is not None


@pytest.mark.parametrize("names", [HOSTILE[part::2] for part in range(2)], ids=range(2))
def test_a_comparison_shows_hostile_texts_and_lets_none_act(names, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    runs = make_runs(tmp_path, names)
    printed = run_command(monkeypatch, capsys, "compare", runs, "--output-dir", out, f"--title={names[0]}")

    assert not UNSAFE.search(printed)
    assert f"| {flat(names[0])} " in printed
    content = json.loads((out / "report.json").read_text(encoding="utf-8"))
    num_figures, num_examples = len(content["figures"]), len(content["examples"])
    text = (out / "report.md").read_text(encoding="utf-8")
    num_headings = 1 + len(content["tables"]) + num_figures + 1 + num_examples + 1
    tokens = require_inert_markdown(text, num_headings, num_figures, num_examples)
    cells = {
        "".join(child.content for child in token.children)
        for before, token in zip(tokens, tokens[1:], strict=False)
        if before.type == "td_open"
    }
    assert {flat(name) for name in names} <= cells
    document = require_inert_pages(out, num_figures)
    shown = {flat(cell.text_content()) for cell in document.xpath("//td|//th")}
    assert {flat(name) for name in names} <= shown
    require_inert_tables(out)
    assert num_figures == 3


def test_an_audit_shows_hostile_texts_and_lets_none_act(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    results = make_runs(tmp_path, [" ".join(HOSTILE)])
    printed = run_command(monkeypatch, capsys, "probe", "audit", "--results", results, "--output-dir", out)

    assert not UNSAFE.search(printed)
    content = json.loads((out / "report" / "report.json").read_text(encoding="utf-8"))
    num_examples = len(content["examples"])
    num_headings = 1 + len(content["tables"]) + 1 + 1 + num_examples + 1
    require_inert_markdown((out / "report" / "report.md").read_text("utf-8"), num_headings, 1, num_examples)
    require_inert_pages(out / "report", 1)
    require_inert_tables(out / "report")


def test_weights_of_a_hostile_text_let_nothing_act(tmp_path, tiny_checkpoint, monkeypatch, capsys):
    file = tmp_path / "\x1b[31m<img src=x> ![i](http:) $x$.txt"
    file.write_text("\n".join(HOSTILE * 3), encoding="utf-8", errors="ignore")
    out = tmp_path / "out"
    arguments = ["--tokenizer", tiny_checkpoint, "--block-size", 16, "--min-count", 1, "--output-dir", out]
    printed = run_command(monkeypatch, capsys, "weights", file, *arguments)

    assert not UNSAFE.search(printed)
    num_headings = 1 + len(json.loads((out / "report.json").read_text("utf-8"))["tables"]) + 1 + 1
    require_inert_markdown((out / "report.md").read_text("utf-8"), num_headings, 1, 0)
    require_inert_pages(out, 1)
    require_inert_tables(out)


def test_an_error_shows_hostile_names_and_sends_none(tmp_path, monkeypatch):
    experiment = make_runs(tmp_path, HOSTILE[:2])
    file = next(experiment.rglob("samples_*.jsonl"))
    file.write_text("{")
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", "compare", str(experiment), "--output-dir", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"^error: .*runs \\u001b\[31m<b>.*jsonl, line 1: not a document"):
        cli.main()


def test_only_text_that_a_spreadsheet_would_take_for_a_formula_is_changed():
    columns = (Column("=Name"), Column("Change", "+.1f"))
    rows = (("-1", -1.5), ("a-1", -3), ("@x", None), ("'quoted", 1e-9), ("", 2), ("\t=1", 0), ("\r=1", 0))
    assert csv_text(Table("t", "T", columns, rows)).splitlines() == [
        "'=Name,Change",
        "'-1,-1.5",
        "a-1,-3",
        "'@x,",
        "'quoted,1e-09",
        ",2",
        "'\t=1,0",
        "'\\u000d=1,0",
    ]


@pytest.mark.parametrize("command", [("compare",), ("probe", "audit", "--results")])
def test_an_output_without_unicode_gets_question_marks(command, tmp_path, monkeypatch):
    runs = make_runs(tmp_path, ["Ünï"] if "audit" in command else ["Ünï", "CE"])
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", *command, str(runs), "--output-dir", str(tmp_path / "out")])
    cli.main()
    stream.flush()
    assert b"?n?" in stream.buffer.getvalue()
    assert next((tmp_path / "out").rglob("report.md")).read_text("utf-8").count("Ünï") > 5


def test_a_frontier_draws_hostile_names(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    names = [name for name in HOSTILE if "$" in name or name[0] in "_\x9b" or "<" in name]
    run_command(monkeypatch, capsys, "compare", "--frontier", make_runs(tmp_path, names), "--output-dir", out)
    require_inert_pages(out, 1)
    require_inert_tables(out)
