"""Token weights as people see them: text, pictures and the page in a real browser."""

import io
import re
import warnings
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from browser import DESKTOP, PHONE
from rich.console import Console
from rich.style import Style
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tfidf_tune.analysis._token_weights import WEIGHTS, shown_tokens, weigh_blocks
from tfidf_tune.analysis._weight_statistics import mark_words
from tfidf_tune.report import html_page
from tfidf_tune.report._shown_tokens import LEVELS, level_of, lines_of, on_white, print_block, readable, tokens_section
from tfidf_tune.report._weight_figures import _MOST_LINES, bands_figure, tokens_figure
from tfidf_tune.report._weights import findings, weights_report

HOSTILE = "</span><script>alert(1)</script>\"'&"
TEXTS = dict(enumerate([" the", " lob", "ster", ",", "\n", HOSTILE, " $x$"]))


@pytest.fixture(scope="module")
def made():
    """A report of 20 blocks and two of the blocks."""
    rng = np.random.default_rng(0)
    blocks = rng.choice(len(TEXTS), size=(20, 24), p=np.array([20, 5, 5, 8, 2, 1, 1]) / 42).astype(np.int32)
    blocks[:, 5] = 5
    tokens = weigh_blocks(blocks, vocab_size=len(TEXTS), batch_size=4, num_batches=2)
    report, all_tokens = weights_report(
        mark_words(tokens, TEXTS, 2), TEXTS, "count", num_batches=2, min_count=2, provenance={}
    )
    shown = [shown_tokens(tokens, block, TEXTS, decode=str) for block in (0, 3)]
    return SimpleNamespace(report=report, all_tokens=all_tokens, blocks=shown)


def block_of(*tokens):
    """A block of (text, weight) after a first token without weight."""
    numbers = {"block": 7, "step": 3, "documents": 24, "id": 5, "tf": 2, "df": 3, "idf": 1.5}
    labels = [{**numbers, "text": text, **dict.fromkeys(WEIGHTS.values(), weight)} for text, weight in tokens]
    return [{**numbers, "text": "First", "id": 1, "tf": 0}, *labels]


# ---- one token


@pytest.mark.parametrize(
    ("text", "shown", "marked"),
    [
        (" the", " the", "␣the"),
        (" ", "␣", "␣"),
        ("\r\n\t", "␍↵⇥", "␍↵⇥"),
        ("\x1b[31m", "\\u001b[31m", "\\u001b[31m"),
        ("a\u202eb", "a\\u202eb", "a\\u202eb"),
        ("\u00a0x", "\\u00a0x", "\\u00a0x"),
        ("\U000e0001", "\\U000e0001", "\\U000e0001"),
        ("\u0301", "◌\u0301", "◌\u0301"),
        ("", "∅", "∅"),
    ],
)
def test_tokens_are_readable_and_harmless(text, shown, marked):
    assert readable(text) == shown
    assert readable(text, mark_spaces=True) == marked


def test_a_level_is_half_an_octave_of_weight():
    levels = {1: 0, 1.1: 0, 0.9: 0, 2: 2, 0.5: -2, 1.4: 1, 4: 4, 99: 4, 0.01: -4, 0: -4}
    first, *labels = block_of(*(("x", weight) for weight in levels))
    assert [level_of(token, "log") for token in labels] == [*levels.values()]
    assert level_of(first, "log") is None


def test_levels_go_from_blue_over_white_to_orange_and_keep_black_text_legible():
    assert on_white(0) == (255, 255, 255)
    for level in LEVELS:
        red, _, blue = on_white(level)
        assert np.sign(red - blue) == np.sign(level)
        parts = np.array(on_white(level)) / 255
        light = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        assert (np.dot([0.2126, 0.7152, 0.0722], light) + 0.05) / 0.05 > 7  # contrast by WCAG 2, level AAA


@pytest.mark.parametrize(
    ("texts", "width", "expected"),
    [
        ([" the", " lob", "ster", " eats", " an", "ch", "ov", "ies"], 14, [" the lobster", " eats", " anchovies"]),
        ([" ab", "cd", "ef", "gh"], 5, [" abcd", "efgh"]),  # a word longer than a line
        (["a", "\n", "b"], 80, ["a\n", "b"]),
        (["e\u0301", "e\u0301", "e\u0301"], 3, ["e\u0301" * 3]),
        (["東", "京", "市"], 5, ["東京", "市"]),  # two columns each
    ],
)
def test_lines_break_before_words_and_keep_every_token(texts, width, expected):
    lines = lines_of([{"text": text} for text in texts], texts, width)
    assert ["".join(text for text, _ in line) for line in lines] == expected


# ---- the terminal


