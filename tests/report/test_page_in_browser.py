"""Pages in a real browser: what they look like, ask for and do."""

from pathlib import Path

import numpy as np
import pytest
from browser import DESKTOP, PHONE, find_chromium
from rich_report import HOSTILE, rich_report
from run_fakes import grown_runs, results
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from tfidf_tune.report import Column, Report, Table, comparison_report, html_page
from tfidf_tune.report._document import csv_text

WINDOWS = [pytest.param(PHONE, True, id="phone-dark"), pytest.param(DESKTOP, False, id="desktop-light")]
SORT_TABLE = Table(
    "t",
    "T",
    (Column("Name"), Column("Size", ".1f"), Column("Mixed")),
    (("row 10", 9.0, 3), ("row 9", None, "b"), ("Row 1", 10.0, None), ("row 2", -1.5, "a"), ("row 3", 1e-7, 20)),
)

# Every text that is seen, with the contrast ratio (WCAG 2) of its colour and the ground it stands on.
CONTRASTS = """
const channels = (color) => color.match(/[\\d.]+/g).map(Number);
const luminance = (color) => {
  const [r, g, b] = channels(color).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const color = getComputedStyle(element).backgroundColor;
    if (channels(color)[3] !== 0) return color;
  }
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const found = [];
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || !element.checkVisibility() || element.closest(".visually-hidden")) continue;
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.tagName + " " + texts.currentNode.data]);
}
return found;
"""


@pytest.fixture(scope="module")
def report_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("report") / "index.html"
    file.write_text(html_page(rich_report()), encoding="utf-8")
    return file


@pytest.fixture
def table_file(tmp_path) -> Path:
    file = tmp_path / "table.html"
    report = Report(title="T", statements=(), tables=(SORT_TABLE,), figures=(), examples=(), provenance=())
    file.write_text(html_page(report), encoding="utf-8")
    return file


def column(browser, index: int) -> list[str]:
    script = "return Array.from(document.querySelector('tbody').rows, (row) => row.cells[arguments[0]].textContent)"
    return browser.run(script, index)


def sort_states(browser) -> list[str | None]:
    return browser.run("return Array.from(document.querySelectorAll('thead th'), (h) => h.getAttribute('aria-sort'))")


def buttons(browser) -> list:
    return browser.driver.find_elements(By.CSS_SELECTOR, "thead th button")


@pytest.mark.parametrize(("size", "dark"), WINDOWS)
def test_a_report_asks_for_nothing_prints_nothing_and_runs_no_text(browser, report_file, size, dark):
    browser.open(report_file, size=size, dark=dark)

    assert browser.messages() == []
    sizes = browser.run("return Array.from(document.images, (i) => [i.complete, i.naturalWidth > 100])")
    assert sizes == [[True, True]] * 3
    assert set(browser.requests()) == {report_file.as_uri(), "data:image/svg+xml;base64"}
    assert browser.driver.title == rich_report().title
    assert HOSTILE in browser.run("return document.body.innerText")


@pytest.mark.parametrize(("size", "dark"), WINDOWS)
def test_every_text_has_enough_contrast(browser, report_file, size, dark):
    browser.open(report_file, size=size, dark=dark)

    contrasts = browser.run(CONTRASTS)

    assert len(contrasts) > 300
    assert [(round(ratio, 2), text) for ratio, text in contrasts if ratio < 4.5] == []


@pytest.mark.parametrize(("size", "dark"), WINDOWS)
def test_the_page_and_its_figures_have_the_colours_of_the_scheme(browser, report_file, size, dark):
    browser.open(report_file, size=size, dark=dark)
    page_ground = browser.screenshot()[2, 2]
    browser.run("document.querySelector('img').scrollIntoView({block: 'center'})")
    left, top = browser.run("const r = document.querySelector('img').getBoundingClientRect(); return [r.left, r.top]")
    figure = browser.screenshot()[round(top) + 12 : round(top) + 200, round(left) + 12 : round(left) + 260]

    assert page_ground == pytest.approx(np.array([21, 24, 28] if dark else [251, 251, 250]) / 255, abs=0.005)
    if dark:
        assert np.median(figure) < 0.2
        assert figure.min(axis=-1).max() > 0.8  # its labels,
        assert figure.max(axis=-1).min() > 0.08  # none of which is black
    else:
        assert np.median(figure) > 0.9
        assert figure.max(axis=-1).min() < 0.2


