import dataclasses
import json
import math

import pytest
from frontier_fakes import grown_records, record
from run_fakes import blocks, controls, evaluation, grown_runs, run, targets, write_run

from tfidf_tune.analysis import (
    LMS,
    PERPLEXITY,
    BlockScore,
    describe_machine,
    load_records,
    provenance_of,
    read_records,
    read_runs,
    records_of,
    write_records,
)

PROVENANCE = {"date": "2026-11-22", "cpu": "a “fast” one"}


@pytest.fixture
def file(tmp_path):
    write_records([record(), record("B", seed=1)], tmp_path / "runs.jsonl", PROVENANCE)
    return tmp_path / "runs.jsonl"


def test_a_record_is_a_checkpoint_of_a_run(tmp_path):
    samples = [*targets(4, 8), *targets(1, 2, prefix_length=50), *controls(1, 0, prefix_length=50)]
    nothing = [*targets(0, 0), *targets(0, 0, prefix_length=50), *controls(0, 0, prefix_length=50)]
    first = evaluation(50, nothing, blocks=blocks(90.0, 3))
    made = run("TF-IDF", [first, evaluation(100, samples, blocks=blocks(20.0, 3))], seed=3, learning_rate=2e-3)
    folder = write_run(tmp_path / "r", made)
    (folder / "trained.json").write_text('{"settings": {"recipe": "lora_finetune"}, "seconds": 7.5}')
    (folder / "config.yaml").write_text("model: {a: 1}\nloss: {_component_: x.YLoss, k: 4}\ncheckpointer: {b: 2}\n")
    half, one = records_of(read_runs([folder]))
    assert (half.progress, half.lms, half.log_perplexity) == (50, 0.0, pytest.approx(math.log(90)))
    assert half.training_seconds == one.training_seconds
    assert (one.model, one.objective, one.learning_rate, one.seed, one.progress) == ("Tiny", "TF-IDF", 2e-3, 3, 100)
    assert (one.recipe, one.loss, one.training_seconds) == ("lora_finetune", {"_component_": "x.YLoss", "k": 4}, 7.5)
    assert (one.lms, one.max_lms, one.control_lms) == (3.75, 8, 0.5)
    assert (one.prefix_match, one.rouge_l, one.verbatim_rate) == (3.75, pytest.approx(375 / 8), 0.25)
    assert one.lms_by_prefix == {32: 6.0, 50: 1.5}
    assert one.lms_by_passage == {"target-0": 2.5, "target-1": 5.0}
    assert (one.log_perplexity, one.num_predictions) == (pytest.approx(math.log(20)), 30)
    assert one.num_injections == (10,)
    assert one.title == "Tiny, TF-IDF, lr 0.002, seed 3"


def test_a_record_agrees_with_the_measures_of_the_comparison():
    runs = grown_runs(seeds=(0, 1), num_passages=4)
    evaluations = [one for made in runs for one in made.evaluations]
    assert len(evaluations) > len(runs)
    for made, one in zip(evaluations, records_of(runs), strict=True):
        assert one.progress == made.progress
        assert one.lms == pytest.approx(LMS.of([made]))
        assert math.exp(one.log_perplexity) == pytest.approx(PERPLEXITY.of([made]))


def test_what_is_not_known_or_measured_is_none():
    bare, unprobed = records_of(
        [run("A", [evaluation(samples=targets(1))]), run("B", [evaluation(blocks=blocks(2.0))])]
    )
    assert (bare.recipe, bare.loss, bare.training_seconds, bare.learning_rate) == (None,) * 4
    assert (bare.log_perplexity, bare.num_predictions, bare.control_lms) == (None, 0, None)
    assert (unprobed.lms, unprobed.max_lms, unprobed.lms_by_passage, unprobed.lms_by_prefix) == (None, None, {}, {})


@pytest.mark.parametrize("likelihood", [math.nan, -math.inf])
def test_a_model_that_diverged_has_an_infinite_perplexity(tmp_path, likelihood):
    made = run("A", [evaluation(samples=targets(1), blocks=(BlockScore(0, 10, -20.0), BlockScore(1, 10, likelihood)))])
    (one,) = records_of([made])
    assert one.log_perplexity == math.inf
    write_records([one], tmp_path / "r.jsonl", {})
    assert read_records(tmp_path / "r.jsonl") == ([one], {})
    assert "Infinity" not in (tmp_path / "r.jsonl").read_text()


