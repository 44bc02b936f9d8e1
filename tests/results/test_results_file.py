import dataclasses
import json
import math

import pytest
from helpers.fakes.results import grown_records, record, results_of
from helpers.fakes.runs import (
    block,
    blocks,
    controls,
    evaluation,
    grown_runs,
    results,
    run,
    targets,
    write_run,
)

from tfidf_tune.compare import run_table
from tfidf_tune.results import import_results, load_results, read_results, write_results

PROVENANCE = {"date": "2026-11-22", "cpu": "a “fast” one"}


@pytest.fixture
def file(tmp_path):
    write_results(
        results_of([record(), record("B", seed=1)], PROVENANCE), tmp_path / "results.jsonl"
    )
    return tmp_path / "results.jsonl"


def rows(made):
    """The scores of each checkpoint, whatever their order; NaN as None."""
    values = made.scores.astype(object).where(made.scores.notna(), None)
    return sorted(values.itertuples(index=False, name=None), key=repr)


def require_same(made, expected):
    assert [replaced(one) for one in made.checkpoints] == [
        replaced(one) for one in expected.checkpoints
    ]
    assert rows(made) == rows(expected)
    assert made.provenance == expected.provenance


def replaced(checkpoint):
    """Without the samples, which are not written."""
    return dataclasses.replace(checkpoint, samples=())


def test_a_checkpoint_has_the_names_and_settings_of_its_run_and_its_scores(tmp_path):
    samples = [*targets(4, 8), *targets(1, 2, prefix_length=50), *controls(1, 0, prefix_length=50)]
    nothing = [*targets(0, 0), *targets(0, 0, prefix_length=50), *controls(0, 0, prefix_length=50)]
    first = evaluation(50, nothing, blocks=blocks(90.0, 3))
    made = run(
        "TF-IDF",
        [first, evaluation(100, samples, blocks=blocks(20.0, 3))],
        seed=3,
        learning_rate=2e-3,
    )
    folder = write_run(tmp_path / "r", made)
    (folder / "trained.json").write_text(
        '{"settings": {"recipe": "lora_finetune"}, "seconds": 7.5}'
    )
    (folder / "config.yaml").write_text(
        "model: {a: 1}\nloss: {_component_: x.YLoss, k: 4}\ncheckpointer: {b: 2}\n"
    )
    imported = import_results([folder])
    write_results(imported, tmp_path / "results.jsonl")
    read = read_results(tmp_path / "results.jsonl")
    require_same(read, imported)
    half, one = read.checkpoints
    assert (half.progress, half.training_seconds) == (50, one.training_seconds)
    assert (one.model, one.objective, one.learning_rate, one.seed, one.progress) == (
        "Tiny",
        "TF-IDF",
        2e-3,
        3,
        100,
    )
    assert (one.recipe, one.loss, one.training_seconds) == (
        "lora_finetune",
        {"_component_": "x.YLoss", "k": 4},
        7.5,
    )
    assert one.title == "Tiny, TF-IDF, lr 0.002, seed 3"
    first, last = run_table(read).to_dict("records")
    assert (first["lms"], first["log_perplexity"]) == (0.0, pytest.approx(math.log(90)))
    assert (last["lms"], last["max_lms"], last["control_lms"]) == (3.75, 8, 0.5)
    assert (last["prefix_match"], last["rouge_l"], last["verbatim"]) == (
        3.75,
        pytest.approx(375 / 8),
        0.25,
    )
    assert (last["log_perplexity"], last["num_predictions"]) == (pytest.approx(math.log(20)), 30)


