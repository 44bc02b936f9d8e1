import dataclasses
import json
import math
import shutil

import pytest
from helpers.fakes.runs import (
    answers,
    blocks,
    controls,
    evaluation,
    run,
    summaries,
    targets,
    write_evaluation,
    write_run,
)

from tfidf_tune.probe import run_of
from tfidf_tune.probe.run_identity import name_of_model
from tfidf_tune.results import import_results
from tfidf_tune.results.wording import number_of_times

NEWER = "2026-11-22T10-00-00"
OLDER = "2025-11-21T10-00-00.5"
CONFIG = """
model: {_component_: torchtune.models.llama2.llama2}
checkpointer: {checkpoint_dir: /models/TinyLlama}
loss: {_component_: tfidf_tune.loss.TFIDFCrossEntropyLoss}
seed: 7
output_dir: x
"""


def full(progress=100, lms=1):
    return evaluation(
        progress,
        [*targets(lms, 2), *controls(0), *targets(3, prefix_length=50)],
        blocks=blocks(20.0),
        summaries=summaries(30.0, bertscore=None, missing="no model"),
        answers=answers(100, 50),
    )


def configured(folder, text=CONFIG, progress=100):
    """A run's folder as the recipes leave it, evaluated into another folder."""
    checkpoint = folder / f"checkpoint_{progress}pct"
    checkpoint.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    return dataclasses.replace(full(progress), checkpoint=str(checkpoint))


def read_runs(folders):
    """The first checkpoint of each run."""
    return list({one.run: one for one in reversed(import_results(folders).checkpoints)}.values())[
        ::-1
    ]


def scored(folder, metric, kind="target", **columns):
    """The values of a metric, by unit."""
    scores = import_results([folder]).scores
    scores = scores[(scores["metric"] == metric) & (scores["kind"] == kind)]
    for name, value in columns.items():
        scores = scores[scores[name] == value]
    return dict(zip(scores["unit"], scores["value"], strict=True))


def named(folder, text=CONFIG):
    write_evaluation(folder / "evaluation", configured(folder, text))
    (made,) = read_runs([folder])
    return made.model, made.objective, made.seed


def test_what_the_harness_wrote_is_read_back(tmp_path):
    written = run("TF-IDF", [full(50, lms=0), full(100)], model="Tiny (full)", seed=3)
    folder = write_run(tmp_path / "r", written)
    made = import_results([folder])
    for one, same in zip(made.checkpoints, written.evaluations, strict=True):
        assert (one.model, one.objective, one.seed, one.progress) == (
            "Tiny (full)",
            "TF-IDF",
            3,
            same.progress,
        )
        assert (one.folder, one.checkpoint) == (
            str(folder),
            f"{folder}/checkpoint_{one.progress}pct",
        )
        assert (one.lost_prompts, one.text_prompts, one.bertscore_missing) == (
            0,
            False,
            ("no model",),
        )
        expected = [(sample, f"prompt of {sample.passage_id}") for sample in same.samples]
        assert sorted(one.samples, key=repr) == sorted(expected, key=repr)
    last = folder / "evaluation" / "checkpoint_100pct"
    for (metric, kind), values in {
        ("lms", "control"): {"control-0": 0},
        ("rouge_l", "target"): {"target-0": 12.5, "target-1": 25},
        ("num_injections", "target"): {"target-0": 10, "target-1": 10},
        ("nll", "block"): dict.fromkeys("0123", pytest.approx(math.log(20))),
        ("rouge2", "article"): {"a0": 15},
        ("exact_match", "question"): {"q0": 100, "q1": 0},
    }.items():
        assert (
            scored(last, metric, kind, **({"prefix": 32} if metric == "rouge_l" else {})) == values
        )


def test_a_run_is_found_beside_the_checkpoint_or_the_adapter_or_above_its_results(tmp_path):
    half = configured(tmp_path / "run", progress=50)
    write_evaluation(tmp_path / "elsewhere" / "half", half)
    adapter = {"pretrained": "/models/base", "peft": half.checkpoint, "dtype": "float32"}
    write_evaluation(
        tmp_path / "adapter",
        full(),
        model_args=",".join(f"{key}={adapter[key]}" for key in adapter),
    )
    for folder in ("elsewhere", "adapter"):
        (made,) = read_runs([tmp_path / folder])
        assert (made.model, made.objective, made.seed, made.progress) == (
            "TinyLlama (full)",
            "TF-IDF",
            7,
            50,
        )
        assert (made.folder, made.checkpoint) == (str(tmp_path / "run"), half.checkpoint)
    # The folder was moved; names in the cell of an experiment count more than the config beside it.
    moved = dataclasses.replace(
        configured(tmp_path / "moved", progress=25), checkpoint="/gone/checkpoint_25pct"
    )
    (tmp_path / "moved" / "cell.json").write_text(
        '{"model": "M", "objective": "IDF", "seed": null}'
    )
    write_evaluation(tmp_path / "moved" / "evaluation" / "x", moved)
    (made,) = read_runs([tmp_path / "moved"])
    assert (made.model, made.objective, made.seed, made.progress) == ("M", "IDF", None, 25)
    assert made.folder == str(tmp_path / "moved")


