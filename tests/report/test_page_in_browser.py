"""Pages in a real browser: what they look like, ask for and do."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from helpers.fakes.rich_report import HOSTILE, rich_report
from helpers.processes.browser import DESKTOP, PHONE
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from tfidf_tune.report import Report, Table, html_page

SORTED = pd.DataFrame(
    {
        "Name": ["row 10", "row 9", "Row 1", "row 2", "row 3"],
        "Size": [9.0, None, 10.0, -1.5, 1e-7],
        "Mixed": pd.Series([3, "b", None, "a", 20], dtype=object),
    }
)
SORT_TABLE = Table("t", "T", SORTED, formats={"Size": ".1f"})

# Every visible text, with the contrast ratio (WCAG 2) of its color and its background.
CONTRASTS = """
const channels = (color) => color.match(/[\\d.]+/g).map(Number);
const luminance = (color) => {
  const [r, g, b] = channels(color).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = (element) => {
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
  const [a, b] = [luminance(getComputedStyle(element).color), luminance(background(element))];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.tagName + " " + texts.currentNode.data]);
}
return found;
"""
WIDER_THAN_THE_WINDOW = """
return Array.from(document.querySelectorAll('main *'))
  .filter((e) => !e.closest('.scroll, .visually-hidden') && e.getBoundingClientRect().right > innerWidth)
  .map((e) => e.outerHTML.slice(0, 200))
