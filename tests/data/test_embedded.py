"""The embedded corpus: its file is the one the documented figures were measured on, splits, slices, tokenizer."""

import hashlib
import json
from importlib.resources import files

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tfidf_tune.data import embedded_documents, train_embedded_tokenizer

SIZES = {
    "train": 1997, "validation": 226,
    "reference_train": 71, "reference_validation": 7,
    "docstrings_train": 1926, "docstrings_validation": 219,
}  # fmt: skip


def test_the_text_is_the_one_that_documented_figures_were_measured_on():
    """Any change to the file or to a split changes the figures of the demo, on every Python version."""
    splits = {name: embedded_documents(name) for name in SIZES}
    digest = hashlib.sha256(json.dumps(splits).encode()).hexdigest()
    assert {name: len(texts) for name, texts in splits.items()} == SIZES
    assert digest == "e926c481ff4fc1bcd2933c620f97c827001b254120481ba91aa5d999cb95b49e"


def test_the_file_is_small_and_its_licence_is_beside_it():
    corpus = files("tfidf_tune.data").joinpath("corpus")
    assert len(corpus.joinpath("python_documentation.jsonl.xz").read_bytes()) < 1_000_000
    licence = corpus.joinpath("LICENSE.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "CPython 3.11.7" in licence
    assert "Changes made to Python" in licence


def test_the_splits_hold_distinct_documents_of_some_length():
    train, validation = embedded_documents("train"), embedded_documents("validation")
    assert len(set(train + validation)) == len(train + validation)
    assert min(map(len, train + validation)) >= 200
    for part, both in (("train", train), ("validation", validation)):
        assert embedded_documents(f"reference_{part}") + embedded_documents(f"docstrings_{part}") == both


def test_help_topics_and_docstrings_are_included():
    documents = embedded_documents("train") + embedded_documents("validation")
    assert any(text.startswith('The "for" statement') for text in documents)
    assert any(text.startswith("Wrap a single paragraph of text, returning a list") for text in documents)


def test_slices_of_a_split_are_those_of_datasets():
    train, validation = embedded_documents("train"), embedded_documents("validation")
    share = round(0.6 * len(train))

    assert embedded_documents("train[:60%]") == train[:share]
    assert embedded_documents("train[60%:]") == train[share:]
    assert embedded_documents("validation[:20]") == validation[:20]
    assert embedded_documents("validation[-5:]") == validation[-5:]
    assert embedded_documents("validation[3:7]+train[:2]") == validation[3:7] + train[:2]
    assert embedded_documents("reference_train[:3]") == train[:3]


@pytest.mark.parametrize("split", ["test", "test[:5]", "train[5]", "train[:101%]", "train[:x]", ""])
def test_a_split_or_slice_that_does_not_exist_is_refused(split):
    with pytest.raises(ValueError, match=r"splits 'train', 'validation', .*, not '.*'; a slice of one is written"):
        embedded_documents(split)


@pytest.mark.parametrize("split", ["train[5:5]", "validation[50%:20%]", "train[1000000:]"])
def test_an_empty_slice_is_refused(split):
    with pytest.raises(ValueError, match=r"no document of the embedded corpus is in '.*': 'train' has \d+, 'valid"):
        embedded_documents(split)


def test_the_tokenizer_loads_in_transformers_with_eos_and_pad(embedded_tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(str(embedded_tokenizer_folder))
    assert len(tokenizer) == 512
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None


def test_the_tokenizer_encodes_any_text(tokenizer):
    text = "naïve 東京 🙂\n\t\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_the_tokenizer_is_deterministic(embedded_tokenizer_folder, tmp_path):
    again = train_embedded_tokenizer(tmp_path / "again", vocab_size=512)
    assert (again / "tokenizer.json").read_bytes() == (embedded_tokenizer_folder / "tokenizer.json").read_bytes()


def test_an_existing_tokenizer_is_kept(embedded_tokenizer_folder):
    file = embedded_tokenizer_folder / "tokenizer.json"
    before = file.stat().st_mtime_ns
    assert train_embedded_tokenizer(embedded_tokenizer_folder, vocab_size=512) == embedded_tokenizer_folder
    assert file.stat().st_mtime_ns == before


def test_an_empty_folder_is_filled(tmp_path):
    assert (train_embedded_tokenizer(tmp_path, vocab_size=300) / "tokenizer.json").is_file()


def test_a_tokenizer_of_another_size_is_refused(embedded_tokenizer_folder):
    with pytest.raises(ValueError, match="holds 512 tokens, not a tokenizer of 600 tokens"):
        train_embedded_tokenizer(embedded_tokenizer_folder, vocab_size=600)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        train_embedded_tokenizer(tmp_path, vocab_size=300)


def test_a_failed_save_leaves_no_folder(tmp_path, monkeypatch):
    def full_disk(self, folder):
        raise OSError("no space left")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no space left"):
        train_embedded_tokenizer(tmp_path / "tokenizer", vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_there_are_enough_long_passages_for_a_demo(tokenizer):
    """An experiment on the embedded corpus needs targets and controls of 256 tokens."""
    lengths = np.array([len(ids) for ids in tokenizer.encode_batch(embedded_documents("train"))])
    assert (lengths >= 256).sum() >= 200