def test_on_a_phone_wide_parts_scroll_and_the_page_does_not(browser, report_file):
    browser.open(report_file, size=PHONE)

    assert browser.run("return [innerWidth, document.documentElement.scrollWidth]") == [360, 360]
    widths = browser.run(
        "return Array.from(document.querySelectorAll('.scroll'), (e) => [e.scrollWidth > e.clientWidth, e.clientWidth])"
    )
    assert len(widths) == 8
    assert widths[0][0]
    assert all(width <= 360 for _, width in widths)
    outside = """
    return Array.from(document.querySelectorAll('main *'))
      .filter((e) => !e.closest('.scroll, .visually-hidden') && e.getBoundingClientRect().right > innerWidth)
      .map((e) => e.outerHTML.slice(0, 200))
    """
    assert browser.run(outside) == []
    assert browser.run("return document.querySelector('img').getBoundingClientRect().width") >= 450


def test_on_a_desktop_the_contents_stand_next_to_the_report(browser, report_file):
    browser.open(report_file, size=DESKTOP)
    contents, findings = (
        browser.run("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector)
        for selector in (".contents", ".findings")
    )

    assert browser.run("return document.documentElement.scrollWidth") == 1280
    assert contents["right"] < findings["left"]
    assert contents["width"] == 240
    assert findings["width"] > 850


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_every_link_of_the_contents_brings_its_target_into_view(browser, report_file, size):
    browser.open(report_file, size=size)
    links = browser.driver.find_elements(By.CSS_SELECTOR, ".contents a")

    assert len(links) == 5 + 5 + 3 + 3
    for link in links:
        link.click()
        target = link.get_attribute("href").rpartition("#")[2]
        assert browser.run("return location.hash") == f"#{target}"
        top = browser.run("return document.getElementById(arguments[0]).getBoundingClientRect().top", target)
        assert 0 <= top < size[1], target


def test_a_csv_is_saved_from_the_page(browser, report_file, tmp_path):
    browser.open(report_file)
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    link = browser.driver.find_element(By.CSS_SELECTOR, "a[download='perplexity.csv']")

    link.click()

    saved = tmp_path / "perplexity.csv"
    WebDriverWait(browser.driver, 600).until(lambda _: saved.is_file())
    (table,) = (table for table in rich_report().tables if table.name == "perplexity")
    assert saved.read_bytes().decode() == csv_text(table)
    assert browser.driver.title == rich_report().title
    assert browser.messages() == []


def test_the_main_table_fits_a_window_of_1200_pixels(browser, tmp_path):
    made = comparison_report(results(*grown_runs(num_passages=12, downstream=False)), decoder=lambda checkpoint: None)
    file = tmp_path / "report.html"
    file.write_text(html_page(made), encoding="utf-8")

    browser.open(file, size=(1200, 900))

    script = "const e = document.querySelector('.scroll'); return [e.scrollWidth, e.clientWidth]"
    assert browser.driver.find_element(By.CSS_SELECTOR, "h3").text == "Memorization"
    width, room = browser.run(script)
    assert width <= room


def test_a_recited_span_is_marked_without_colour_and_for_screen_readers(browser, report_file):
    browser.open(report_file)
    mark, aside = (browser.driver.find_element(By.CSS_SELECTOR, css) for css in ("article mark", "article mark span"))

    assert browser.run("return getComputedStyle(arguments[0]).textDecorationLine", mark) == "underline"
    assert aside.get_attribute("textContent") == "[recited: "
    assert aside.size == {"width": 1, "height": 1}
    assert browser.run("return getComputedStyle(arguments[0]).display", aside) != "none"


def test_texts_run_in_their_own_direction_and_an_empty_one_says_so(browser, report_file):
    browser.open(report_file)
    texts = (
        "return Array.from(document.querySelectorAll('.text p'), (p) => [getComputedStyle(p).direction, p.textContent])"
    )
    empty = "return getComputedStyle(Array.from(document.querySelectorAll('.text p')).at(-1), '::before').content"

    arabic = [direction for direction, text in browser.run(texts) if "\N{ARABIC LETTER TEH}" in text]

    assert arabic == ["rtl"] * 3
    assert browser.run(empty) == '"(empty)"'


def test_a_click_sorts_numbers_as_numbers_and_a_second_click_turns_them_round(browser, table_file):
    browser.open(table_file)
    header = buttons(browser)[1]

    header.click()
    assert column(browser, 1) == ["-1.5", "0.0", "9.0", "10.0", "\N{EN DASH}"]
    assert column(browser, 0) == ["row 2", "row 3", "row 10", "Row 1", "row 9"]  # rows stay whole
    assert sort_states(browser) == [None, "ascending", None]

    header.click()
    assert column(browser, 1) == ["10.0", "9.0", "0.0", "-1.5", "\N{EN DASH}"]
    assert sort_states(browser) == [None, "descending", None]

    header.click()
    assert sort_states(browser) == [None, "ascending", None]
    assert browser.messages() == []


def test_texts_sort_by_words_and_numbers_and_what_is_missing_comes_last(browser, table_file):
    browser.open(table_file)
    name, _, mixed = buttons(browser)

    mixed.click()
    assert column(browser, 2) == ["3", "20", "a", "b", "\N{EN DASH}"]
    mixed.click()
    assert column(browser, 2) == ["b", "a", "20", "3", "\N{EN DASH}"]

    name.click()
    assert column(browser, 0) == ["Row 1", "row 2", "row 3", "row 9", "row 10"]
    assert sort_states(browser) == ["ascending", None, None]


def test_headers_are_reached_and_sort_by_keyboard(browser, table_file):
    browser.open(table_file)
    active = "return document.activeElement.textContent"
    keyboard = browser.driver.find_element(By.CSS_SELECTOR, ".scroll")

    keyboard.send_keys(Keys.TAB)
    assert browser.run(active) == "Name"
    browser.driver.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.run(active) == "Size"
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert column(browser, 1)[0] == "-1.5"
    browser.driver.switch_to.active_element.send_keys(Keys.SPACE)
    assert column(browser, 1)[0] == "10.0"
    assert browser.run(active) == "Size"


def test_the_sign_of_a_sorted_column_moves_nothing(browser, table_file):
    browser.open(table_file, size=PHONE)
    widths = "return Array.from(document.querySelectorAll('thead th'), (h) => h.getBoundingClientRect().width)"
    before = browser.run(widths)

    buttons(browser)[1].click()

    assert browser.run(widths) == before
    assert browser.run("return getComputedStyle(arguments[0], '::after').content", buttons(browser)[1]) != "none"


def test_without_scripts_all_is_there_but_sorting(browser, report_file):
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(report_file)
        assert buttons(browser) == []
        assert len(browser.driver.find_elements(By.CSS_SELECTOR, "thead th")) == 10 + 6 + 3 + 8 + 3
        assert "Pythia 1.4B (LoRA)" in browser.driver.find_element(By.TAG_NAME, "table").text
        assert browser.messages() == []
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_on_paper_a_report_is_light_and_has_neither_contents_nor_scrolling(browser, report_file):
    browser.open(report_file)
    browser.emulate("print", dark=True)

    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 250)"
    assert browser.run("return document.querySelector('.contents').checkVisibility()") is False
    assert browser.run("return getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    assert browser.run("return getComputedStyle(document.querySelector('img')).filter") == "none"


def test_a_page_runs_its_own_script_and_no_other(browser, tmp_path):
    file = tmp_path / "page.html"
    body = "<p id='p'>text</p><script>document.title = 'pwned'</script><img src='x' onerror='document.title = 1'>"
    body += "<img src='http://127.0.0.1:9/x.png'><link rel='stylesheet' href='http://127.0.0.1:9/x.css'>"
    html = html_page(Report("Frame", (), (SORT_TABLE,), (), (), ()))
    file.write_text(html.replace("<main>", f"<main>{body}"), encoding="utf-8")

    browser.open(file)

    assert browser.run("return document.querySelectorAll('th button').length") > 0  # its own script has run
    assert browser.driver.title == "Frame"
    messages = browser.messages()
    assert len(messages) == 5  # scripts in an element and an attribute, two images, a style sheet
    assert all("Content Security Policy" in message and "blocked" in message for message in messages)


def test_without_chromium_tests_are_skipped_but_fail_in_continuous_integration(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        find_chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        find_chromium()