def test_only_those_asked_the_same_have_the_same_digest():
    plain = evaluation(samples=targets(1, 2), blocks=blocks(20.0))
    answered = evaluation(samples=reversed(targets(3, 0)), blocks=blocks(30.0))
    shorter = evaluation(samples=targets(1, 2), blocks=blocks(20.0, num_predictions=9))
    other = evaluation(samples=targets(1, 2, prefix_length=50), blocks=blocks(20.0))
    digests = [records_of([run("A", [one])])[0].asked for one in (plain, answered, shorter, other)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_runs_that_were_not_asked_the_same_are_refused_over_learning_rates_too():
    runs = [
        run("A", [evaluation(samples=targets(1, 2))], learning_rate=1e-3),
        run("A", [evaluation(samples=targets(1))], learning_rate=1e-2),
    ]
    with pytest.raises(ValueError, match=r"\(Tiny, lr 0.001, A, 100 %\) and .*\(Tiny, lr 0.01, A, 100 %\) cannot be"):
        records_of(runs)


def test_records_come_back_as_they_were(tmp_path):
    records = [
        *grown_records(),
        record("é “x”\u2028", None, seed=None, learning_rate=None, recipe=None, loss=None, training_seconds=None),
    ]
    records[-1] = dataclasses.replace(records[-1], lms_by_passage={}, lms_by_prefix={}, num_injections=())
    write_records(records, tmp_path / "new" / "runs.jsonl", PROVENANCE)
    assert read_records(str(tmp_path / "new" / "runs.jsonl")) == (records, PROVENANCE)


def test_a_passages_average_is_cut_to_two_decimals_so_that_it_comes_back_exactly(tmp_path):
    samples = [*targets(1), *targets(2, prefix_length=50), *targets(2, prefix_length=100)]
    (one,) = records_of([run("A", [evaluation(samples=samples)])])
    assert (one.lms, one.lms_by_passage) == (pytest.approx(5 / 3), {"target-0": 1.67})
    write_records([one], tmp_path / "r.jsonl", {})
    assert read_records(tmp_path / "r.jsonl") == ([one], {})


def test_700_runs_over_100_passages_stay_below_a_megabyte_and_a_half(tmp_path):
    by_passage = {f"wikitext-target-{i:04d}": i + 0.37 for i in range(100)}
    third = 100 / 3
    floats = dict.fromkeys(
        ("lms", "prefix_match", "rouge_l", "verbatim_rate", "control_lms", "training_seconds"), third
    )
    loss = {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": {"_component_": "a.b" * 20, "k": 4}}
    fields = {"lms_by_prefix": dict.fromkeys((32, 50, 100), third), "lms_by_passage": by_passage, "loss": loss}
    records = [dataclasses.replace(record(seed=seed), **floats, **fields) for seed in range(700)]
    write_records(records, tmp_path / "r.jsonl", PROVENANCE)
    assert (tmp_path / "r.jsonl").stat().st_size < 1_500_000


def changed(file, number, change):
    lines = file.read_text().splitlines()
    lines[number - 1] = change(lines[number - 1])
    file.write_text("".join(f"{line}\n" for line in lines if line is not None))


def without(key):
    return lambda line: json.dumps({name: value for name, value in json.loads(line).items() if name != key})


def with_value(key, value):
    return lambda line: json.dumps(json.loads(line) | {key: value})


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (2, lambda line: line[:-20], "line 2: a damaged record .JSONDecodeError"),
        (3, without("rouge_l"), "line 3: a damaged record .KeyError: 'rouge_l'"),
        (3, without("seed"), "line 3: a damaged record .KeyError: 'seed'"),
        (3, with_value("lms", "4"), "line 3: a damaged record .ValueError: lms is '4', expected a finite number of at"),
        (3, with_value("lms", math.inf), "line 3: a damaged record .ValueError: lms is inf, expected a finite number"),
        (3, with_value("log_perplexity", math.nan), "line 3: .* log_perplexity is nan, expected a finite number"),
        (3, with_value("log_perplexity", -1.0), "line 3: .* log_perplexity is -1.0, expected a finite number of at"),
        (3, with_value("seed", [1]), r"line 3: .* seed is \[1\], expected a whole number"),
        (3, with_value("model", None), "line 3: .* model is None, expected text"),
        (3, with_value("max_lms", 10**400), r"line 3: .* max_lms is 1000000.*, expected a whole number from 0"),
        (3, with_value("num_injections", [True]), "line 3: .* num_injections is True, expected a whole number"),
        (3, lambda line: "[" * 100_000, "line 3: a damaged record .RecursionError"),
        (1, with_value("provenance", {"date": 1}), "not a file of records .ValueError: date is 1, expected text"),
        (3, with_value("lms_by_passage", [1.0]), "line 3: a damaged record .ValueError: zip"),
        (3, with_value("passages", 7), "line 3: a damaged record .IndexError"),
        (3, with_value("extra", 7), "line 3: a damaged record .TypeError: .*'extra'"),
        (3, lambda line: "[]", "line 3: a damaged record"),
        (3, lambda line: "", "line 3: a damaged record"),
        (3, lambda line: None, "promises 2 runs, and there are 1"),
        (1, lambda line: None, "not a file of records .KeyError: 'format'"),
        (1, with_value("format", "tfidf-tune runs, version 9"), "its format is 'tfidf-tune runs, version 9', not"),
        (1, lambda line: "", "not a file of records"),
    ],
    ids=lambda value: None if callable(value) else str(value)[:30],
)
def test_a_damaged_file_is_refused_with_file_line_and_remedy(file, number, change, message):
    changed(file, number, change)
    with pytest.raises(ValueError, match=message) as caught:
        read_records(file)
    assert str(file) in str(caught.value)
    assert "tfidf-tune compare --frontier" in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a file of records"):
        read_records(tmp_path / "x.jsonl")


