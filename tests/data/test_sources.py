import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tfidf_tune.data import embedded_documents, load_documents, load_rows, source_fingerprint
from tfidf_tune.data._tokenizer import MAX_TEXT_BYTES

ROWS = [{"text": "one é"}, {"text": "  two "}, {"text": "   "}, {"text": None}, {"text": "three"}]
TEXTS = ["one é", "two", "three"]
JSON_LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LINES = "one é\n  two \n   \n\nthree".encode()


def parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)


WRITERS = {
    "a.txt": lambda path: path.write_bytes(LINES),
    "a.txt.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.txt.zst": lambda path: path.write_bytes(zstandard.compress(LINES)),
    "a.jsonl": lambda path: path.write_bytes(JSON_LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSON_LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(JSON_LINES)),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.parquet": parquet,
    "A.v2.JSONL": lambda path: path.write_bytes(JSON_LINES),
    "odd [1] *.jsonl": lambda path: path.write_bytes(JSON_LINES),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_gives_its_documents_stripped_and_without_empty_ones(name, tmp_path):
    WRITERS[name](tmp_path / name)
    assert list(load_documents(str(tmp_path / name))) == TEXTS


def test_a_folder_gives_its_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "second"}')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "first"}'))
    (tmp_path / "c.jsonl").write_text("")
    (tmp_path / "README.md").write_text("about these files")
    assert list(load_documents(str(tmp_path))) == ["first", "second"]


def test_another_column_can_be_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "no", "body": "yes"}')
    assert list(load_documents(str(file), column="body")) == ["yes"]


def test_files_are_streamed(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("first\n" + "more\n" * 10)
    assert next(load_documents(str(file))) == "first"


def test_a_name_and_split_do_not_matter_to_local_files(tmp_path):
    """So that a config's hub data set can be replaced by a file with one override."""
    file = tmp_path / "a.txt"
    file.write_text("one")
    assert list(load_documents(str(file), name="wikitext-2-v1", split="validation")) == ["one"]


def test_slices_of_embedded_are_known_by_their_documents():
    size = len(embedded_documents("validation"))
    known = {split: source_fingerprint("embedded", split=split) for split in (
        "validation", "validation[:50%]", "validation[50%:]", f"validation[:{size}]",
    )}  # fmt: skip

    assert known["validation"] == known[f"validation[:{size}]"]
    assert len(set(known.values())) == 3


@pytest.mark.parametrize("split", ["train", "validation", "validation[:3]"])
def test_embedded_gives_the_embedded_corpus(split):
    assert list(load_documents("embedded", split=split)) == embedded_documents(split)


def test_anything_else_is_streamed_from_the_hub(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return iter(ROWS)

    monkeypatch.setattr("tfidf_tune.data._sources.load_dataset", load_dataset)
    assert list(load_documents("owner/name", name="config", split="test")) == TEXTS
    assert calls == [(("owner/name", "config"), {"split": "test", "streaming": True})]


def test_the_hub_error_is_passed_on(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist")

    monkeypatch.setattr("tfidf_tune.data._sources.load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"data set 'owner/name' \(name 'c', split 'test'\).*doesn't exist"):
        list(load_documents("owner/name", name="c", split="test"))


@pytest.mark.parametrize("source", ["./gone", "/gone.txt", "~/gone", "a/b/gone", "gone.jsonl", "data/gone.txt.zst"])
def test_a_missing_path_is_named(source):
    with pytest.raises(FileNotFoundError, match=f"no such file or folder: '{source}'"):
        load_documents(source)


def test_an_unknown_suffix_lists_the_known_ones(tmp_path):
    (tmp_path / "a.csv").write_text("text\none\n")
    with pytest.raises(ValueError, match=r"a\.csv' is of no known format.*\.txt, .*\.jsonl\.zst, .*\.parquet"):
        load_documents(str(tmp_path / "a.csv"))


def test_a_folder_of_mixed_formats_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_bytes(JSON_LINES)
    with pytest.raises(ValueError, match=r"mixes files of the formats \['json', 'text'\]"):
        load_documents(str(tmp_path))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"a\.jsonl' is empty"):
        load_documents(str(tmp_path / "a.jsonl"))


def test_a_missing_column_lists_those_found(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "x"}')
    with pytest.raises(ValueError, match=r"has no column 'text': name one of its columns \['body', 'id'\]"):
        list(load_documents(str(tmp_path / "a.jsonl")))


def test_a_column_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "text": "x"}')
    with pytest.raises(ValueError, match=r"column 'id' of .* holds int, not text.*\['id', 'text'\]"):
        list(load_documents(str(tmp_path / "a.jsonl"), column="id"))


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n nope'),
        ("bad.jsonl.gz", JSON_LINES),
        ("bad.jsonl.zst", JSON_LINES),
        ("bad.parquet", b"PAR1 and no more"),
        ("bad.txt", b"\xff\xfe\xfa latin"),
    ],
)
def test_a_corrupt_file_is_named(name, contents, tmp_path):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=rf"cannot read '.*{name}'; is it a whole \w+ file\? \w+: \S"):
        list(load_documents(str(tmp_path / name)))