"""


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "index.html"
    file.write_text(html_page(rich_report()), encoding="utf-8")
    return file


@pytest.fixture(
    scope="module", params=[(PHONE, True), (DESKTOP, False)], ids=["phone-dark", "desktop-light"]
)
def window(request, browser, report_file):
    """The page, opened once for each window, with what it requested and logged."""
    size, dark = request.param
    browser.open(report_file, size=size, dark=dark)
    logged = {"messages": browser.messages(), "requests": set(browser.requests())}
    return SimpleNamespace(
        run=browser.run, screenshot=browser.screenshot, size=size, dark=dark, **logged
    )


def test_a_page_requests_nothing_logs_nothing_and_runs_no_text(window, report_file, browser):
    assert window.messages == []
    sizes = window.run(
        "return Array.from(document.images, (i) => [i.complete, i.naturalWidth > 100])"
    )
    assert sizes == [[True, True]] * 2
    assert window.requests == {report_file.as_uri(), "data:image/svg+xml;base64"}
    assert browser.driver.title == rich_report().title
    assert HOSTILE in window.run("return document.body.innerText")


def test_every_text_has_enough_contrast(window):
    contrasts = window.run(CONTRASTS)
    assert len(contrasts) > 150
    assert [(round(ratio, 2), text) for ratio, text in contrasts if ratio < 4.5] == []


def test_the_page_and_its_figures_have_the_colors_of_the_scheme(window):
    window.run("scrollTo(0, 0)")
    page = window.screenshot()[2, 2]
    window.run("document.querySelector('img').scrollIntoView({block: 'center'})")
    left, top = window.run(
        "const r = document.querySelector('img').getBoundingClientRect(); return [r.left, r.top]"
    )
    figure = window.screenshot()[
        round(top) + 12 : round(top) + 200, round(left) + 12 : round(left) + 260
    ]
    assert page == pytest.approx(
        np.array([21, 24, 28] if window.dark else [251, 251, 250]) / 255, abs=0.005
    )
    if window.dark:
        assert np.median(figure) < 0.2
        assert figure.min(axis=-1).max() > 0.8  # its labels,
        assert figure.max(axis=-1).min() > 0.08  # none of which is black
    else:
        assert np.median(figure) > 0.9
        assert figure.max(axis=-1).min() < 0.2


def test_wide_parts_scroll_and_the_page_does_not(window):
    width = window.size[0]
    assert window.run("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert window.run(WIDER_THAN_THE_WINDOW) == []
    parts = window.run(
        "return Array.from(document.querySelectorAll('.scroll'), (e) => [e.scrollWidth > "
        "e.clientWidth, e.clientWidth])"
    )
    assert len(parts) == 5
    assert all(part <= width for _, part in parts)
    if window.size == PHONE:
        assert parts[0][0]
        assert (
            window.run("return document.querySelector('img').getBoundingClientRect().width") >= 450
        )


def test_a_recited_span_is_marked_without_color_and_for_screen_readers(window, browser):
    mark, aside = (
        browser.driver.find_element(By.CSS_SELECTOR, css)
        for css in ("article mark", "article mark span")
    )
    assert (
        window.run("return getComputedStyle(arguments[0]).textDecorationLine", mark) == "underline"
    )
    assert aside.get_attribute("textContent") == "[recited: "
    assert aside.size == {"width": 1, "height": 1}
    assert window.run("return getComputedStyle(arguments[0]).display", aside) != "none"


def test_a_csv_is_saved_from_the_page(browser, report_file, tmp_path):
    browser.open(report_file)
    browser.driver.find_element(By.CSS_SELECTOR, "summary").click()
    browser.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    browser.driver.find_element(By.CSS_SELECTOR, "a[download='perplexity.csv']").click()
    saved = tmp_path / "perplexity.csv"
    # The limit only ends a test that hangs.
    WebDriverWait(browser.driver, 600).until(lambda _: saved.is_file())
    assert saved.read_bytes().decode() == rich_report().tables[1].csv()
    assert browser.messages() == []


def column(browser, index):
    script = (
        "return Array.from(document.querySelector('tbody').rows, (row) => "
        "row.cells[arguments[0]].textContent)"
    )
    return browser.run(script, index)


def sort_states(browser):
    return browser.run(
        "return Array.from(document.querySelectorAll('thead th'), (h) => "
        "h.getAttribute('aria-sort'))"
    )


@pytest.fixture
def buttons(browser, tmp_path):
    """The headers of a page with a table to sort, which tries to run scripts of its own and to load
    files.
    """
    body = (
        "<p id='p'>text</p><script>document.title = 'pwned'</script><img src='x' "
        "onerror='document.title = 1'>"
    )
    body += (
        "<img src='http://127.0.0.1:9/x.png'><link rel='stylesheet' "
        "href='http://127.0.0.1:9/x.css'>"
    )
    html = html_page(Report("Frame", tables=(SORT_TABLE,)))
    file = tmp_path / "page.html"
    file.write_text(html.replace("</main>", f"{body}</main>"), encoding="utf-8")
    browser.open(file, size=PHONE)
    return browser.driver.find_elements(By.CSS_SELECTOR, "thead th button")


def test_a_page_runs_its_own_script_and_no_other(browser, buttons):
    assert len(buttons) == 3  # its own script has run
    assert browser.driver.title == "Frame"
    messages = browser.messages()
    assert len(messages) == 5  # scripts in an element and an attribute, two images, a style sheet
    assert all(
        "Content Security Policy" in message and "blocked" in message for message in messages
    )


def test_clicks_sort_numbers_as_numbers_and_texts_by_words_with_missing_values_last(
    browser, buttons
):
    name, size, mixed = buttons
    widths = (
        "return Array.from(document.querySelectorAll('thead th'), (h) => "
        "h.getBoundingClientRect().width)"
    )
    before = browser.run(widths)
    size.click()
    assert browser.run(widths) == before  # the arrow has its place
    assert browser.run("return getComputedStyle(arguments[0], '::after').content", size) != "none"
    assert column(browser, 1) == ["-1.5", "0.0", "9.0", "10.0", "\N{EN DASH}"]
    # Rows stay together.
    assert column(browser, 0) == [
        "row 2",
        "row 3",
        "row 10",
        "Row 1",
        "row 9",
    ]
    assert sort_states(browser) == [None, "ascending", None]
    size.click()
    assert column(browser, 1) == ["10.0", "9.0", "0.0", "-1.5", "\N{EN DASH}"]
    assert sort_states(browser) == [None, "descending", None]
    size.click()
    assert sort_states(browser) == [None, "ascending", None]
    mixed.click()
    assert column(browser, 2) == ["3", "20", "a", "b", "\N{EN DASH}"]
    mixed.click()
    assert column(browser, 2) == ["b", "a", "20", "3", "\N{EN DASH}"]
    name.click()
    assert column(browser, 0) == ["Row 1", "row 2", "row 3", "row 9", "row 10"]
    assert sort_states(browser) == ["ascending", None, None]


@pytest.mark.usefixtures("buttons")
def test_headers_are_reached_and_sort_by_keyboard(browser):
    active = "return document.activeElement.textContent"
    browser.driver.find_element(By.CSS_SELECTOR, ".scroll").send_keys(Keys.TAB)
    assert browser.run(active) == "Name"
    browser.driver.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.run(active) == "Size"
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert column(browser, 1)[0] == "-1.5"
    browser.driver.switch_to.active_element.send_keys(Keys.SPACE)
    assert column(browser, 1)[0] == "10.0"
    assert browser.run(active) == "Size"