def test_files_and_folders_are_loaded_together(tmp_path, file):
    write_run(tmp_path / "run", run("Goldfish", [evaluation(samples=targets(1), blocks=blocks(20.0))]))
    write_records([record("C")], tmp_path / "more.jsonl", {"date": "2026-11-23", "cpu": PROVENANCE["cpu"]})
    records, provenance = load_records([tmp_path / "run", file, str(tmp_path / "more.jsonl")])
    assert [one.objective for one in records] == ["CE", "B", "C", "Goldfish"]
    assert provenance["date"].startswith("2026-11-22; 2026-11-23")
    assert provenance["cpu"].startswith(PROVENANCE["cpu"])
    assert provenance["torch"] == "unknown"
    assert load_records([file]) == read_records(file)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_records([tmp_path / "nowhere"])


def test_runs_say_themselves_when_and_on_what_they_were_trained(tmp_path):
    folders = [write_run(tmp_path / name, run(name, [evaluation(samples=targets(1))])) for name in "ABC"]
    for folder, cpu in zip(folders[:2], ("slow", "fast"), strict=True):
        (folder / "trained.json").write_text(json.dumps({"provenance": {"date": "2020-02-02", "cpu": cpu}}))
    assert provenance_of(read_runs(folders[:2])) == {"date": "2020-02-02", "cpu": "slow; fast"}
    assert load_records(folders[:2])[1] == provenance_of(read_runs(folders[:2]))
    assert set(provenance_of(read_runs(folders[2:])).values()) == {"unknown"}
    assert provenance_of(read_runs(folders))["date"] == "2020-02-02; unknown"


def test_a_damaged_manifest_is_named(tmp_path):
    folder = write_run(tmp_path / "r", run("A", [evaluation(samples=targets(1))]))
    (folder / "trained.json").write_text("{")
    with pytest.raises(ValueError, match="trained.json: cannot be read"):
        records_of(read_runs([folder]))


def test_the_machine_is_described_in_words():
    described = describe_machine()
    assert {"date", "cpu", "cores", "platform", "python", "torch", "torchtune", "lm_eval", "tfidf-tune"} <= set(
        described
    )
    assert all(isinstance(value, str) and value for value in described.values())
    assert int(described["cores"]) >= 1


@pytest.mark.parametrize(
    "content",
    ["[]", '{"settings": []}', '{"settings": {"recipe": 1}}', '{"seconds": "7"}', '{"provenance": {"gpu": 1}}'],
)
def test_a_manifest_of_training_with_wrong_types_is_refused(tmp_path, content):
    folder = write_run(tmp_path / "r", run("CE", [evaluation(samples=targets(1), blocks=blocks(2.0))]))
    (folder / "trained.json").write_text(content)
    with pytest.raises(ValueError, match=r"trained\.json: cannot be read \(.*run the experiment again"):
        records_of(read_runs([folder]))
