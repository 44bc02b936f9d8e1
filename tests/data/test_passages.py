import errno
import json
from dataclasses import asdict, replace

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
    control = replace(TARGET, id="control-0000", kind="control", num_injections=0, positions=[])
    write_probe_file(tmp_path / "new" / "probe.jsonl", [TARGET, control])
    assert read_probe_file(tmp_path / "new" / "probe.jsonl") == [TARGET, control]


def test_positions_may_be_unknown(tmp_path):
    passage = replace(TARGET, positions=[])
    write_probe_file(tmp_path / "probe.jsonl", [passage])
    assert read_probe_file(tmp_path / "probe.jsonl") == [passage]


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


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    file = tmp_path / "probe.jsonl"
    write_probe_file(file, [TARGET])

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")  # as the system says it: without a name

    monkeypatch.setattr("tfidf_tune._files.sync_to_disk", full)
    with pytest.raises(OSError, match=r"cannot write the probe file '.*/probe\.jsonl': No space left on device"):
        write_probe_file(file, [replace(TARGET, text="another")])
    assert read_probe_file(file) == [TARGET]
    with pytest.raises(OSError, match=r"cannot write the probe file '.*/probe\.jsonl/probe\.jsonl': "):
        write_probe_file(file / "probe.jsonl", [TARGET])
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such probe file: .*gone\.jsonl"):
        read_probe_file(tmp_path / "gone.jsonl")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "probe.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"probe\.jsonl' is empty"):
        read_probe_file(tmp_path / "probe.jsonl")


@pytest.mark.parametrize("line", ["{oops", "[" * 100_000, '{"id": ' + "9" * 5000 + "}", "\\xff"])
def test_a_line_that_is_not_json_is_named(tmp_path, line):
    (tmp_path / "probe.jsonl").write_text(f"{json.dumps(asdict(TARGET))}\n\n{line}\n")
    with pytest.raises(
        ValueError, match=r"probe\.jsonl, line 3 is not JSON \(.*\): a probe file has a passage in each"
    ):
        read_probe_file(tmp_path / "probe.jsonl")


@pytest.mark.parametrize("line", ['{"text": "a"}', "[1]", json.dumps(asdict(TARGET) | {"model": "mine"})])
def test_a_line_that_is_no_passage_is_named(tmp_path, line):
    (tmp_path / "probe.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"probe\.jsonl, line 1 is not a passage .* needs the keys \['id', .*found"):
        read_probe_file(tmp_path / "probe.jsonl")


def test_probe_files_that_were_joined_are_refused_with_the_remedy(tmp_path):
    file = tmp_path / "probe.jsonl"
    write_probe_file(file, [TARGET, replace(TARGET, id="target-0001")])
    file.write_bytes(file.read_bytes() * 2)
    with pytest.raises(
        ValueError,
        match=r"probe\.jsonl, line 3: the id 'target-0000' is already used on line 1\..* make one file from all texts",
    ):
        read_probe_file(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "Target"}, "kind must be 'target' or 'control', got 'Target'"),
        ({"kind": None}, "kind must be 'target' or 'control', got None"),
        ({"kind": ["target"]}, "kind must be 'target' or 'control', got "),
        ({"id": 7}, "id must be text, got 7"),
        ({"text": None}, "text must be text, got None"),
        ({"source": ["a"]}, r"source must be text, got \['a'\]"),
        ({"id": "\ud800"}, r"id must be text, got '\\ud800'"),
        ({"token_ids": []}, r"token_ids must be a list of token ids and not empty, got \[\]"),
        ({"token_ids": "5 3 8"}, "token_ids must be a list of token ids and not empty, got '5 3 8'"),
        *(
            (
                {"token_ids": [5, wrong, 8]},
                rf"token_ids\[1\] must be a whole number from 0 to 2147483647, got {wrong!r}",
            )
            for wrong in (-3, 1.0, "7", None, True, 2**31, float("nan"))
        ),
        *(
            ({"num_injections": wrong}, f"num_injections must be a whole number from 0 to {2**53}, got {wrong!r}")
            for wrong in (1.5, -1, None, "2", True)
        ),
        ({"num_injections": 10**400}, r"num_injections must be a whole number from 0 to \d+, got 10{10,}\.\.\.0+$"),
        ({"num_injections": 3}, "there are 2 positions, but num_injections is 3: both must be equal, or positions emp"),
        ({"kind": "control"}, "num_injections of a control must be 0, got 2"),
        *(
            ({"positions": wrong}, r"positions must be a list of pairs \[block or document, offset\], got ")
            for wrong in (None, [1, 0], [[1], [7]], [[1, 0], [7, -1]], [[1, 0], [7, 0.5]], [[1, 0], [7, 2**63]])
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, changes, message):
    wrong = asdict(TARGET) | {"id": "target-0001"} | changes
    (tmp_path / "probe.jsonl").write_text(f"{json.dumps(asdict(TARGET))}\n{json.dumps(wrong)}\n")
    with pytest.raises(ValueError, match=rf"probe\.jsonl, line 2: {message}"):
        read_probe_file(tmp_path / "probe.jsonl")
