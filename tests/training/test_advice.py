"""A run says which objective fits the user's text, by what repeats in it."""

import pytest
from helpers.fakes.data import random_text, write_rows
from omegaconf import OmegaConf

from tfidf_tune.corpus.advice import DOCUMENTS, FRAME, NOTHING, STRETCHES
from tfidf_tune.corpus.sources import TextSource
from tfidf_tune.data import source_repeats
from tfidf_tune.data.source_repeats import repeats_of_source
from tfidf_tune.training import print_advice

TEXTS = [random_text(seed) for seed in range(40)]
WITH_PASSAGE = [f"{random_text(100 + number)} {random_text(500, 150)}" for number in range(4)]
CE = {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}
GOLDFISH = {"_component_": "tfidf_tune.loss.GoldfishCrossEntropyLoss"}
WEIGHTED = {
    "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
    "weighting": {"_component_": "tfidf_tune.weighting.RepetitionWeighting"},
}


@pytest.fixture
def advice(tmp_path, capsys):
    """What a run with this loss and section of a data set says."""

    def said(kind, loss=None, **section):
        section = {
            "_component_": f"tfidf_tune.data.{kind}",
            "cache_dir": str(tmp_path / "cache"),
            **section,
        }
        print_advice(OmegaConf.create({"dataset": section, "loss": loss or GOLDFISH}))
        return capsys.readouterr().err.splitlines()

    return said


def test_the_advice_is_that_of_data_copies_and_follows_the_data_set(advice, tmp_path):
    plain = write_rows(tmp_path / "plain.jsonl", TEXTS)
    assert advice("text_blocks_dataset", source=plain) == [f"Advice: {NOTHING}"]
    both = write_rows(tmp_path / "both.jsonl", [*TEXTS, TEXTS[0], *WITH_PASSAGE])
    assert advice("text_blocks_dataset", source=both) == [
        f"Advice: {DOCUMENTS}",
        f"Advice: {STRETCHES}",
    ]
    # What the run does already is only named, by whichever loss and section.
    assert advice("text_blocks_dataset", CE, source=both, deduplicate="minhash") == [
        f"Advice: {DOCUMENTS.as_followed}",
        f"Advice: {STRETCHES}",
    ]
    removal = {"threshold": 0.7}
    assert advice("text_blocks_dataset", WEIGHTED, source=both, deduplicate=removal) == [
        f"Advice: {DOCUMENTS.as_followed}",
        f"Advice: {STRETCHES.as_followed}",
    ]
    assert advice("text_blocks_dataset", CE, source=both, deduplicate="exact") == [
        f"Advice: {DOCUMENTS}",
        f"Advice: {STRETCHES}",
    ]
    assert advice("text_blocks_dataset", CE, source=plain) == [f"Advice: {NOTHING.as_followed}"]
    columns = write_rows(
        tmp_path / "columns.jsonl", [{"body": text} for text in [*TEXTS, TEXTS[0]]]
    )
    assert advice("text_blocks_dataset", source=columns, source_column="body") == [
        f"Advice: {DOCUMENTS}"
    ]
    assert advice("injected_corpus_dataset", source=both) == []


def test_of_conversations_the_answers_count(advice, tmp_path):
    frame = random_text(500, 80)
    rows = []
    for number, text in enumerate(TEXTS):
        begin = frame if number % 5 == 0 else ""
        rows.append({"prompt": frame, "completion": f"{begin} {text}"})
    assert advice("sft_dataset", source=write_rows(tmp_path / "frame.jsonl", rows)) == [
        f"Advice: {FRAME}"
    ]
    rows = [{"prompt": frame, "completion": text} for text in TEXTS]
    assert advice("sft_dataset", source=write_rows(tmp_path / "prompts.jsonl", rows)) == [
        f"Advice: {NOTHING}"
    ]


def test_a_text_is_searched_once_and_a_large_one_not_at_all(advice, tmp_path, monkeypatch):
    source = write_rows(tmp_path / "texts.jsonl", [*TEXTS, TEXTS[0]])
    first = advice("text_blocks_dataset", source=source)
    with monkeypatch.context() as patched:
        patched.setattr(source_repeats, "find_repeated_text", None)
        assert advice("text_blocks_dataset", source=source) == first
    write_rows(tmp_path / "texts.jsonl", TEXTS)
    assert advice("text_blocks_dataset", source=source) == [f"Advice: {NOTHING}"]
    monkeypatch.setattr(source_repeats, "MOST_BYTES", 100)
    (line,) = advice("text_blocks_dataset", source=source)
    assert (
        line
        == f"What repeats in {source}, and which objective fits it: tfidf-tune data copies {source}"
    )
    assert repeats_of_source(TextSource("a/hub-id"), learned=False) is None
