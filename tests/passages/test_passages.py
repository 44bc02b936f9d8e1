import errno
import json
from dataclasses import asdict, replace

import pytest

from tfidf_tune.passages import Passage, read_probe_file, write_probe_file
from tfidf_tune.probe.prompts import cut_passage

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


def test_a_probe_file_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "new" / "probe.jsonl"
    control = replace(TARGET, id="control-0000", kind="control", num_injections=0, positions=[])
    unknown_positions = replace(TARGET, id="target-0001", positions=[])
    completion = replace(TARGET, id="target-0002", num_prompt=2)
    write_probe_file(file, [TARGET, control, unknown_positions, completion])
    assert read_probe_file(file) == [TARGET, control, unknown_positions, completion]
    keys = "id kind text token_ids num_injections positions source tokenizer tokenizer_fingerprint"
    lines = file.read_text(encoding="utf-8").split("\n")
    assert [list(json.loads(line)) for line in lines[:4]] == [keys.split()] * 3 + [
        [*keys.split(), "num_prompt"]
    ]
    assert cut_passage(TARGET, 2, 9) == ([5, 3], [8])
    assert cut_passage(TARGET, 1, 1, offset=1) == ([3], [8])
    assert cut_passage(replace(TARGET, num_prompt=1), 2, 9, offset=1) == ([5], [3, 8])


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    file = tmp_path / "probe.jsonl"
    write_probe_file(file, [TARGET])

    def full(path):
        # The system's message has no file name.
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tfidf_tune._files.sync_to_disk", full)
    with pytest.raises(
        OSError, match=r"cannot write the probe file '.*/probe\.jsonl': No space left on device"
    ):
        write_probe_file(file, [replace(TARGET, text="another")])
    assert read_probe_file(file) == [TARGET]
    with pytest.raises(
        OSError, match=r"cannot write the probe file '.*/probe\.jsonl/probe\.jsonl': "
    ):
        write_probe_file(file / "probe.jsonl", [TARGET])
    assert list(tmp_path.iterdir()) == [file]


def test_an_invalid_probe_file_is_refused_with_the_line_and_the_remedy(tmp_path):
    file = tmp_path / "probe.jsonl"
    first = asdict(TARGET)
    joined = json.dumps(asdict(replace(TARGET, id="target-0001")))
    with pytest.raises(FileNotFoundError, match=r"no such probe file: .*probe\.jsonl"):
        read_probe_file(file)
    for line, message in (
        *(
            (text, "line 3 .*Invalid JSON")
            for text in ("{oops", "[" * 100_000, '{"id": ' + "9" * 5000 + "}", "\\xff")
        ),
        *(
            (text, "line 3 is not a passage")
            for text in ("[1]", json.dumps(first | {"model": "mine"}))
        ),
        (
            f"{joined}\n{json.dumps(first)}\n{joined}",
            "line 4: the id 'target-0000' is already used on line 1",
        ),
    ):
        file.write_text(f"{json.dumps(first)}\n\n{line}\n")
        with pytest.raises(ValueError, match=rf"probe\.jsonl, {message}"):
            read_probe_file(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"probe\.jsonl' is empty"):
        read_probe_file(file)


def test_a_wrong_value_is_named_with_its_line(tmp_path):
    of_one = {"positions": [[0, 0]], "num_injections": 1}
    for changes, message in (
        *(({"kind": bad}, "kind: .*, got ") for bad in ("Target", None)),
        ({"id": "\ud800"}, "Invalid JSON"),
        *(({"token_ids": bad}, "token_ids: .*, got ") for bad in ([], "5 3 8")),
        *(
            ({"token_ids": [5, bad, 8]}, rf"token_ids\[1\]: .*, got {bad!r}")
            for bad in (-3, 1.0, "7", True, 2**31)
        ),
        *(
            ({"num_injections": bad}, "num_injections: .*, got ")
            for bad in (1.5, -1, None, 10**400)
        ),
        ({"num_injections": 3}, "positions must be as many as num_injections"),
        ({"kind": "control"}, "num_injections of a control"),
        ({"num_prompt": 0}, "num_prompt: .*, got 0"),
        ({"num_prompt": 3}, "num_prompt must be less than the 3 token ids"),
        *(
            ({"positions": bad}, r"positions.*: .*, got ")
            for bad in (None, [[1], [7]], [[1, 0], [7, -1]])
        ),
        *((of_one | {"changes": bad}, "changes") for bad in ([[1, 2]], [[1, 2, 3]] * 2, 5)),
    ):
        wrong = asdict(TARGET) | {"id": "target-0001"} | changes
        (tmp_path / "probe.jsonl").write_text(
            f"{json.dumps(asdict(TARGET))}\n{json.dumps(wrong)}\n"
        )
        with pytest.raises(ValueError, match=rf"probe\.jsonl, line 2.*: {message}"):
            read_probe_file(tmp_path / "probe.jsonl")