def printed(block, form, **environment):
    file = io.StringIO()
    Style._add.cache_clear()  # rich keeps the codes of the color system that was used first
    is_terminal = {"force_terminal": True} if environment else {}
    print_block(block, form, Console(file=file, width=80, _environ=environment, **is_terminal))
    return file.getvalue()


@pytest.mark.parametrize(
    ("environment", "is_colored"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"COLORTERM": "truecolor", "TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_colors_are_for_terminals_that_want_them_and_others_get_high_weights_in_parentheses(environment, is_colored):
    tokens = ((" the", 0.3), (" lob", 2.0), ("[bold]x[/bold]", 1.0), ("\n", 3.456))
    text = printed(block_of(*tokens), "log", **environment)
    assert "Block 7, mini-batch 3, 24 blocks in the window, tf=log" in text
    numbered = "First the lob(2.00)[bold]x[/bold]↵(3.46)" in text
    assert ("\x1b[" in text, numbered) == (is_colored, not is_colored)


def test_with_colors_each_level_has_its_own_and_high_weights_are_underlined():
    block = block_of((" low", 0.25), (" even", 1.0), (" up", 1.41), (" high", 2.0))
    text = printed(block, "count", COLORTERM="truecolor", TERM="xterm")
    red, green, blue = on_white(-4)
    assert f"First\x1b[30;48;2;{red};{green};{blue}m low\x1b[0m even" in text
    assert re.search(r"\x1b\[30;48;2;\d+;\d+;\d+m up\x1b\[0m\x1b\[4;30;48;2;\d+;\d+;\d+m high\x1b\[0m", text)


# ---- pictures


def pixels(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    return matplotlib.image.imread(buffer)[..., :3]


def test_the_picture_has_the_colors_of_high_and_low_weights():
    strip = " " + "x" * 30
    ends, beyond = (
        pixels(tokens_figure([block_of((strip, high), (strip, low), (strip, 1.0))], "count"))
        for high, low in ((4.0, 0.25), (99.0, 0.01))
    )
    # Above the color bar, which has all colors.
    found = {tuple(color) for color in np.round(ends[: len(ends) // 2] * 255).astype(int).reshape(-1, 3)}
    assert {on_white(4), on_white(-4)} <= found
    np.testing.assert_array_equal(ends, beyond)  # weights off the scale have the colors of its ends


def test_characters_without_a_glyph_and_mathematics_are_drawn_without_a_warning():
    texts = [" 東京", "مرحبا", "🙂", " $x^", "$", "$\\frac{$", "\x00", "नमस्ते", "\ufffd", "<b>", "\n"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = pixels(tokens_figure([block_of(*((text, 2.0) for text in texts))], "binary"))
    assert image.min() < 0.1  # there is text


def test_a_text_too_long_for_a_picture_is_cut():
    texts = tokens_figure([block_of(*[("\n", 1.0)] * (_MOST_LINES + 50))], "count").axes[0].texts
    assert texts[-1].get_text() == "51 more lines do not fit this picture"
    assert len(texts) == 2 + _MOST_LINES  # heading, two tokens of the first line, the other lines, the remark


def test_the_plot_shows_the_shares_and_means_of_each_form():
    bands = pd.DataFrame({"frequency rank": ["1 to 10", "11 to 25"], "% of tokens": [30.0, 70.0]})
    for shift, form in enumerate(WEIGHTS):
        bands[f"% of weight, {form}"] = bands["% of tokens"] + 10 * shift
        bands[f"mean, {form}"] = 1.0 + shift / 10
    shares, means = bands_figure(bands).axes
    heights = [[round(bar.get_height(), 6) for bar in bars] for bars in shares.containers]
    assert heights == [[30, 70], [30, 70], [40, 80], [50, 90]]
    assert {line.get_label(): [*line.get_ydata()] for line in means.lines}["tf=binary"] == [1.2, 1.2]
    assert [label.get_text() for label in shares.get_xticklabels()] == ["1 to 10", "11 to 25"]


# ---- the report


def test_findings_describe_frequent_tokens_parts_of_words_and_split_words():
    bands = pd.DataFrame({"frequency rank": ["1 to 10"], "% of tokens": [20.0]})
    bands = bands.assign(**{"% of weight, count": 35.0, "% of weight, log": 20.0, "% of weight, binary": 10.0})
    parts = pd.DataFrame({"token": ["starts a word", "continues a word"], "weight, count": [1.2, 0.8]})
    splits = {"idf, tokens": [2.0, 2.5], "idf, word": [2.1, 4.0], "weight, count": [1.1, 0.7]}
    assert findings("count", bands, parts, pd.DataFrame(splits, index=[1, 2])) == (
        "With tf=count, the 10 most frequent tokens hold 20.0 % of the tokens and 35.0 % of the weight: raw counts "
        "lift frequent tokens here.",
        "With tf=log, the 10 most frequent tokens hold 20.0 % of the tokens and 20.0 % of the weight: 1 + ln count "
        "hardly changes frequent tokens here.",
        "With tf=binary, the 10 most frequent tokens hold 20.0 % of the tokens and 10.0 % of the weight: idf alone "
        "lowers frequent tokens here.",
        "Tokens that start a word weigh 1.20 on average, tokens that continue one 0.80 (tf=count).",
        "Words of two tokens would have a mean idf of 4.00 if they were one token; their tokens have 2.50: the split "
        "hides that they are rare. These tokens weigh 0.70 on average, words of one token 1.10 (tf=count).",
    )
    first, *_, last = findings("binary", bands, parts[:0].assign(**{"weight, binary": []}), pd.DataFrame())
    assert first.startswith("With tf=binary")
    assert last.startswith("With tf=log")  # no words, no sentences about words


def test_rankings_have_the_frequent_tokens_with_the_highest_and_lowest_mean_weights(made):
    tokens = made.all_tokens.frame
    assert tokens["token"].tolist()[0] == "␣the"
    frequent = tokens[tokens["count"] >= 2].sort_values("weight, count")
    up, down = frequent[frequent["weight, count"] > 1], frequent[frequent["weight, count"] < 1]
    tables = {table.name: [row[1] for row in table.rows] for table in made.report.tables}
    assert tables["most_up_weighted"] == up["id"].tolist()[::-1] != []
    assert tables["most_down_weighted"] == down["id"].tolist() != []


# ---- the page


@pytest.fixture(scope="module")
def page_file(made, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "index.html"
    file.write_text(html_page(made.report, **tokens_section(made.blocks, "count")), encoding="utf-8")
    return file


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_the_page_fits_its_window_and_asks_for_nothing(size, dark, browser, page_file, made):
    browser.open(page_file, size=size, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    assert browser.messages() == []
    assert {url for url in browser.requests() if not url.startswith(("data:", "about:"))} == {page_file.as_uri()}
    brightness = browser.screenshot().mean()
    assert brightness < 0.4 if dark else brightness > 0.75
    shown = browser.run("return [...document.querySelectorAll('.tokens span')].map((t) => t.textContent)")
    assert shown == [readable(token["text"]) for block in made.blocks for token in block]
    assert HOSTILE in shown


def test_a_token_shows_its_numbers_and_its_color_in_the_chosen_form(browser, page_file, made):
    browser.open(page_file)
    details = "return document.getElementById('details').textContent"
    spans = browser.driver.find_elements(By.CSS_SELECTOR, ".tokens span")
    # The event itself: a busy browser handles a moved pointer later or not at all.
    browser.run("arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", spans[3])
    token = made.blocks[0][3]
    weights = ", ".join(f"{token[column]:.2f} ({form})" for form, column in WEIGHTS.items())
    assert browser.run(details).endswith(
        f"(id {token['id']}): {token['tf']} in this block, in {token['df']} of {token['documents']} blocks, "
        f"idf {token['idf']:.2f}; weight {weights}"
    )
    browser.run("arguments[0].focus()", spans[0])
    assert "never a label" in browser.run(details)
    spans[0].send_keys(Keys.ARROW_RIGHT)
    assert f"id {made.blocks[0][1]['id']}" in browser.run(details)
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    spans[0].send_keys(Keys.ARROW_LEFT)  # there is no token before the first
    assert browser.driver.switch_to.active_element == spans[0]
    names = {None: "unweighted", 0: "even"}
    names |= {level: f"{'up' if level > 0 else 'down'}{abs(level)}" for level in LEVELS if level}
    for form in ("count", "binary", "log"):
        browser.driver.find_element(By.CSS_SELECTOR, f"input[value={form}]").click()
        classes = browser.run("return [...document.querySelectorAll('.tokens span')].map((t) => t.className)")
        assert classes == [names[level_of(token, form)] for block in made.blocks for token in block]
    script = """
    const style = getComputedStyle(document.querySelector('.legend .' + arguments[0]));
    return [style.borderBottomWidth, style.backgroundColor];
    """
    shown = {name: browser.run(script, name) for name in ("down4", "even", "up1", "up2", "up3", "up4")}
    assert [width for width, _ in shown.values()] == ["0px", "0px", "0px", "1px", "2px", "3px"]
    assert shown["down4"][1] == "rgba(0, 114, 178, 0.65)"
    assert shown["up1"][1] == "rgba(213, 94, 0, 0.16)"
