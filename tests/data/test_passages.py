import json
from dataclasses import asdict

import pytest

from tfidf_tune.data import Passage, read_probe_file, write_probe_file

TARGET = Passage(
    id="target-0000",
    kind="target",
    text="line\u2028separator, é\nand line end",
    token_ids=[5, 3, 8],
    num_injections=2,
    positions=[[1, 0], [7, 250]],
    source="corpus.txt",
    tokenizer="some/tokenizer",
    tokenizer_fingerprint="0123456789abcdef",
)


def test_what_is_written_is_read(tmp_path):
    write_probe_file(tmp_path / "new" / "probe.jsonl", [TARGET, TARGET])
    assert read_probe_file(tmp_path / "new" / "probe.jsonl") == [TARGET, TARGET]


def test_a_line_holds_a_passage_with_exactly_the_agreed_keys(tmp_path):
    write_probe_file(tmp_path / "probe.jsonl", [TARGET])
    keys = "id kind text token_ids num_injections positions source tokenizer tokenizer_fingerprint"
    assert list(json.loads((tmp_path / "probe.jsonl").read_text(encoding="utf-8"))) == keys.split()


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path):
    file = tmp_path / "probe.jsonl"
    write_probe_file(file, [TARGET])

    def breaks_off():
        yield TARGET
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_probe_file(file, breaks_off())
    assert read_probe_file(file) == [TARGET]
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such probe file: .*gone\.jsonl"):
        read_probe_file(tmp_path / "gone.jsonl")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "probe.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"probe\.jsonl' is empty"):
        read_probe_file(tmp_path / "probe.jsonl")


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "probe.jsonl").write_text(json.dumps(asdict(TARGET)) + "\n{oops\n")
    with pytest.raises(ValueError, match=r"probe\.jsonl:2 is not JSON"):
        read_probe_file(tmp_path / "probe.jsonl")


@pytest.mark.parametrize("line", ['{"text": "a"}', "[1]"])
def test_a_line_that_is_no_passage_is_named(tmp_path, line):
    (tmp_path / "probe.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"probe\.jsonl:1 is not a passage .* needs the keys \['id', .*found"):
        read_probe_file(tmp_path / "probe.jsonl")