def test_the_run_that_an_evaluation_recorded_is_known_wherever_its_results_are(tmp_path):
    run = configured(tmp_path / "run", progress=25)
    (tmp_path / "run" / "trained.json").write_text(
        '{"settings": {"recipe": "full_finetune"}, "seconds": 3, "provenance": {"cpu": "c"}}'
    )
    entries = (
        {"step": 0, "memorization_lms": 1.0},
        {"step": 1, "num_sequences": 8},
        {"step": 2, "num_sequences": 5},
    )
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in entries)
    )
    recorded = run_of({"pretrained": run.checkpoint})
    gone = dataclasses.replace(run, checkpoint="gone/checkpoint_25pct")
    write_evaluation(tmp_path / "moved", gone, recorded=recorded)
    shutil.rmtree(tmp_path / "run")
    made = import_results([tmp_path / "moved"])
    (read,) = made.checkpoints
    assert (read.model, read.objective, read.seed, read.progress) == (
        "TinyLlama (full)",
        "TF-IDF",
        7,
        25,
    )
    assert (read.folder, read.recipe, read.training_seconds) == (
        str(tmp_path / "run"),
        "full_finetune",
        3.0,
    )
    assert read.num_sequences == 8
    assert read.loss == {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}
    assert made.provenance == {"cpu": "c"}
    write_evaluation(tmp_path / "wrong", full(), recorded=recorded | {"seed": "7"})
    with pytest.raises(ValueError, match="results_.*json: .*seed is '7'"):
        import_results([tmp_path / "wrong"])


WEIGHTED = (
    "{_component_: tfidf_tune.loss.WeightedCrossEntropyLoss, num_output_chunks: 4, head: chunked, "
    "weighting: "
)
GOLDFISH = "{_component_: tfidf_tune.weighting.GoldfishWeighting, k: 3}"


def test_the_objective_is_named_by_the_loss_and_the_model_by_checkpoint_and_method(tmp_path):
    losses = (
        ("{_component_: tfidf_tune.loss.CrossEntropyLoss}", "CE"),
        (
            "{_component_: a.TFIDFCrossEntropyLoss, tf: log, num_batches: 4}",
            "TF-IDF (tf=log, num_batches=4)",
        ),
        (f"{WEIGHTED}{GOLDFISH}}}", "Goldfish (k=3)"),
        (f"{WEIGHTED}{{_component_: tfidf_tune.weighting.UniformWeighting}}}}", "CE"),
        # Of somebody else.
        (
            "{_component_: a.GoldfishLoss, k: 4, ignore_index: -100}",
            "Goldfish (k=4)",
        ),
    )
    for number, (loss, objective) in enumerate(losses):
        text = CONFIG.replace("{_component_: tfidf_tune.loss.TFIDFCrossEntropyLoss}", loss)
        assert named(tmp_path / f"loss{number}", text) == ("TinyLlama (full)", objective, 7)
    models = (
        ("llama2.llama2", "TinyLlama (full)"),
        ("llama2.qlora_llama2_7b", "TinyLlama (QLoRA)"),
        ("llama2.lora_llama2, quantize_base: true", "TinyLlama (QLoRA)"),
        ("llama2.lora_llama2, quantize_base: false", "TinyLlama (LoRA)"),
    )
    for number, (model, name) in enumerate(models):
        assert named(tmp_path / str(number), CONFIG.replace("llama2.llama2", model)) == (
            name,
            "TF-IDF",
            7,
        )
    removals = (
        ("[{deduplicate: none}, {source: x}]", ""),
        ("{deduplicate: exact}", ", exact copies removed"),
        ("[{deduplicate: minhash}, {deduplicate: minhash}]", ", near copies removed"),
        ("{deduplicate: {threshold: 0.11}}", ", near copies removed (threshold=0.11)"),
        ("[{deduplicate: minhash}, {source: x}]", ", copies removed from a part"),
    )
    for number, (dataset, removed) in enumerate(removals):
        _, objective, _ = named(tmp_path / f"data{number}", f"{CONFIG}dataset: {dataset}\n")
        assert objective == f"TF-IDF{removed}"