LONGEST = "é" * (MAX_TEXT_BYTES // 2)
LONG_ROWS = [
    {"text": "a", "notes": f"{LONGEST}."},
    {"text": LONGEST, "notes": ""},
    {"text": f"{LONGEST}.", "notes": ""},
]


@pytest.mark.parametrize(
    ("name", "write", "place"),
    [
        ("a.txt", lambda path: path.write_text("".join(f"{row['text']}\n\n" for row in LONG_ROWS)), "line 5"),
        ("a.jsonl", lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in LONG_ROWS)), "row 3"),
        ("a.parquet", lambda path: pq.write_table(pa.Table.from_pylist(LONG_ROWS), path), "row 3"),
    ],
)
def test_a_text_too_long_to_be_tokenized_is_named(name, write, place, tmp_path):
    """A tokenizer that does not get the memory that such a text takes ends the process."""
    write(tmp_path / name)
    message = (
        rf"'.*/{name}', {place}: the text has 10,000,001 bytes, at most 10,000,000 can be tokenized: split it into"
    )
    documents = load_documents(str(tmp_path / name))
    assert [next(documents), len(next(documents))] == ["a", len(LONGEST)]
    with pytest.raises(ValueError, match=message):
        next(documents)
    rows = load_rows(str(tmp_path / name), {"text": str})
    if name != "a.txt":
        next(rows), next(rows)
        with pytest.raises(ValueError, match=message):
            next(rows)


def test_memory_that_runs_out_while_a_file_is_read_is_said_with_the_place(tmp_path, monkeypatch):
    def load_dataset(*args, **kwargs):
        yield {"text": "a"}
        raise MemoryError

    (tmp_path / "a.txt").write_text("a\n")
    monkeypatch.setattr("tfidf_tune.data._sources.load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"a\.txt': memory ran out while line 2 was read, it may be very long: split"):
        list(load_documents(str(tmp_path / "a.txt")))


def test_the_fingerprint_of_a_file_is_that_of_its_contents(tmp_path):
    first, copy, other = (tmp_path / name for name in ("a.txt", "copy.txt", "other.txt"))
    first.write_text("one")
    copy.write_text("one")
    other.write_text("two")
    assert source_fingerprint(str(first)) == source_fingerprint(str(copy)) != source_fingerprint(str(other))


def test_the_fingerprint_tells_formats_and_columns_apart(tmp_path):
    (tmp_path / "a.txt").write_bytes(JSON_LINES)
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    as_json = source_fingerprint(str(tmp_path / "a.jsonl"))
    assert as_json != source_fingerprint(str(tmp_path / "a.txt"))
    assert as_json != source_fingerprint(str(tmp_path / "a.jsonl"), column="body")


def test_the_fingerprint_of_a_hub_data_set_is_that_of_its_names():
    names = [("a/b", None, "train"), ("a/c", None, "train"), ("a/b", "x", "train"), ("a/b", None, "test")]
    assert len({source_fingerprint(*each) for each in names}) == len(names)


def test_the_fingerprint_of_the_embedded_corpus_depends_on_the_split():
    assert source_fingerprint("embedded") != source_fingerprint("embedded", split="validation")
