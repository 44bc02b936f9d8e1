"""The page with token weights in a real browser."""

from types import SimpleNamespace

import numpy as np
import pytest
from browser import DESKTOP, PHONE
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tfidf_tune.report import html_page
from tfidf_tune.weighting.view import (
    LEVELS,
    WEIGHTS,
    level_of,
    readable,
    shown_tokens,
    tokens_section,
    weigh_blocks,
    weights_report,
)

HOSTILE = "</span><script>alert(1)</script>\"'&"
TEXTS = dict(enumerate([" the", " lob", "ster", ",", "\n", HOSTILE, " $x$"]))


@pytest.fixture(scope="module")
def made():
    """A report of 20 blocks and two of the blocks."""
    rng = np.random.default_rng(0)
    blocks = rng.choice(len(TEXTS), size=(20, 24), p=np.array([20, 5, 5, 8, 2, 1, 1]) / 42).astype(np.int32)
    blocks[:, 5] = 5
    tokens = weigh_blocks(blocks, vocab_size=len(TEXTS), batch_size=4, num_batches=2)
    shown = [shown_tokens(tokens, block, TEXTS, decode=str) for block in (0, 3)]
    return SimpleNamespace(report=weights_report(tokens, "count", num_batches=2, provenance={}), blocks=shown)


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