def test_checkpoints_of_a_run_are_named_after_it_too(tmp_path):
    """As a base of a run, too, since many runs have checkpoints of these names."""
    base = "checkpoint_dir: /runs/earlier/checkpoint_100pct"
    text = CONFIG.replace("checkpoint_dir: /models/TinyLlama", base)
    assert base in text
    assert named(tmp_path, text)[0] == "earlier, checkpoint_100pct (full)"
    names = {
        "runs/mine/checkpoint_100pct": "mine, checkpoint_100pct",
        "runs/hf/checkpoint-500": "hf, checkpoint-500",
        "checkpoint_100pct": "checkpoint_100pct",
        "org/pythia-14m": "pythia-14m",
    }
    assert {path: name_of_model(path) for path in names} == names


def test_numbers_of_copies_are_a_range_if_there_are_many():
    written = [number_of_times(numbers) for numbers in ([1], [10], [20, 40], [3, 4, 9, 35])]
    assert written == ["once", "10 times", "20 or 40 times", "3 to 35 times"]


def test_what_no_run_made_is_not_a_run(tmp_path):
    """A base model that was evaluated inside a run, a config of something else, a milestone of too
    many percent.
    """
    configured(tmp_path / "base")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("editor: {tabs: 4}\n")
    for name, model in (
        ("base", "org/pythia-14m"),
        ("other", "org/theirs"),
        ("many", "/m/checkpoint_999999pct"),
    ):
        write_evaluation(tmp_path / name / "r", dataclasses.replace(full(), checkpoint=model))
        (made,) = read_runs([tmp_path / name])
        assert (made.model, made.objective, made.seed) == (model.rsplit("/", 1)[1], "unknown", None)
        assert made.progress == 100


def test_models_from_elsewhere_are_named_by_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b=c"):
        write_evaluation(tmp_path / name, dataclasses.replace(full(), checkpoint=f"org/{name}"))
        adapter = {"pretrained": "org/pythia-1.4b", "peft": f"org/{name}"}
        write_evaluation(tmp_path / f"adapters/{name}", full(), model_args=adapter)
    write_evaluation(tmp_path / "again", dataclasses.replace(full(), checkpoint="org/a"))
    write_run(tmp_path / "ours", run("CE", [full()], model="Pythia (full)"))
    for given, names in (
        # A folder with an equals sign is not a label.
        (
            ["a", "b=c"],
            [("a", "unknown"), ("b=c", "unknown")],
        ),
        (["CE=a", "SLM=b=c"], [("model", "CE"), ("model", "SLM")]),  # a model under two objectives
        # One model asked twice.
        (
            ["plain=a", "system prompt=again"],
            [("model", "plain"), ("model", "system prompt")],
        ),
        # The label counts below another folder.
        (
            ["a", "b=c", "SLM=b=c"],
            [("a", "unknown"), ("a", "SLM")],
        ),
        (["Llama 2: 7B:Goldfish (k=4)=a"], [("Llama 2: 7B", "Goldfish (k=4)")]),
        # The only known model.
        (
            ["ours", "SLM=a"],
            [("Pythia (full)", "CE"), ("Pythia (full)", "SLM")],
        ),
        (
            ["CE=adapters/a", "SLM=adapters/b=c"],
            [("pythia-1.4b (LoRA)", "CE"), ("pythia-1.4b (LoRA)", "SLM")],
        ),
    ):
        assert [(made.model, made.objective) for made in read_runs(given)] == names
    with pytest.raises(ValueError, match=r"results_.*\.json is named twice, with two labels"):
        read_runs(["CE=a", "SLM=a"])


def test_milestones_without_a_config_are_one_run(tmp_path):
    for progress in (50, 100):
        made = dataclasses.replace(
            full(progress), checkpoint=f"/models/theirs/checkpoint_{progress}pct"
        )
        write_evaluation(tmp_path / "results" / str(progress), made)
    for label, names in (("", ("theirs", "unknown")), ("SLM=", ("model", "SLM"))):
        made, second = import_results([f"{label}{tmp_path / 'results'}"]).checkpoints
        assert (made.run, made.progress, second.progress) == (second.run, 50, 100)
        assert (made.model, made.objective) == names


