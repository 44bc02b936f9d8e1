"""The embedded corpus: its file is the one the documented figures were measured on, splits, slices,
tokenizer.
"""

import pytest
from transformers import AutoTokenizer

from tfidf_tune.data import embedded_documents, train_embedded_tokenizer


def test_slices_of_a_split_are_those_of_datasets():
    train = embedded_documents("train")
    validation = embedded_documents("validation")
    share = round(0.6 * len(train))

    assert embedded_documents("train[:60%]") == train[:share]
    assert embedded_documents("train[60%:]") == train[share:]
    assert embedded_documents("validation[:20]") == validation[:20]
    assert embedded_documents("validation[-5:]") == validation[-5:]
    assert embedded_documents("validation[3:7]+train[:2]") == validation[3:7] + train[:2]
    assert embedded_documents("reference_train[:3]") == train[:3]


def test_splits_and_slices_without_documents_are_refused():
    unknown = ("test", "test[:5]", "train[5]", "train[:101%]", "train[:x]", "")
    for split in (*unknown, "train[5:5]", "validation[50%:20%]", "train[1000000:]"):
        with pytest.raises(
            ValueError,
            match=r"no document of the embedded corpus is in '.*': .*'train': \d+, 'valid",
        ):
            embedded_documents(split)


def test_the_tokenizer_is_reproducible_and_kept_and_any_other_folder_is_refused(
    embedded_tokenizer_folder, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(str(embedded_tokenizer_folder))
    assert (len(tokenizer), tokenizer.bos_token) == (512, None)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    text = "naïve 東京 🙂\n\t\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text

    file = embedded_tokenizer_folder / "tokenizer.json"
    again = tmp_path / "tokenizer.json"
    train_embedded_tokenizer(tmp_path, vocab_size=512)  # an empty folder is filled
    assert again.read_bytes() == file.read_bytes()
    before = file.stat().st_mtime_ns
    assert (
        train_embedded_tokenizer(embedded_tokenizer_folder, vocab_size=512)
        == embedded_tokenizer_folder
    )
    assert file.stat().st_mtime_ns == before
    again.rename(tmp_path / "notes")
    for folder in (embedded_tokenizer_folder, tmp_path):
        with pytest.raises(ValueError, match="holds no tokenizer of 600 tokens"):
            train_embedded_tokenizer(folder, vocab_size=600)
