import dataclasses
import json

import pytest
from analysis_fakes import SAMPLE

from tfidf_tune.analysis import read_samples, write_samples


def test_samples_come_back_as_they_were_written(tmp_path):
    samples = [SAMPLE, dataclasses.replace(SAMPLE, passage_id="wiki-2", generated_ids=[], prefix_match=0, lms=0)]
    write_samples(tmp_path / "samples.jsonl", samples)
    assert read_samples(tmp_path / "samples.jsonl") == samples


def test_each_sample_is_one_line(tmp_path):
    write_samples(tmp_path / "samples.jsonl", [SAMPLE, SAMPLE])
    assert (tmp_path / "samples.jsonl").read_bytes().count(b"\n") == 2


def test_a_failed_write_keeps_the_older_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, [SAMPLE])

    def fail():
        yield SAMPLE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_samples(path, fail())
    assert read_samples(path) == [SAMPLE]
    assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]


@pytest.mark.parametrize(
    "line", ["{", '{"passage_id": "a"}', '{"unknown": 1}', json.dumps(dataclasses.asdict(SAMPLE) | {"lms": 10**9})]
)
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
    path = tmp_path / "samples.jsonl"
    write_samples(path, [SAMPLE])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 2: not a probe sample"):
        read_samples(path)