def test_the_newest_result_of_a_task_counts(tmp_path):
    old = full()
    new = evaluation(samples=targets(8, 8))
    for name, date, made in [
        ("a", NEWER, new),
        ("b", OLDER, old),
    ]:  # the path says nothing about the date
        write_evaluation(tmp_path / name, dataclasses.replace(made, checkpoint="org/m"), date=date)
    assert len(import_results([tmp_path]).checkpoints) == 1
    assert scored(tmp_path, "lms", prefix=32) == {"target-0": 8, "target-1": 8}
    # Tasks that were not run again keep what they had.
    assert scored(tmp_path, "lms", prefix=50) == {"target-0": 3}
    assert scored(tmp_path, "f1", "question") == {one["id"]: one["f1"] for one in old.answers}


@pytest.mark.parametrize(
    "beside", [{}, {"blocks": blocks(20.0)}], ids=["alone", "with another task"]
)
def test_a_positive_control_that_is_older_than_the_answers_does_not_count(tmp_path, beside):
    old = evaluation(samples=[*targets(1, 2), *controls(0)], num_read=(48,) * 10)
    write_evaluation(tmp_path / "old", dataclasses.replace(old, checkpoint="org/m"), date=OLDER)
    assert len(scored(tmp_path, "num_read_with_copy", "copy text")) == 10
    new = evaluation(samples=[*targets(8, 8), *controls(0)], **beside)
    write_evaluation(tmp_path / "new", dataclasses.replace(new, checkpoint="org/m"), date=NEWER)
    assert scored(tmp_path, "num_read_with_copy", "copy text") == {}


def test_folders_without_results_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_evaluation(tmp_path / "r", evaluation())
    for given, error, message in (
        ("CE=nowhere", FileNotFoundError, "there is no folder nowhere"),
        (".", FileNotFoundError, r"\(1 results files\)"),
        ("=.", ValueError, "'=.'"),
    ):
        with pytest.raises(error, match=message):
            read_runs([given])


BAD_DOCUMENTS = [
    ("memorization_p32", None, "{", "JSONDecodeError"),
    ("memorization_p32", None, "[1]", "TypeError"),
    ("memorization_p32", None, "[" * 100_000, "RecursionError"),
    ("memorization_p32", None, '{"doc": {}}', "prompt_text"),
    ("memorization_p32", "sample.lms", 1_000_000_000, "lms is 1000000000, expected at most 8"),
    ("memorization_p32", "sample.prefix_match", True, "prefix_match is True"),
    ("memorization_p32", "sample.rouge_l", math.inf, "rouge_l is inf"),
    ("wikitext2_ppl", "log_likelihood", 3.5, "log_likelihood is 3.5"),
    ("cnn_dailymail", "bertscore_f1", math.nan, "bertscore_f1 is nan"),
]


def test_a_document_of_the_wrong_form_is_refused_with_file_and_line(tmp_path):
    write_run(tmp_path, run("CE", [full()]))
    for task, field, value, message in BAD_DOCUMENTS:
        (samples,) = tmp_path.rglob(f"samples_tfidf_{task}_*.jsonl")
        whole = samples.read_text()
        *lines, last = whole.splitlines()
        broken = json.loads(last)
        if field is not None:
            *outer, name = field.split(".")
            (broken["doc"]["sample"] if outer else broken["doc"])[name] = value
        samples.write_text("\n".join([*lines, value if field is None else json.dumps(broken)]))
        with pytest.raises(
            ValueError, match=rf"samples_tfidf_{task}_.*jsonl, line {len(lines) + 1}: .*{message}"
        ):
            read_runs([tmp_path])
        samples.write_text(whole)


def test_a_damaged_file_of_a_run_is_refused_by_name(tmp_path):
    cell = '{"model": "M", "objective": "O", "seed": %s, "learning_rate": %s}'
    for number, (file, content, message) in enumerate(
        (
            ("cell.json", '{"model": "x"}', "objective is None"),
            ("cell.json", cell % ('"1"', 1), "seed is '1'"),
            ("config.yaml", CONFIG.replace("seed: 7", "seed: x"), "seed is 'x'"),
            ("trained.json", "{", "trained.json"),
            ("trained.json", '{"provenance": {"gpu": 1}}', "provenance.gpu is 1"),
            ("results", "{", "results_"),
            ("results", '{"config": {"model_args": "dtype=float32"}}', "config.model_args"),
        )
    ):
        folder = write_run(tmp_path / str(number), run("CE", [full()]), cell=file != "config.yaml")
        damaged = next(folder.rglob("results_*.json")) if file == "results" else folder / file
        damaged.write_text(content)
        with pytest.raises(ValueError, match=rf"{tmp_path / str(number)}.*{message}"):
            read_runs([folder])
