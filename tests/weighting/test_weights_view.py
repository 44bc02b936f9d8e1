"""The weights of a text's tokens: against loops over plain Python objects, and their page in a real
browser.
"""

import math
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.processes.browser import DESKTOP, PHONE
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tfidf_tune import TFIDFCrossEntropyLoss
from tfidf_tune.commands._weights_view import (
    LEVELS,
    WEIGHTS,
    frequency_bands,
    level_of,
    readable,
    shown_tokens,
    tokens_section,
    weigh_blocks,
    weights_report,
)
from tfidf_tune.data import TextBlocksDataset
from tfidf_tune.report import html_page
from tfidf_tune.training import build_dataloader
from tfidf_tune.weighting import shift_labels

VOCAB_SIZE = 40
NUM_BLOCKS = 50
BLOCK_SIZE = 12
BATCH_SIZE = 4
WINDOW = 3


def random_blocks(num_blocks=NUM_BLOCKS):
    """Token frequencies that fall off as those of text do."""
    rng = np.random.default_rng(0)
    probabilities = 1 / np.arange(1, VOCAB_SIZE + 1)
    ids = rng.choice(
        VOCAB_SIZE, size=(num_blocks, BLOCK_SIZE), p=probabilities / probabilities.sum()
    )
    return ids.astype(np.int32)


def weigh(blocks, **settings):
    settings = {
        "vocab_size": VOCAB_SIZE,
        "batch_size": BATCH_SIZE,
        "num_batches": WINDOW,
    } | settings
    return weigh_blocks(blocks, **settings)


@pytest.fixture(scope="module")
def tokens():
    return weigh(random_blocks())


@pytest.fixture(scope="module")
def labels(tokens):
    return tokens[tokens["tf"] > 0]


@pytest.mark.parametrize(("shuffle", "max_weight"), [(True, None), (False, 1.5)])
def test_weights_are_exactly_those_of_a_training_run(shuffle, max_weight):
    blocks = random_blocks()
    tokens = weigh(blocks, max_weight=max_weight, shuffle=shuffle, seed=7)
    cfg = SimpleNamespace(
        shuffle=shuffle, batch_size=BATCH_SIZE, collate_fn="torchtune.data.padded_collate_sft"
    )
    run = SimpleNamespace(seed=7, device=torch.device("cpu"))
    loader = build_dataloader(cfg, TextBlocksDataset(blocks), SimpleNamespace(pad_id=0), run)
    for form, column in WEIGHTS.items():
        loss = TFIDFCrossEntropyLoss(num_batches=WINDOW, tf=form, max_weight=max_weight)
        for step, batch in enumerate(loader, start=1):
            shifted = shift_labels(batch["labels"])
            weights = loss.terms(torch.zeros(*shifted.shape, VOCAB_SIZE), shifted).weights.numpy()
            # The rows of the recipe have the order of the sampler, ours that of the text.
            of_step = tokens[tokens["step"] == step]
            ours = {
                tuple(block["id"]): block[column].tolist()[1:]
                for _, block in of_step.groupby("block")
            }
            assert len(ours) == len(batch["labels"])
            for ids, expected in zip(batch["tokens"].tolist(), weights, strict=True):
                assert ours[tuple(ids)] == expected[:-1].tolist()


def test_tf_df_and_idf_are_those_of_the_window_at_the_step_of_the_block(tokens):
    labels_of = {number: block["id"].tolist()[1:] for number, block in tokens.groupby("block")}
    step_of = tokens.groupby("block")["step"].first()
    for number, block in tokens.groupby("block"):
        step = step_of[number]
        window = [
            set(labels_of[other])
            for other in labels_of
            if max(1, step - WINDOW + 1) <= step_of[other] <= step
        ]
        frequency = [sum(token in document for document in window) for token in labels_of[number]]
        assert (block["documents"] == len(window)).all()
        assert block["tf"].tolist() == [
            0,
            *(labels_of[number].count(token) for token in labels_of[number]),
        ]
        assert block["df"].tolist()[1:] == frequency
        idf = [math.log((1 + len(window)) / (1 + df)) + 1 for df in frequency]
        np.testing.assert_allclose(block["idf"].tolist()[1:], idf, rtol=1e-6)