@pytest.mark.parametrize("log_likelihood", [-math.inf, math.nan])
def test_what_is_unknown_or_diverged_is_missing_or_infinite(tmp_path, log_likelihood):
    diverged = (block(0, 10, -20.0), block(1, 10, log_likelihood))
    made = results(
        run("A", [evaluation(samples=targets(1))]), run("B", [evaluation(blocks=diverged)])
    )
    one = made.checkpoints[0]
    assert (one.recipe, one.loss, one.training_seconds, one.learning_rate) == (None,) * 4
    bare, unprobed = run_table(made).to_dict("records")
    assert [math.isnan(bare[name]) for name in ("log_perplexity", "control_lms", "lms")] == [
        True,
        True,
        False,
    ]
    assert [math.isnan(unprobed[name]) for name in ("lms", "max_lms")] == [True, True]
    assert unprobed["log_perplexity"] == math.inf
    write_results(made, tmp_path / "r.jsonl")
    require_same(read_results(tmp_path / "r.jsonl"), made)
    assert "Infinity" not in (tmp_path / "r.jsonl").read_text()


def test_results_come_back_as_they_were_and_take_at_most_10_kilobytes_for_100_passages(tmp_path):
    odd = record(
        "é “x”\u2028",
        None,
        seed=None,
        learning_rate=None,
        recipe=None,
        loss=None,
        training_seconds=None,
    )
    (grown,) = grown_runs(objectives=("CE",), num_passages=100, downstream=False)
    large = results(dataclasses.replace(grown, evaluations=grown.evaluations[-2:]))
    for made in (
        results_of([*grown_records(), odd], PROVENANCE),
        results(*grown_runs(num_passages=3)),
        large,
    ):
        write_results(made, tmp_path / "new" / "results.jsonl")
        require_same(read_results(str(tmp_path / "new" / "results.jsonl")), made)
    assert (tmp_path / "new" / "results.jsonl").stat().st_size < 2 * 10_000


def changed(file, number, change):
    lines = file.read_text().splitlines()
    lines[number - 1] = change(lines[number - 1])
    file.write_text("".join(f"{line}\n" for line in lines if line is not None))


def with_value(key, value):
    return lambda line: json.dumps(json.loads(line) | {key: value})


def with_scores(*scores):
    return with_value("scores", [["lms", "target", 32, *scores]])


def test_a_damaged_file_is_refused_with_file_line_and_remedy(file):
    whole = file.read_bytes()
    for number, change, message in (
        (2, lambda line: line[:-20], "line 2: .*JSONDecodeError"),
        (3, lambda line: "[" * 100_000, "line 3: .*RecursionError"),
        (3, lambda line: line.replace('"scores"', '"x"'), "line 3: .*'scores'"),
        (3, with_scores(0, ["4", 1], 1), "line 3: .*4.*0.* is '4'"),
        (3, with_scores(7, [1], 1), "line 3: .*IndexError"),
        (3, with_scores(0, [1, 2], 0), "line 3: .* is 0"),
        (3, with_value("progress", 101), "line 3: .*progress is 101"),
        (3, lambda line: None, "2 checkpoints, the file has 1"),
        (1, with_value("units", [[1]]), "units.0..0. is 1"),
        (1, lambda line: None, "'format'"),
        (1, with_value("format", "tfidf-tune runs, version 9"), "'tfidf-tune runs, version 9'"),
    ):
        file.write_bytes(whole)
        changed(file, number, change)
        with pytest.raises(ValueError, match=rf"{file}.*{message}.*tfidf-tune compare"):
            read_results(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=str(file)):
        read_results(file)


def test_files_and_folders_are_loaded_together(tmp_path, file):
    write_run(
        tmp_path / "run", run("Goldfish", [evaluation(samples=targets(1), blocks=blocks(20.0))])
    )
    more = results_of([record("C")], {"date": "2026-11-23", "cpu": PROVENANCE["cpu"]})
    write_results(more, tmp_path / "more.jsonl")
    made = load_results([tmp_path / "run", file, str(tmp_path / "more.jsonl")])
    assert [one.objective for one in made.checkpoints] == ["CE", "B", "C", "Goldfish"]
    assert run_table(made)["lms"].tolist() == [4.0, 4.0, 4.0, 1.0]
    assert made.provenance["date"].startswith("2026-11-22; 2026-11-23")
    assert made.provenance["cpu"].startswith(PROVENANCE["cpu"])
    assert made.provenance["torch"] == "unknown"
    require_same(load_results([file]), read_results(file))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_results([tmp_path / "nowhere"])
