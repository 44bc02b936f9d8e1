"""Token weights as people see them: text, pictures and the page in a real browser."""

import csv
import dataclasses
import io
import json
import re
import warnings

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from browser import DESKTOP, PHONE
from rich.console import Console
from rich.style import Style
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tfidf_tune.analysis._token_weights import TERM_FREQUENCIES, weigh_blocks
from tfidf_tune.report import html_page, markdown
from tfidf_tune.report._shown_tokens import (
    LEVELS,
    ShownBlock,
    ShownToken,
    level_of,
    lines_of,
    on_white,
    readable,
    shown_block,
    weight_of,
)
from tfidf_tune.report._weight_figures import _MOST_LINES, bands_figure, tokens_figure
from tfidf_tune.report._weights import findings, print_block, tokens_section, weights_report, write_weights

HOSTILE = "</span><script>alert(1)</script>\"'&"
# Three tokens that together are one character, as byte-level BPE cuts it.
TEXTS = {
    0: " the",
    1: " lob",
    2: "ster",
    3: ",",
    4: "\n",
    5: HOSTILE,
    6: " $x$",
    7: "\ufffd",
    8: "\ufffd",
    9: "\ufffd",
    10: "東",
}
BYTES = {7: b"\xe6", 8: b"\x9d", 9: b"\xb1"}


def decode(ids):
    if all(token in BYTES for token in ids):
        return b"".join(BYTES[token] for token in ids).decode(errors="replace")
    return "".join(TEXTS[token] for token in ids)


def make_blocks(num_blocks=20, block_size=24):
    rng = np.random.default_rng(0)
    blocks = rng.choice(len(TEXTS), size=(num_blocks, block_size), p=np.array([20, 5, 5, 8, 2, 1, 1, 0, 0, 0, 1]) / 43)
    blocks[:, 10:13] = [7, 8, 9]
    blocks[:, 5] = 5
    return blocks.astype(np.int32)


@pytest.fixture(scope="module")
def weights():
    weighted = weigh_blocks(make_blocks(), vocab_size=len(TEXTS), batch_size=4, num_batches=2)
    return weights_report(
        weighted, TEXTS, decode, "count", [0, 3], min_count=2, num_tokens=3, provenance=[("text", "a <b> file")]
    )


def block_of(*tokens):
    """A block of (text, weight) after a first token without weight."""
    labels = [ShownToken(text, 5, 2, 3, 1.5, dict.fromkeys(TERM_FREQUENCIES, weight)) for text, weight in tokens]
    return ShownBlock(7, 3, 24, (ShownToken("First", 1), *labels))


# ---- one token


@pytest.mark.parametrize(
    ("text", "shown", "alone"),
    [
        (" the", " the", "␣the"),
        ("the", "the", "the"),
        (" ", "␣", "␣"),
        ("  the", "␣␣the", "␣␣the"),
        ("\n", "↵", "↵"),
        ("\r\n\t", "␍↵⇥", "␍↵⇥"),
        ("\x1b[31m", "\\u001b[31m", "\\u001b[31m"),
        ("a\u202eb", "a\\u202eb", "a\\u202eb"),
        ("\u200b", "\\u200b", "\\u200b"),
        ("\u00a0x", "\\u00a0x", "\\u00a0x"),
        ("\U000e0001", "\\U000e0001", "\\U000e0001"),
        ("\u0301", "◌\u0301", "◌\u0301"),
        ("", "∅", "∅"),
        ("東京", "東京", "東京"),
    ],
)
def test_tokens_are_readable_and_harmless(text, shown, alone):
    assert readable(text) == shown
    assert readable(text, mark_spaces=True) == alone


@pytest.mark.parametrize(
    ("weight", "level"), [(1, 0), (1.1, 0), (0.9, 0), (2, 2), (0.5, -2), (1.4, 1), (4, 4), (99, 4), (0.01, -4), (0, -4)]
)
def test_a_weight_has_a_level_of_half_an_octave(weight, level):
    assert level_of(weight) == level