def test_frequency_bands_divide_all_tokens_and_all_weight(labels):
    bands = frequency_bands(labels)
    count = Counter(labels["id"])
    ranked = sorted(count, key=lambda token: (-count[token], token))
    assert bands["frequency rank"].tolist() == ["1 to 10", f"11 to {len(ranked)}"]
    ten = labels[labels["id"].isin(ranked[:10])]
    assert frequency_bands(ten)["frequency rank"].tolist() == ["1 to 10"]
    for band, ids in zip(bands.to_dict("records"), (ranked[:10], ranked[10:]), strict=True):
        inside = np.isin(labels["id"], ids)
        assert band["% of tokens"] == pytest.approx(100 * inside.mean())
        for form, column in WEIGHTS.items():
            weights = labels[column].to_numpy()
            assert band[f"% of weight, {form}"] == pytest.approx(
                100 * weights[inside].sum() / weights.sum()
            )


HOSTILE = "</span><script>alert(1)</script>\"'&"
TEXTS = dict(enumerate([" the", " lob", "ster", ",", "\n", HOSTILE, " $x$"]))


@pytest.fixture(scope="module")
def made():
    """A report of 20 blocks and two of the blocks."""
    rng = np.random.default_rng(0)
    blocks = rng.choice(len(TEXTS), size=(20, 24), p=np.array([20, 5, 5, 8, 2, 1, 1]) / 42).astype(
        np.int32
    )
    blocks[:, 5] = 5
    tokens = weigh_blocks(blocks, vocab_size=len(TEXTS), batch_size=4, num_batches=2)
    shown = [shown_tokens(tokens, block, TEXTS, decode=str) for block in (0, 3)]
    return SimpleNamespace(
        report=weights_report(tokens, "count", num_batches=2, provenance={}), blocks=shown
    )


def test_tokens_are_readable_and_harmless():
    for text, shown in {
        " ": "␣",
        "\r\n\t": "␍↵⇥",
        "\x1b[31m": "\\u001b[31m",
        "a\u202eb": "a\\u202eb",
        "\u00a0x": "\\u00a0x",
        "\U000e0001": "\\U000e0001",
        "\u0301": "◌\u0301",
        "": "∅",
    }.items():
        assert readable(text) == readable(text, mark_spaces=True) == shown
    assert readable(" the") == " the"
    assert readable(" the", mark_spaces=True) == "␣the"


@pytest.fixture(scope="module")
def page_file(made, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "index.html"
    file.write_text(
        html_page(made.report, **tokens_section(made.blocks, "count")), encoding="utf-8"
    )
    return file


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_the_page_fits_its_window_and_asks_for_nothing(size, dark, browser, page_file, made):
    browser.open(page_file, size=size, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    assert browser.messages() == []
    assert {url for url in browser.requests() if not url.startswith(("data:", "about:"))} == {
        page_file.as_uri()
    }
    brightness = browser.screenshot().mean()
    assert brightness < 0.4 if dark else brightness > 0.75
    shown = browser.run(
        "return [...document.querySelectorAll('.tokens span')].map((t) => t.textContent)"
    )
    assert shown == [readable(token["text"]) for token in chain.from_iterable(made.blocks)]
    assert HOSTILE in shown


def test_a_token_shows_its_numbers_and_its_color_in_the_chosen_form(browser, page_file, made):
    browser.open(page_file)
    details = "return document.getElementById('details').textContent"
    spans = browser.driver.find_elements(By.CSS_SELECTOR, ".tokens span")
    # The event itself: a busy browser handles a moved pointer later or not at all.
    browser.run(
        "arguments[0].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))", spans[3]
    )
    token = made.blocks[0][3]
    weights = ", ".join(f"{token[column]:.2f} ({form})" for form, column in WEIGHTS.items())
    assert browser.run(details).endswith(
        f"(id {token['id']}): {token['tf']} in this block, in {token['df']} of "
        f"{token['documents']} blocks, idf {token['idf']:.2f}; weight {weights}"
    )
    browser.run("arguments[0].focus()", spans[0])
    assert "never a label" in browser.run(details)
    spans[0].send_keys(Keys.ARROW_RIGHT)
    assert f"id {made.blocks[0][1]['id']}" in browser.run(details)
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    spans[0].send_keys(Keys.ARROW_LEFT)  # there is no token before the first
    assert browser.driver.switch_to.active_element == spans[0]
    names = {None: "unweighted", 0: "even"}
    for level in LEVELS:
        if level:
            direction = "up" if level > 0 else "down"
            names[level] = f"{direction}{abs(level)}"
    for form in ("count", "binary", "log"):
        browser.driver.find_element(By.CSS_SELECTOR, f"input[value={form}]").click()
        classes = browser.run(
            "return [...document.querySelectorAll('.tokens span')].map((t) => t.className)"
        )
        tokens = chain.from_iterable(made.blocks)
        assert classes == [names[level_of(token, form)] for token in tokens]
