import gzip
import json
import re
from statistics import median

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers.fakes.data import passage, write_rows

from tfidf_tune._tokenizer import MAX_TEXT_BYTES
from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.corpus.file_deduplication import deduplicate_corpus
from tfidf_tune.data import (
    TextSource,
    load_documents,
    load_rows,
    source_fingerprint,
    text_blocks_dataset,
)
from tfidf_tune.passages import ProbeSpec, make_probe

ROWS = [{"text": "one é"}, {"text": "  two "}, {"text": "   "}, {"text": None}, {"text": "three"}]
TEXTS = ["one é", "two", "three"]
JSON_LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LINES = "one é\n  two \n   \n\nthree".encode()


def parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)


WRITERS = {
    "a.txt": lambda path: path.write_bytes(LINES),
    "a.txt.zst": lambda path: path.write_bytes(zstandard.compress(LINES)),
    "a.jsonl": lambda path: path.write_bytes(JSON_LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(JSON_LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(JSON_LINES)),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.parquet": parquet,
    "odd [1] *.JSONL": lambda path: path.write_bytes(JSON_LINES),
}


def test_documents_of_any_format_are_stripped_and_not_empty(tmp_path):
    for name, write in WRITERS.items():
        write(tmp_path / name)
        assert list(load_documents(str(tmp_path / name))) == TEXTS, name


def test_any_other_source_is_streamed_from_the_hub(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

    def missing(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/name' doesn't exist")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert list(load_documents("owner/name", name="config", split="test")) == TEXTS
    assert calls == [(("owner/name", "config"), {"split": "test", "streaming": True})]
    monkeypatch.setattr("datasets.load_dataset", missing)
    with pytest.raises(
        ValueError, match=r"data set 'owner/name' \(name 'c', split 'test'\).*doesn't exist"
    ):
        list(load_documents("owner/name", name="c", split="test"))


def test_a_document_of_a_text_file_is_a_line_a_paragraph_or_the_file(tmp_path):
    for name, text in (("a.txt", "one\ntwo\n\n\n  three\n"), ("b.txt", "four\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    expected = {
        "line": ["one", "two", "three", "four"],
        "paragraph": ["one\ntwo", "three", "four"],
        "document": ["one\ntwo\n\n\n  three", "four"],
    }
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).rename(tmp_path / "texts" / name)
    for sample_by, documents in expected.items():
        assert list(load_documents(str(tmp_path / "texts"), sample_by=sample_by)) == documents
        assert list(load_documents(str(tmp_path / "a.jsonl"), sample_by=sample_by)) == TEXTS
    fingerprints = {
        source_fingerprint(str(tmp_path / "texts"), sample_by=sample_by) for sample_by in expected
    }
    assert len(fingerprints) == 3
    assert (
        len(
            {
                source_fingerprint(str(tmp_path / "a.jsonl"), sample_by=sample_by)
                for sample_by in expected
            }
        )
        == 1
    )
    with pytest.raises(
        ValueError, match="sample_by is 'page': possible are line, paragraph, document"
    ):
        load_documents(str(tmp_path / "texts"), sample_by="page")


def test_line_ends_within_a_document_stay(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\r\none\r\ntwo\rthree\n\r\nfour\r\n  five\r\r\r\n")
    expected = {
        "line": ["one", "two", "three", "four", "five"],
        "paragraph": ["one\r\ntwo\rthree", "four\r\n  five"],
        "document": ["one\r\ntwo\rthree\n\r\nfour\r\n  five"],
    }
    for sample_by, documents in expected.items():
        assert list(load_documents(str(file), sample_by=sample_by)) == documents


def test_a_text_file_of_short_lines_gives_a_warning_and_sample_by_the_remedy(
    tokenizer, tmp_path, caplog
):
    rows = [f"{passage(seed, 5)}, line {seed}" for seed in range(200)]
    (tmp_path / "play.txt").write_text("\n".join(rows))
    (tmp_path / "play.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    middle = median(len(tokenizer.encode(row, add_bos=False, add_eos=False)) for row in rows)
    assert middle < 30

    given = {"tokenizer": tokenizer, "cache_dir": str(tmp_path / "cache"), "block_size": 16}
    text_blocks_dataset(**given, source=str(tmp_path / "play.txt"), sample_by="document")
    text_blocks_dataset(**given, source=str(tmp_path / "play.jsonl"))
    assert "is a document" not in caplog.text
    text_blocks_dataset(**given, source=str(tmp_path / "play.txt"))
    assert f"play.txt: each line is a document, with a median of {middle:g} tokens" in caplog.text


def test_what_readers_cannot_bear_is_refused_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr("tfidf_tune.corpus.sources._MAX_ROW_BYTES", 1 << 20)
    text = "two " * 300_000
    deep = "[" * 50_000 + "]" * 50_000
    objects = '{"a":' * 50_000 + "1" + "}" * 50_000
    over_lines = deep.replace("[", "[\n")
    short = "two\n" * 300_000
    row = '{"text": "one [[[{\\"[[", "x": [{}, {}]}\n' * 200
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}
    long = "a row has more than 1 MiB: divide it, or remove it"
    utf16 = "is in UTF-16 or UTF-32: convert it.*iconv"
    for name, content, sample_by, message in (
        ("a.jsonl", f'{row}{{"text": "b", "x": {deep}}}\n', "line", "line 201 is not JSON"),
        ("a.jsonl.gz", f'{{"text": "b", "x": {objects}}}\n', "line", "line 1 is not JSON"),
        ("b.jsonl", f'{row}{{"text": "b", "x":\n{over_lines}}}\n', "line", "line 201 is not JSON"),
        ("a.json.zst", f'[{{"text": "b", "x": {objects}}}]', "line", "is not JSON"),
        ("c.jsonl.gz", f'{row}{{"text": "{text}"}}\n{row}', "line", f"line 201: {long}"),
        ("a.txt.zst", f"one\n{text}", "line", f"line 2: {long}"),
        ("b.txt.zst", f"one\n\n{short}", "paragraph", f"line 262146: {long}"),
        ("c.txt", short, "document", f"line 262144: {long}"),
        ("d.txt", "one\n".encode("utf-16"), "line", utf16),
        ("d.jsonl.gz", f"\ufeff{row}".encode("utf-16-be"), "line", utf16),
        ("f.jsonl", row.encode("utf-16-le"), "line", utf16),
        ("e.jsonl", row.encode("utf-32"), "line", utf16),
    ):
        file = tmp_path / name
        packed = compress.get(file.suffix, bytes)(
            content if isinstance(content, bytes) else content.encode()
        )
        file.write_bytes(packed)
        with pytest.raises(ValueError, match=f"{re.escape(str(file))}.*{message}"):
            list(load_documents(str(file), sample_by=sample_by))
    (tmp_path / "all.jsonl").write_text(row)
    (tmp_path / "all.txt").write_text(short)
    assert len(list(load_documents(str(tmp_path / "all.jsonl")))) == 200
    assert len(list(load_documents(str(tmp_path / "all.txt")))) == 300_000


def rows_of(path, *columns):
    return [row.columns for row in load_rows(TextSource(str(path)), *columns)]


def test_values_are_as_they_are_written_and_unused_columns_do_not_matter(tmp_path):
    rows = [{"text": "a", "author": None}] * 3000 + [
        {"text": "b", "author": "A", "n": 2**64},
        {"n": [1, {"m": None}]},
    ]
    rows += [{"text": "1912-04-15", "author": {"x": 1}}, {"text": "2020-01-01T00:00:00Z"}]
    for name in ("a.jsonl", "a.jsonl.gz", "a.json"):
        content = (
            json.dumps(rows)
            if name == "a.json"
            else "".join(f"{json.dumps(row)}\n\n" for row in rows)
        )
        (tmp_path / name).write_bytes(
            gzip.compress(content.encode()) if name.endswith("gz") else content.encode()
        )
        assert rows_of(tmp_path / name, {}, None) == rows
        found = rows_of(tmp_path / name, {"text": str})
        assert [row["text"] for row in found] == [row.get("text") for row in rows]
    # Two members of gzip and two frames of zstd; lone carriage returns; a byte order mark.
    (tmp_path / "b.txt.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbfone\rtwo\r\n") + gzip.compress(b"three")
    )
    (tmp_path / "b.txt.zst").write_bytes(
        zstandard.compress(b"one\ntwo\n") + zstandard.compress(b"three")
    )
    for name in ("b.txt.gz", "b.txt.zst"):
        assert [*load_documents(str(tmp_path / name))] == ["one", "two", "three"]


def test_of_parquet_only_the_columns_that_are_needed_are_read(tmp_path):
    rows = [
        {"text": "a", "tool": {"x": 1, "y": None}, "id": 3},
        {"text": None, "tool": {"x": None, "y": 2}, "id": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for source in (tmp_path / "a.parquet", tmp_path / "saved"):
        assert rows_of(source, {"text": str}) == [{"text": "a"}, {"text": None}]
        assert rows_of(source, {"text": str}, ["id", "none"]) == [
            {"text": "a", "id": 3},
            {"text": None, "id": None},
        ]
        with pytest.raises(
            ValueError, match=r"has no column 'body', only \['id', 'text', 'tool'\]"
        ):
            rows_of(source, {"body": str})


def test_an_arrow_file_is_read_in_both_formats(tmp_path):
    table = pa.Table.from_pylist([{"text": f"row {number}", "id": number} for number in range(50)])
    for name, opened in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with opened(tmp_path / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
        assert (
            rows_of(tmp_path / f"{name}.arrow", {"text": str}) == table.select(["text"]).to_pylist()
        )
        assert rows_of(tmp_path / f"{name}.arrow", {"text": str}, None) == table.to_pylist()
    written = (tmp_path / "file.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(written[:-20])
    with pytest.raises(
        ValueError, match=r"cannot read '.*cut.arrow'; is it a complete arrow file\?"
    ):
        rows_of(tmp_path / "cut.arrow", {"text": str})


def test_a_column_that_only_late_rows_have_is_not_said_to_be_in_none(tmp_path):
    for number, said in (
        (999, ""),
        (1000, " in its first 1,000 rows"),
        (1500, " in its first 1,000 rows"),
    ):
        rows = [{"a": "x"}] * number
        if number == 1500:
            rows.append({"text": "late"})
        file = write_rows(tmp_path / "late.jsonl", rows)
        with pytest.raises(
            ValueError, match=rf"has no column 'text'{said}, only \['a'\]: name one"
        ):
            list(load_documents(file))


def test_a_file_that_a_folder_has_twice_is_refused_by_all_readers(tokenizer, tmp_path):
    folder = tmp_path / "in"
    (folder / "more").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(JSON_LINES)
    (folder / "more" / "b.jsonl").symlink_to(folder / "a.jsonl")
    message = re.escape(f"{folder / 'a.jsonl'} is named twice, perhaps by a link")
    for read in (
        lambda: load_documents(str(folder)),
        lambda: load_rows(TextSource(str(folder)), {}, None),
        lambda: source_fingerprint(str(folder)),
        lambda: text_blocks_dataset(
            tokenizer, source=str(folder), cache_dir=str(tmp_path / "cache")
        ),
        lambda: deduplicate_corpus([str(folder)], tmp_path / "out", Deduplication("exact")),
        lambda: make_probe(tokenizer, ProbeSpec((str(folder),))),
    ):
        with pytest.raises(ValueError, match=message):
            list(read())
    # A link to a file elsewhere is read as that file.
    (folder / "more" / "b.jsonl").unlink()
    (folder / "a.jsonl").rename(tmp_path / "a.jsonl")
    (folder / "a.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert list(load_documents(str(folder))) == TEXTS


def test_a_folder_is_read_with_its_folders_and_what_is_skipped_is_said(tmp_path, caplog):
    (tmp_path / "in" / "more").mkdir(parents=True)
    for name, texts in (
        ("a.jsonl", ["one"]),
        ("more/b.jsonl", ["two", "three"]),
        ("more/c.jsonl", []),
    ):
        (tmp_path / "in" / name).write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    for name in (
        "._a.jsonl",
        "report.json",
        "dataset_infos.json",
        "README.md",
        "more/.hidden",
        "_x.jsonl",
    ):
        (tmp_path / "in" / name).write_text('{"text": "no"}\n')
    (tmp_path / "in" / "link").symlink_to(tmp_path / "in" / "more")
    for _ in range(2):
        assert [*load_documents(str(tmp_path / "in"))] == ["one", "two", "three"]
    assert caplog.messages == [
        f"{tmp_path / 'in'}: 2 files read; skipped: ._a.jsonl, README.md, _x.jsonl, "
        "dataset_infos.json, link and 2 more"
    ]
    # A folder of JSON lists is read without the metadata files of datasets. With a .txt file it has
    # two formats.
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a.json").write_text('[{"text": "one"}]')
    (tmp_path / "lists" / "dataset_infos.json").write_text('{"text": "no"}')
    assert [*load_documents(str(tmp_path / "lists"))] == ["one"]
    (tmp_path / "lists" / "README.txt").write_text("no")
    with pytest.raises(ValueError, match="text of json and text format"):
        load_documents(str(tmp_path / "lists"))


def test_a_data_set_of_a_hub_that_cannot_be_reached_is_named():
    """Tests have no network."""
    with pytest.raises(
        ValueError, match="'owner/texts' is not on this machine, and .* could not be reached: give"
    ):
        list(load_documents("owner/texts"))


def test_an_unreadable_source_is_refused_by_name(tmp_path):
    for source in ("./gone", "~/gone", "a/b/gone", "data/gone.txt.zst"):
        with pytest.raises(FileNotFoundError, match=f"no such file or folder: '{source}'"):
            load_documents(source)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("one")
    for name, contents, column, message in (
        ("a.csv", b"text\none\n", "text", r"a\.csv' has text of no known format"),
        ("mixed/b.jsonl", JSON_LINES, "text", "has text of json and text format"),
        ("a.jsonl", b"", "text", r"a\.jsonl' is empty"),
        ("c.jsonl", b'{"id": 1, "text": "x"}', "id", "c.jsonl', line 1: column 'id' holds int"),
        (
            "bad.jsonl",
            b'{"text": "a"}\n{"text": \n nope',
            "text",
            r"bad\.jsonl', line 2 is not JSON: EOF while",
        ),
        (
            "bad.jsonl.gz",
            JSON_LINES,
            "text",
            r"cannot read '.*bad.jsonl.gz'; is it a complete json file",
        ),
        (
            "bad.txt.zst",
            zstandard.compress(LINES * 100)[:-5],
            "text",
            r"cannot read '.*bad.txt.zst'",
        ),
        (
            "bad.parquet",
            b"PAR1 and no more",
            "text",
            r"cannot read '.*bad.parquet'; is it a complete parquet file\? Arr",
        ),
        (
            "bad.txt",
            b"one\ntwo \xff\n",
            "text",
            r"bad\.txt'; is it a complete text file in UTF-8 .* UnicodeDecodeErr",
        ),
    ):
        file = tmp_path / name
        file.write_bytes(contents)
        with pytest.raises(ValueError, match=message):
            list(load_documents(str(file.parent if "/" in name else file), column=column))


LONGEST = "é" * (MAX_TEXT_BYTES // 2)
LONG_ROWS = [
    {"text": "a", "notes": f"{LONGEST}."},
    {"text": LONGEST, "notes": ""},
    {"text": f"{LONGEST}.", "notes": ""},
]


@pytest.mark.parametrize(("name", "place"), [("a.txt", "line 5"), ("a.parquet", "row 3")])
def test_a_text_too_long_to_be_tokenized_is_named(name, place, tmp_path):
    """A tokenizer without enough memory for such a text ends the process."""
    if name == "a.txt":
        (tmp_path / name).write_text("".join(f"{row['text']}\n\n" for row in LONG_ROWS))
    else:
        pq.write_table(pa.Table.from_pylist(LONG_ROWS), tmp_path / name)
    documents = load_documents(str(tmp_path / name))
    assert [next(documents), len(next(documents))] == ["a", len(LONGEST)]
    with pytest.raises(
        ValueError,
        match=rf"'.*/{name}', {place}: the text has 10,000,001 bytes, at most 10,000,000",
    ):
        next(documents)


def test_the_fingerprint_is_that_of_contents_format_and_names(tmp_path):
    first, copy, other = (tmp_path / name for name in ("a.txt", "copy.txt", "other.txt"))
    for file in (first, copy, other, tmp_path / "a.jsonl"):
        file.write_bytes(b"two" if file == other else JSON_LINES)
    assert source_fingerprint(str(first)) == source_fingerprint(str(copy))
    different = [
        (str(first),),
        (str(other),),
        (str(tmp_path / "a.jsonl"),),
        (str(tmp_path / "a.jsonl"), None, "train", "b"),
        ("a/b",),
        ("a/c",),
        ("a/b", "x"),
        ("a/b", None, "test"),
        *(
            ("embedded", None, split)
            for split in ("train", "validation", "validation[:50%]", "validation[50%:]")
        ),
    ]
    assert len({source_fingerprint(*each) for each in different}) == len(different)


def test_rows_without_text_are_left_out_with_a_warning(tmp_path, caplog):
    file = tmp_path / "mixed.jsonl"
    file.write_text(
        '{"text": "one"}\n{"body": "two"}\n{"text": null}\n{"text": ""}\n{"text": "five"}\n'
    )
    with caplog.at_level("WARNING", logger="tfidf_tune.data"):
        assert list(load_documents(str(file))) == ["one", "five"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: 2 of 5 rows have nothing in column 'text': left out"
    ]