def test_levels_go_from_blue_over_white_to_orange_and_keep_black_text_legible():
    assert [level_of(weight_of(level)) for level in LEVELS] == list(LEVELS)
    assert on_white(0) == (255, 255, 255)
    for level in LEVELS:
        red, _, blue = on_white(level)
        assert np.sign(red - blue) == np.sign(level)
        light = [
            (part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4) for part in on_white(level)
        ]
        assert (np.dot([0.2126, 0.7152, 0.0722], light) + 0.05) / 0.05 > 7  # contrast by WCAG 2, level AAA


def test_parts_of_a_character_show_it_at_the_last_one():
    weighted = weigh_blocks(np.array([[3, 0, 7, 8, 9, 7, 8, 0, 7, 8, 9]]), vocab_size=11)
    tokens = shown_block(weighted, 0, TEXTS, decode).tokens
    part = "\ufffd"
    assert [token.text for token in tokens] == [",", " the", part, part, "東", part, part, " the", part, part, "東"]


def test_a_shown_block_has_the_numbers_of_its_own_row(weights):
    weighted = weigh_blocks(make_blocks(), vocab_size=len(TEXTS), batch_size=4, num_batches=2)
    block = shown_block(weighted, 3, TEXTS, decode)
    assert (block.index, block.step, block.num_documents) == (3, weighted.steps[3], weighted.num_documents[3])
    assert block.tokens[0] == ShownToken(TEXTS[weighted.blocks[3, 0]], weighted.blocks[3, 0])
    for i, token in enumerate(block.tokens[1:]):
        assert token.token_id == weighted.blocks[3, i + 1]
        assert (token.count, token.document_frequency) == (weighted.counts[3, i], weighted.document_frequency[3, i])
        assert token.idf == weighted.idf[3, i]
        assert token.weights == {form: values[3, i] for form, values in weighted.weights.items()}


# ---- lines


def lines(texts, width):
    return ["".join(text for text, _ in line) for line in lines_of([ShownToken(t, 0) for t in texts], texts, width)]


def test_lines_break_before_words_and_keep_every_token():
    texts = [" the", " lob", "ster", " eats", " an", "ch", "ov", "ies"]
    assert lines(texts, 14) == [" the lobster", " eats", " anchovies"]
    assert lines(texts, 100) == ["".join(texts)]


def test_a_word_longer_than_a_line_is_broken_between_its_tokens():
    assert lines([" ab", "cd", "ef", "gh"], 5) == [" abcd", "efgh"]
    assert lines(["abcdefghij", "k"], 5) == ["abcdefghij", "k"]


def test_a_line_end_of_the_text_ends_the_line():
    tokens = [ShownToken("a", 0), ShownToken("\n", 0), ShownToken("b", 0)]
    assert [[text for text, _ in line] for line in lines_of(tokens, ["a", "↵", "b"], 80)] == [["a", "↵"], ["b"]]


def test_wide_characters_take_two_columns():
    assert lines(["e\u0301", "e\u0301", "e\u0301"], 3) == ["e\u0301" * 3]
    assert lines(["東", "京", "市"], 5) == ["東京", "市"]


# ---- the terminal


def printed(block, form, width=80, **environment):
    file = io.StringIO()
    Style._add.cache_clear()  # rich keeps the codes of the color system that was used first
    colored = {"force_terminal": True} if environment else {}
    print_block(block, form, Console(file=file, width=width, _environ=environment, **colored))
    return file.getvalue()


