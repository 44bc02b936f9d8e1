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


def test_a_probe_file_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "new" / "probe.jsonl"
    control = replace(TARGET, id="control-0000", kind="control", num_injections=0, positions=[])
    unknown_positions = replace(TARGET, id="target-0001", positions=[])
    completion = replace(TARGET, id="target-0002", num_prompt=2)
    write_probe_file(file, [TARGET, control, unknown_positions, completion])
    assert read_probe_file(file) == [TARGET, control, unknown_positions, completion]
    keys = "id kind text token_ids num_injections positions source tokenizer tokenizer_fingerprint"
    lines = file.read_text(encoding="utf-8").split("\n")
    assert [list(json.loads(line)) for line in lines[:4]] == [keys.split()] * 3 + [[*keys.split(), "num_prompt"]]
    assert TARGET.divide(2, 9) == ([5, 3], [8])
    assert TARGET.divide(1, 1, offset=1) == ([3], [8])
    assert replace(TARGET, num_prompt=1).divide(2, 9, offset=1) == ([5], [3, 8])


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    file = tmp_path / "probe.jsonl"
    write_probe_file(file, [TARGET])

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")  # the system's message has no file name

    monkeypatch.setattr("tfidf_tune._files.sync_to_disk", full)
    with pytest.raises(OSError, match=r"cannot write the probe file '.*/probe\.jsonl': No space left on device"):
        write_probe_file(file, [replace(TARGET, text="another")])
    assert read_probe_file(file) == [TARGET]
    with pytest.raises(OSError, match=r"cannot write the probe file '.*/probe\.jsonl/probe\.jsonl': "):
        write_probe_file(file / "probe.jsonl", [TARGET])
    assert list(tmp_path.iterdir()) == [file]


def test_an_invalid_probe_file_is_refused_with_the_line_and_the_remedy(tmp_path):
    file = tmp_path / "probe.jsonl"
    first, joined = asdict(TARGET), json.dumps(asdict(replace(TARGET, id="target-0001")))
    not_json = r"probe\.jsonl, line 3 is not a passage of a probe file: the line: Invalid JSON: "
    not_a_passage = r"probe\.jsonl, line 3 is not a passage of a probe file: .*: "
    with pytest.raises(FileNotFoundError, match=r"no such probe file: .*probe\.jsonl"):
        read_probe_file(file)
    for line, message in (
        ("{oops", not_json),
        ("[" * 100_000, not_json),
        ('{"id": ' + "9" * 5000 + "}", not_json),
        ("\\xff", not_json),
        ('{"text": "a"}', not_a_passage),
        ("[1]", not_a_passage),
        (json.dumps(first | {"model": "mine"}), not_a_passage),
        (
            f"{joined}\n{json.dumps(first)}\n{joined}",
            r"probe\.jsonl, line 4: the id 'target-0000' is already used on line 1\..* make one file from all texts",
        ),
    ):
        file.write_text(f"{json.dumps(first)}\n\n{line}\n")
        with pytest.raises(ValueError, match=message):
            read_probe_file(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"probe\.jsonl' is empty"):
        read_probe_file(file)


def test_a_wrong_value_is_named_with_its_line(tmp_path):
    for changes, message in (
        ({"kind": "Target"}, "kind: Input should be 'target' or 'control', got 'Target'"),
        ({"kind": None}, "kind: .*, got None"),
        ({"kind": ["target"]}, r"kind: .*, got \['target'\]"),
        ({"id": 7}, "id: Input should be a valid string, got 7"),
        ({"text": None}, "text: .*, got None"),
        ({"source": ["a"]}, r"source: .*, got \['a'\]"),
        ({"id": "\ud800"}, r"Invalid JSON: .* hex escape"),
        ({"token_ids": []}, r"token_ids: List should have at least 1 item .*, got \[\]"),
        ({"token_ids": "5 3 8"}, "token_ids: Input should be a valid array, got '5 3 8'"),
        *(
            ({"token_ids": [5, bad, 8]}, rf"token_ids\[1\]: Input should be .*, got {bad!r}")
            for bad in (-3, 1.0, "7", None, True, 2**31, float("nan"))
        ),
        *(({"num_injections": bad}, f"num_injections: .*, got {bad!r}") for bad in (1.5, -1, None, "2", True)),
        ({"num_injections": 10**400}, r"num_injections: Input should be less than .*, got 10{10,}\.\.\.0+$"),
        ({"num_injections": 3}, "positions must be as many as num_injections, or none"),
        ({"kind": "control"}, "num_injections of a control must be 0"),
        *(({"num_prompt": bad}, f"num_prompt: .*, got {bad!r}") for bad in (0, "1", True)),
        ({"num_prompt": 3}, "num_prompt must be less than the 3 token ids"),
        ({"num_prompt": 1, "token_ids": [5]}, "num_prompt must be less than the 1 token ids"),
        *(
            ({"positions": bad}, r"positions.*: .*, got ")
            for bad in (None, [1, 0], [[1], [7]], [[1, 0], [7, -1]], [[1, 0], [7, 0.5]], [[1, 0], [7, 2**63]])
        ),
    ):
        wrong = asdict(TARGET) | {"id": "target-0001"} | changes
        (tmp_path / "probe.jsonl").write_text(f"{json.dumps(asdict(TARGET))}\n{json.dumps(wrong)}\n")
        with pytest.raises(ValueError, match=rf"probe\.jsonl, line 2.*: {message}"):
            read_probe_file(tmp_path / "probe.jsonl")
