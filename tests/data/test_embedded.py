import ast
import gc
import os
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from transformers import AutoTokenizer

from tfidf_tune.data import _embedded, embedded_documents, train_embedded_tokenizer


def test_the_splits_share_no_document():
    train, validation = embedded_documents("train"), embedded_documents("validation")
    assert not set(train) & set(validation)
    assert 0.05 < len(validation) / len(train + validation) < 0.15


def test_documents_are_distinct_and_not_short():
    documents = embedded_documents("train")
    assert len(documents) == len(set(documents))
    assert min(map(len, documents)) >= 200


def test_there_is_about_a_megabyte_or_more():
    assert sum(map(len, embedded_documents("train"))) > 1_000_000


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A folder that stands for the standard library, and a cache of its own."""
    folder = tmp_path / "library"
    folder.mkdir()
    monkeypatch.setattr(_embedded.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setenv("TFIDF_TUNE_CACHE", str(tmp_path / "cache"))
    yield folder
    _embedded._splits.cache_clear()


def _docstrings():
    """As a process that has just started reads them."""
    _embedded._splits.cache_clear()
    return embedded_documents("docstrings_train")


def _write(file, beginning):
    """A module whose docstring is in the training split; gives that."""
    texts = (f"{beginning} {'word ' * 40}{number:02}" for number in range(99))
    text = next(text for text in texts if not _embedded._is_validation(text))
    file.write_text(f'"""{text}"""')
    return text


def test_the_standard_library_is_parsed_once_and_not_by_each_process(monkeypatch):
    _embedded._splits.cache_clear()
    first = {split: embedded_documents(split) for split in ("train", "validation")}
    monkeypatch.setattr(_embedded.ast, "parse", lambda source: pytest.fail("parsed again"))
    _embedded._splits.cache_clear()
    assert {split: embedded_documents(split) for split in first} == first


def test_what_is_cached_is_what_the_files_say():
    assert _embedded._cached_docstrings() == _embedded._docstrings_of(_embedded._standard_library_files())


def test_a_standard_library_that_has_changed_is_read_anew(library):
    old = _write(library / "a.py", "old")
    assert _docstrings() == [old]
    size, time = (library / "a.py").stat().st_size, (library / "a.py").stat().st_mtime_ns

    new = _write(library / "a.py", "new")
    assert (library / "a.py").stat().st_size == size
    os.utime(library / "a.py", ns=(time + 1, time + 1))
    assert _docstrings() == [new]

    longer = _write(library / "a.py", "longer")
    os.utime(library / "a.py", ns=(time + 1, time + 1))
    assert _docstrings() == [longer]

    another = _write(library / "b.py", "another")
    assert _docstrings() == [longer, another]
    (library / "a.py").unlink()
    assert _docstrings() == [another]


def test_where_nothing_can_be_cached_the_corpus_is_the_same(library, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TFIDF_TUNE_CACHE", str(tmp_path / "file"))
    text = _write(library / "a.py", "uncached")
    assert _docstrings() == [text]


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text('["cut o')])
def test_a_damaged_cache_does_no_harm(library, tmp_path, damage):
    text = _write(library / "a.py", "whole")
    assert _docstrings() == [text]
    (file,) = (tmp_path / "cache").glob("*/docstrings.json")
    damage(file)
    assert _docstrings() == [text]


def test_a_user_without_a_home_has_the_corpus_too(library, monkeypatch):
    monkeypatch.delenv("TFIDF_TUNE_CACHE")
    monkeypatch.setattr(Path, "expanduser", _no_home)
    text = _write(library / "a.py", "homeless")
    assert _docstrings() == [text]


def _no_home(path):
    raise RuntimeError("Could not determine home directory.")


def test_help_topics_and_docstrings_are_in():
    documents = embedded_documents("train") + embedded_documents("validation")
    assert any(text.startswith('The "for" statement') for text in documents)
    assert any(text.startswith("Wrap a single paragraph of text, returning a list") for text in documents)


def test_docstrings_of_modules_classes_methods_and_nested_functions_are_found():
    source = '"""M"""\nclass C:\n  """C"""\n  def f(self):\n    """F\n      indented"""\n    async def g(): "G"\n'
    assert list(_embedded._docstrings([ast.parse(source)])) == ["M", "C", "F\nindented", "G"]


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="splits 'train', 'validation', 'reference_train', .*, not 'test'"):
        embedded_documents("test")


def test_slices_of_a_split_are_those_of_datasets():
    train, validation = embedded_documents("train"), embedded_documents("validation")
    share = round(0.6 * len(train))

    assert embedded_documents("train[:60%]") == train[:share]
    assert embedded_documents("train[60%:]") == train[share:]
    assert embedded_documents("validation[:20]") == validation[:20]
    assert embedded_documents("validation[-5:]") == validation[-5:]
    assert embedded_documents("validation[3:7]+train[:2]") == validation[3:7] + train[:2]
    assert 0 < share < len(train)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_the_two_kinds_of_text_make_up_each_split(part):
    both, reference, docstrings = (embedded_documents(f"{kind}{part}") for kind in ("", "reference_", "docstrings_"))
    known = {text.strip() for text in topics.values()}
    assert reference + docstrings == both
    assert reference == [text for text in both if text in known]
    assert len(reference) >= 5
    assert len(docstrings) > len(reference)
    assert embedded_documents(f"reference_{part}[:3]") == reference[:3]


@pytest.mark.parametrize("split", ["test[:5]", "train[5]", "train[:101%]", "train[:x]", ""])
def test_a_slice_that_is_none_is_refused(split):
    with pytest.raises(ValueError, match=r"splits 'train', 'validation', .*, not '.*'; a slice of one is written"):
        embedded_documents(split)


@pytest.mark.parametrize("split", ["train[5:5]", "validation[50%:20%]", "train[1000000:]"])
def test_a_slice_without_a_document_is_refused(split):
    with pytest.raises(ValueError, match=r"no document of the embedded corpus is in '.*': 'train' has \d+, 'valid"):
        embedded_documents(split)


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collection_is_afterwards_as_it_was(before):
    try:
        (gc.enable if before else gc.disable)()
        with _embedded._garbage_collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == before
    finally:
        gc.enable()


def test_the_tokenizer_loads_in_transformers_with_eos_and_pad(embedded_tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(str(embedded_tokenizer_folder))
    assert len(tokenizer) == 512
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None


def test_the_tokenizer_spells_any_text(tokenizer):
    text = "naïve 東京 🙂\n\t\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_is_the_same_each_time(embedded_tokenizer_folder, tmp_path):
    again = train_embedded_tokenizer(tmp_path / "again", vocab_size=512)
    assert (again / "tokenizer.json").read_bytes() == (embedded_tokenizer_folder / "tokenizer.json").read_bytes()


def test_a_tokenizer_that_is_there_is_kept(embedded_tokenizer_folder, monkeypatch):
    monkeypatch.setattr(_embedded, "embedded_documents", lambda split: pytest.fail("trained again"))
    assert train_embedded_tokenizer(embedded_tokenizer_folder, vocab_size=512) == embedded_tokenizer_folder


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

    monkeypatch.setattr(_embedded.PreTrainedTokenizerFast, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no space left"):
        train_embedded_tokenizer(tmp_path / "tokenizer", vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_long_passages_are_enough_for_a_demo(tokenizer):
    """An experiment on the embedded corpus alone needs targets and controls of 256 tokens."""
    lengths = np.array([len(ids) for ids in tokenizer.encode_batch(embedded_documents("train"))])
    assert (lengths >= 256).sum() >= 200