@pytest.mark.parametrize(
    ("environment", "colored"),
    [
        ({"COLORTERM": "truecolor", "TERM": "xterm"}, True),
        ({"TERM": "xterm-256color"}, True),
        ({"COLORTERM": "truecolor", "TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, True),  # empty does not count, says no-color.org
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_colors_are_for_terminals_that_want_them(environment, colored):
    text = printed(block_of((" high", 4.0)), "count", **environment)
    assert ("\x1b[" in text, "(4.00)" in text) == (colored, not colored)


def test_without_colors_high_weights_stand_in_parentheses():
    text = printed(block_of((" the", 0.3), (" lob", 2.0), ("\n", 3.456)), "log")
    assert "Block 7, mini-batch 3, 24 blocks in the window, tf=log" in text
    assert "First the lob(2.00)↵(3.46)" in text


def test_with_colors_each_level_has_its_own_and_high_weights_are_underlined():
    block = block_of((" low", 0.25), (" even", 1.0), (" up", 1.41), (" high", 4.0))
    text = printed(block, "count", COLORTERM="truecolor", TERM="xterm")
    red, green, blue = on_white(-4)
    assert f"\x1b[30;48;2;{red};{green};{blue}m low\x1b[0m even" in text
    assert re.search(r"\x1b\[30;48;2;\d+;\d+;\d+m up\x1b\[0m\x1b\[4;30;48;2;\d+;\d+;\d+m high\x1b\[0m", text)
    assert "(4.00)" not in text


def test_the_256_colors_are_used_where_there_are_no_more():
    text = printed(block_of((" low", 0.25), (" high", 4.0)), "count", TERM="xterm-256color")
    assert len(set(re.findall(r"48;5;(\d+)", text))) > 4
    assert re.search(r"4;30;48;5;\d+m high", text)


def test_markup_of_the_terminal_library_stays_text():
    assert "First[bold]x[/bold]" in printed(block_of(("[bold]x[/bold]", 1.0)), "count")


# ---- pictures


def pixels(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    return matplotlib.image.imread(buffer)[..., :3]


def test_the_picture_has_the_colours_of_high_and_low_weights():
    strip = " " + "x" * 30
    image = pixels(tokens_figure([block_of((strip, 4.0), (strip, 0.25), (strip, 1.0))], "count"))
    # Above the colour bar, which has all colours.
    found = {tuple(colour) for colour in np.round(image[: len(image) // 2] * 255).astype(int).reshape(-1, 3)}
    assert on_white(4) in found
    assert on_white(-4) in found


def test_weights_off_the_scale_are_drawn_as_its_ends():
    ends, beyond = (
        pixels(tokens_figure([block_of((" a", high), (" b", low))], "count"))
        for high, low in ((4.0, 0.25), (99.0, 0.01))
    )
    np.testing.assert_array_equal(ends, beyond)


def test_characters_without_a_glyph_and_mathematics_are_drawn_without_a_warning():
    texts = [" 東京", "مرحبا", "🙂", " $x^", "$", "$\\frac{$", "\x00", "नमस्ते", "\ufffd", "<b>", "\n"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = pixels(tokens_figure([block_of(*((text, 2.0) for text in texts))], "binary"))
    assert image.min() < 0.1  # there is text


def test_a_text_too_long_for_a_picture_is_cut_and_says_so():
    figure = tokens_figure([block_of(*[("\n", 1.0)] * (_MOST_LINES + 50))], "count")
    assert figure.axes[0].texts[-1].get_text() == "51 more lines do not fit this picture"
    assert len(figure.axes[0].texts) == 2 + _MOST_LINES  # heading, first line of two tokens, the others, the remark
    assert figure.get_size_inches()[1] * figure.dpi < 2**16


def test_the_plot_shows_the_shares_and_means_of_each_form():
    bands = pd.DataFrame({"frequency rank": ["1 to 10", "11 to 25"], "% of tokens": [30.0, 70.0]})
    for shift, form in enumerate(("count", "log", "binary")):
        bands[f"% of weight, {form}"] = bands["% of tokens"] + 10 * shift
        bands[f"mean, {form}"] = 1.0 + shift / 10
    shares, means = bands_figure(bands).axes
    heights = [[round(bar.get_height(), 6) for bar in bars] for bars in shares.containers]
    assert heights == [[30, 70], [30, 70], [40, 80], [50, 90]]
    drawn = {line.get_label(): list(line.get_ydata()) for line in means.lines}
    assert drawn["tf=count"] == [1.0, 1.0]
    assert drawn["tf=binary"] == [1.2, 1.2]
    assert [label.get_text() for label in shares.get_xticklabels()] == ["1 to 10", "11 to 25"]


# ---- findings and tables


WORDLESS = pd.DataFrame({"token": [], **{f"weight, {form}": [] for form in TERM_FREQUENCIES}})


def bands(tokens, count):
    weights = {"% of weight, count": [count], "% of weight, log": [20.0], "% of weight, binary": [10.0]}
    return pd.DataFrame({"frequency rank": ["1 to 10"], "% of tokens": [tokens]} | weights)


def test_the_findings_say_that_raw_counts_lift_frequent_tokens():
    first, second, third = findings("count", bands(20.0, 35.0), WORDLESS, WORDLESS)
    assert first == (
        "With tf=count, the 10 most frequent tokens hold 20.0 % of the tokens and 35.0 % of the weight: "
        "raw counts lift frequent tokens here."
    )
    assert second.endswith("20.0 % of the weight: 1 + ln count hardly changes frequent tokens here.")
    assert third.endswith("10.0 % of the weight: idf alone lowers frequent tokens here.")


def test_the_findings_say_so_when_raw_counts_lower_them_and_start_with_the_chosen_form():
    sentences = findings("log", bands(20.0, 10.0), WORDLESS, WORDLESS)
    assert sentences[0].startswith("With tf=log")
    assert sentences[1].endswith("raw counts lower frequent tokens here.")


def test_the_findings_compare_starts_with_continuations_and_words_with_their_pieces():
    parts = pd.DataFrame({"token": ["starts a word", "continues a word"], "weight, count": [1.2, 0.8]})
    values = {"idf, tokens": [2.0, 2.5], "idf, word": [2.1, 4.0], "weight, count": [1.1, 0.7]}
    starts, words = findings("count", bands(20.0, 30.0), parts, pd.DataFrame(values, index=[1, 2]))[3:]
    assert "start a word weigh 1.20 on average, tokens that continue one 0.80 (tf=count)" in starts
    assert "mean idf of 4.00 if they were one token; their tokens have 2.50: the split hides" in words
    assert "weigh 0.70 on average, words of one token 1.10" in words


def test_the_report_reads_as_text(weights):
    text = markdown(weights.report)
    assert "With tf=count" in text
    assert "| ␣the" in text
    assert "| text" in text
    assert [table.name for table in weights.report.tables] == [
        "frequency_bands",
        "frequency_band_weights",
        "most_up_weighted",
        "most_down_weighted",
        "word_parts",
        "split_words",
    ]


def without_images(page):
    return re.sub('data:image[^"]*', "", page)


def test_the_files_hold_the_same_report(weights, tmp_path):
    folder = tmp_path / "new" / "weights"
    write_weights(weights, folder)
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    tables = [f"tables/{table.name}.csv" for table in (*weights.report.tables, weights.tokens)]
    figures = ["figures/frequency_bands.png", "figures/frequency_bands.svg"]
    assert found == sorted([*tables, *figures, "index.html", "report.json", "report.md", "tokens.png"])
    with (folder / "tables" / "tokens.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [column.name for column in weights.tokens.columns]
    assert len(rows) == len(TEXTS)
    assert [float(cell) for cell in rows[0][4:]] == list(weights.tokens.rows[0][4:])
    page = html_page(weights.report, **tokens_section(weights))
    assert without_images((folder / "index.html").read_text("utf-8")) == without_images(page)
    assert json.loads((folder / "report.json").read_text("utf-8"))["title"] == weights.report.title
    assert matplotlib.image.imread(folder / "tokens.png").shape[1] > 1000
    write_weights(dataclasses.replace(weights, blocks=weights.blocks[:1]), folder)  # and once more


def test_a_folder_of_other_files_is_refused(weights, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds files"):
        write_weights(weights, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


# ---- the page


@pytest.fixture(scope="module")
def page_file(weights, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "index.html"
    file.write_text(html_page(weights.report, **tokens_section(weights)), encoding="utf-8")
    return file


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (DESKTOP, True), (PHONE, False), (PHONE, True)])
def test_the_page_fits_its_window_and_asks_for_nothing(size, dark, browser, page_file):
    browser.open(page_file, size=size, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    assert browser.messages() == []
    assert {url for url in browser.requests() if not url.startswith(("data:", "about:"))} == {page_file.as_uri()}
    brightness = browser.screenshot().mean()
    assert brightness < 0.4 if dark else brightness > 0.75


def test_the_text_of_tokens_stays_text(browser, page_file, weights):
    browser.open(page_file)
    shown = browser.run("return [...document.querySelectorAll('.tokens span')].map((t) => t.textContent)")
    assert shown == [readable(token.text) for block in weights.blocks for token in block.tokens]
    assert HOSTILE in shown


def test_a_token_that_is_pointed_at_tells_its_numbers(browser, page_file, weights):
    browser.open(page_file)
    index = 3
    token, block = weights.blocks[0].tokens[index], weights.blocks[0]
    ActionChains(browser.driver).move_to_element(
        browser.driver.find_elements(By.CSS_SELECTOR, ".tokens span")[index]
    ).perform()
    details = browser.run("return document.getElementById('details').textContent")
    assert f"id {token.token_id}" in details
    assert f"{token.count} in this block, in {token.document_frequency} of {block.num_documents} blocks" in details
    assert f"idf {token.idf:.2f}" in details
    for form, weight in token.weights.items():
        assert f"{weight:.2f} ({form})" in details


def test_arrow_keys_go_from_token_to_token(browser, page_file, weights):
    browser.open(page_file)
    first = browser.driver.find_elements(By.CSS_SELECTOR, ".tokens span")[0]
    browser.run("arguments[0].focus()", first)
    assert "never a label" in browser.run("return document.getElementById('details').textContent")
    first.send_keys(Keys.ARROW_RIGHT)
    second = browser.driver.switch_to.active_element
    assert f"id {weights.blocks[0].tokens[1].token_id}" in browser.run(
        "return document.getElementById('details').textContent"
    )
    second.send_keys(Keys.ARROW_LEFT)
    assert browser.driver.switch_to.active_element == first
    first.send_keys(Keys.ARROW_LEFT)  # there is none before
    assert browser.driver.switch_to.active_element == first


def test_the_tf_form_can_be_changed(browser, page_file, weights):
    browser.open(page_file)
    for form in ("count", "binary", "log"):
        browser.driver.find_element(By.CSS_SELECTOR, f"input[value={form}]").click()
        classes = browser.run("return [...document.querySelectorAll('.tokens span')].map((t) => t.className)")
        levels = [
            None if token.weights is None else level_of(token.weights[form])
            for block in weights.blocks
            for token in block.tokens
        ]
        names = [
            "unweighted" if v is None else "even" if v == 0 else f"{'up' if v > 0 else 'down'}{abs(v)}" for v in levels
        ]
        assert classes == names


def test_up_weighted_tokens_are_underlined_as_well(browser, page_file):
    browser.open(page_file)
    widths = {
        name: browser.run(f"return getComputedStyle(document.querySelector('.legend .{name}')).borderBottomWidth")
        for name in ("down4", "even", "up1", "up2", "up3", "up4")
    }
    assert widths == {"down4": "0px", "even": "0px", "up1": "0px", "up2": "1px", "up3": "2px", "up4": "3px"}
