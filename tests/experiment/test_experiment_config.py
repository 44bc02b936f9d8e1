"""The file of an experiment: what is read from it, and what is refused before any work begins."""

import inspect
import io
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from run_fakes import blocks, evaluation, results, run, targets
from torchtune import config

from tfidf_tune import cli
from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer
from tfidf_tune.experiment import load_experiment, shipped_experiments
from tfidf_tune.experiment._expand import TASK_SETTINGS, expand, slug
from tfidf_tune.experiment._run import _write_report
from tfidf_tune.tasks import tasks_folder
from tfidf_tune.training import SetupError

PAPER = {
    "table1_memorization": ("memorization", ["tfidf_memorization"], [10, 25, 50, 75, 100]),
    "table2_perplexity": ("memorization", ["tfidf_wikitext2_ppl"], [10, 25, 50, 75, 100]),
    "table3_summarization": ("summarization", ["tfidf_cnn_dailymail"], [100]),
    "table4_qa": ("qa", ["tfidf_squad"], [100]),
}
SETTINGS = {  # recipe and config of the paper's six model settings
    ("lora_finetune", "tinyllama/1.1B_lora"), ("full_finetune", "tinyllama/1.1B_full"),
    ("lora_finetune", "pythia/1.4B_qlora"), ("lora_finetune", "gptj/6B_lora"),
    ("lora_finetune", "llama2/7B_qlora"), ("lora_finetune", "llama2/13B_qlora"),
}  # fmt: skip


def test_the_demo_the_frontier_and_one_experiment_for_each_table_of_the_paper_are_shipped():
    assert shipped_experiments().keys() >= {"demo", "frontier", "frontier_reduced", *PAPER}


def test_the_trajectory_is_that_of_the_frontiers_setting():
    frontier, trajectory = (load_experiment(name) for name in ("frontier_reduced", "trajectory"))
    model, other = (one.models["Llama high"] for one in (frontier, trajectory))
    assert (other.recipe, other.config, other.overrides, other.start) == (
        model.recipe, model.config, model.overrides, model.start,
    )  # fmt: skip
    assert (trajectory.overrides, trajectory.eval) == (frontier.overrides, frontier.eval)
    assert trajectory.objectives.items() <= frontier.objectives.items()
    assert (trajectory.seeds, trajectory.tasks) == (frontier.seeds, frontier.tasks)


@pytest.mark.parametrize("name", sorted(shipped_experiments().keys() - PAPER.keys()))
def test_an_experiment_is_right_as_far_as_can_be_seen_without_training(name):
    experiment = load_experiment(name, ["seeds=[0]", "learning_rates=[0.001]"])

    rates = sum(len(model.learning_rates or [0.001]) for model in experiment.models.values())
    assert len(expand(experiment)) == rates * len(experiment.objectives)


@pytest.mark.parametrize("name", ["demo", "frontier"])  # the others that need no hub have settings of the frontier
def test_there_is_text_for_every_run_of_an_experiment(name, tmp_path):
    experiment = load_experiment(name, ["seeds=[0]"])
    models = {model: replace(settings, learning_rates=[0.001]) for model, settings in experiment.models.items()}
    one_objective = {"CE": experiment.objectives["CE"]}
    experiment = replace(experiment, models=models, objectives=one_objective, learning_rates=[0.001], references=[])
    num_blocks = {}
    for planned in expand(experiment):
        training = planned.training
        size = training.config.model.vocab_size
        tokenizer = hf_tokenizer(str(train_embedded_tokenizer(tmp_path / f"tokenizer-{size}", vocab_size=size)))
        training.config.output_dir = str(tmp_path / slug(training.model))
        num_blocks[training.model] = len(config.instantiate(training.config.dataset, tokenizer))

    assert num_blocks.keys() == experiment.models.keys()
    assert min(num_blocks.values()) >= 100


@pytest.mark.parametrize("name", PAPER)
def test_a_table_of_the_paper_has_its_models_objectives_milestones_and_tasks(name):
    kind, tasks, milestones = PAPER[name]
    experiment = load_experiment(name)
    runs = expand(experiment)

    assert {(model.recipe, model.config) for model in experiment.models.values()} == {
        (recipe, f"{config}_{kind}") for recipe, config in SETTINGS
    }
    assert not any(model.overrides or model.start for model in experiment.models.values())
    assert experiment.objectives == {
        "CE": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
        "TF-IDF": {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"},
    }
    assert (experiment.tasks, experiment.milestones, experiment.seeds) == (tasks, milestones, [42])
    assert (experiment.overrides, experiment.eval.metadata, experiment.eval.limit) == ({}, {}, None)
    assert len({run.training.folder for run in runs}) == len(runs) == 12


def test_table_2_evaluates_the_runs_of_table_1():
    first, second = (expand(load_experiment(name)) for name in ("table1_memorization", "table2_perplexity"))

    assert [(run.training.folder, run.training.settings) for run in first] == [
        (run.training.folder, run.training.settings) for run in second
    ]


def test_the_model_of_a_cell_is_given_to_the_harness_as_it_was_trained():
    args = {
        run.training.model: run.evaluations[-1].arguments["model_args"] for run in expand(load_experiment("table4_qa"))
    }
    out = "runs/paper_qa"

    assert args["GPT-J 6B (LoRA)"] == {
        "pretrained": "EleutherAI/gpt-j-6b", "peft": f"{out}/gpt-j-6b-lora/tf-idf/seed42/checkpoint_100pct",
        "dtype": "float16",
    }  # fmt: skip
    assert args["TinyLlama 1.1B (full)"] == {
        "pretrained": f"{out}/tinyllama-1.1b-full/tf-idf/seed42/checkpoint_100pct", "dtype": "bfloat16",
    }  # fmt: skip
    changed = load_experiment("table4_qa", [
        "overrides.checkpointer.revision=float16", "eval.dtype=fp32", "eval.model_args.parallelize=true",
    ])  # fmt: skip
    assert expand(changed)[0].evaluations[0].arguments["model_args"].items() >= {
        ("revision", "float16"), ("dtype", "float32"), ("parallelize", True),
    }  # fmt: skip


def test_an_adapter_that_is_merged_is_evaluated_as_a_complete_model(experiment_file):
    run, *_ = expand(load_experiment(experiment_file(lora=True), ["overrides.merge_adapter=true"]))

    assert run.evaluations[0].arguments["model_args"] == {
        "pretrained": str(run.evaluations[0].checkpoint),
        "dtype": "float32",
    }


def test_passages_come_from_the_run_unless_a_file_is_named(experiment_file, tmp_path):
    run, *_ = expand(load_experiment(experiment_file()))
    (tmp_path / "mine.jsonl").write_text("{}\n")
    named, *_ = expand(load_experiment(experiment_file(), [f"eval.metadata.probe_file={tmp_path}/mine.jsonl"]))

    assert run.evaluations[0].arguments["metadata"]["probe_file"] == str(run.training.folder / "probe.jsonl")
    assert named.evaluations[0].arguments["metadata"]["probe_file"] == f"{tmp_path}/mine.jsonl"


def test_overrides_are_laid_over_the_training_config_the_models_own_last(experiment_file):
    file = experiment_file()
    run, *_ = expand(load_experiment(file, [
        "overrides.dataset.num_base=50", "overrides.batch_size=2", "models[Tiny (full)].overrides.batch_size=3",
        "overrides.lr_scheduler={_component_: transformers.get_constant_schedule}",
        "overrides.dataset.target_source=${dataset.source}",
    ]))  # fmt: skip
    cfg = run.training.config

    assert (cfg.dataset.num_base, cfg.dataset.num_targets, cfg.batch_size) == (50, 4, 3)
    assert cfg.lr_scheduler == {"_component_": "transformers.get_constant_schedule"}, "a component is replaced whole"
    assert cfg.dataset.target_source == cfg.dataset.source
    assert (cfg.seed, cfg.save_at_percent, cfg.output_dir) == (0, [50, 100], str(run.training.folder))
    assert cfg.loss == {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}


def test_an_experiment_may_build_on_a_shipped_one(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: experiments/demo\nseeds: [1, 2]\n")

    mine, demo = load_experiment(str(tmp_path / "mine.yaml")), load_experiment("experiments/demo")

    assert mine.seeds == [1, 2]
    assert mine.models == demo.models == load_experiment("demo").models


def test_a_start_has_a_folder_for_everything_that_it_is_made_from():
    def folder(*overrides):
        return expand(load_experiment("demo", overrides))[0].training.start.folder

    runs = expand(load_experiment("demo"))
    folders = {runs[0].training.start.folder, folder("seeds=[1]"), folder("overrides.model.num_layers=2")}

    assert len(folders) == 3
    assert folder("overrides.batch_size=2") in folders, "which says nothing about the start"
    assert len({run.training.start.folder for run in runs}) == 1, "objectives start from the same weights"
    assert {run.training.config.tokenizer.path for run in runs} == {str(runs[0].training.start.folder)}


def test_a_start_with_a_seed_of_its_own_is_one_for_all_seeds():
    own = "models[Llama 3M (full)].start.seed=7"
    runs = expand(load_experiment("demo", ["seeds=[0,1]", own]))
    (start,) = {run.training.start.folder for run in runs}

    assert start.name.startswith("seed7-")
    assert {run.training.seed for run in runs} == {0, 1}
    assert runs[0].training.settings["start"] == {
        "component": "tfidf_tune.experiment.random_model", "arguments": {}, "seed": 7,
    }  # fmt: skip
    own_seeds = expand(load_experiment("demo", ["seeds=[7]"]))
    assert own_seeds[0].training.start.folder == start, "the same start, wherever its seed comes from"


def test_models_of_the_same_start_share_it():
    one = "recipe: full_finetune, config: demo/llama_3M_full_memorization"
    start = "start: {_component_: tfidf_tune.experiment.random_model}"
    runs = expand(load_experiment("demo", [
        f"models={{a: {{{one}, {start}}}, b: {{{one}, {start}, overrides: {{batch_size: 2}}}}, "
        f"c: {{{one}, {start}, overrides: {{model: {{num_layers: 2}}}}}}}}",
    ]))  # fmt: skip
    folders = {run.training.model: run.training.start.folder for run in runs}

    assert {model: folder.parts[-3:-1] for model, folder in folders.items()} == {
        "Llama 3M (full)": ("starts", "llama-3m-full"), "a": ("starts", "llama-3m-full"),
        "b": ("starts", "llama-3m-full"), "c": ("starts", "c"),
    }  # fmt: skip
    assert len(set(folders.values())) == 2


def test_a_start_is_another_when_an_argument_or_the_text_that_it_is_trained_on_is(tmp_path):
    def start(epochs):
        return expand(load_experiment("demo", [
            "models[Llama 3M (full)].start={_component_: tfidf_tune.experiment.trained_model, "
            f"source: {tmp_path}/text.txt, epochs: {epochs}}}",
        ]))[0].training  # fmt: skip

    (tmp_path / "text.txt").write_text("some text\n")
    first, longer = start(1), start(2)
    (tmp_path / "text.txt").write_text("other text\n")
    edited = start(1)

    assert len({training.start.folder for training in (first, longer, edited)}) == 3
    assert first.settings["start"]["arguments"]["source"].startswith("contents ")
    assert first.settings["start"] != edited.settings["start"] != longer.settings["start"]
    assert first.start.arguments == {"source": f"{tmp_path}/text.txt", "epochs": 1}


def test_every_learning_rate_makes_a_run_of_its_own(experiment_file, tmp_path):
    runs = [run.training for run in expand(load_experiment(experiment_file(), [
        "seeds=[0,1]", "learning_rates=[5e-4,1e-3,0.00001]",
    ]))]  # fmt: skip
    folder = tmp_path / "out" / "tiny-full"

    assert [(run.seed, run.learning_rate, run.objective) for run in runs] == [
        (seed, rate, objective)
        for seed in (0, 1) for rate in (0.0005, 0.001, 1e-5) for objective in ("CE", "TF-IDF")
    ]  # fmt: skip
    assert [run.folder for run in runs[:3]] == [
        folder / "ce" / "lr0.0005" / "seed0", folder / "tf-idf" / "lr0.0005" / "seed0", folder / "ce/lr0.001/seed0",
    ]  # fmt: skip
    assert runs[4].folder == folder / "ce" / "lr1e-05" / "seed0"
    assert [run.title for run in runs[3:5]] == [
        "Tiny (full), TF-IDF, lr 0.001, seed 0", "Tiny (full), CE, lr 1e-05, seed 0",
    ]  # fmt: skip
    assert all(run.config.optimizer.lr == run.settings["optimizer"]["lr"] == run.learning_rate for run in runs)
    assert runs[0].config.optimizer._component_ == "torch.optim.AdamW"


def test_a_model_may_have_learning_rates_of_its_own(experiment_file, tmp_path):
    file = experiment_file()
    own = f"models.Other={{recipe: full_finetune, config: {tmp_path}/training.yaml, learning_rates: [0.02]}}"
    runs = expand(load_experiment(file, [own, "learning_rates=[5e-4,1e-3]"]))

    assert [(run.training.model, run.training.learning_rate, run.training.objective) for run in runs] == [
        *(("Tiny (full)", rate, objective) for rate in (0.0005, 0.001) for objective in ("CE", "TF-IDF")),
        ("Other", 0.02, "CE"),
        ("Other", 0.02, "TF-IDF"),
    ]
    assert runs[-1].training.config.optimizer.lr == 0.02


def test_without_learning_rates_the_training_config_has_its_own(experiment_file, tmp_path):
    run = expand(load_experiment(experiment_file(), ["learning_rates=null"]))[0].training

    assert (run.learning_rate, run.config.optimizer.lr, run.title) == (None, 0.01, "Tiny (full), CE, seed 0")
    assert run.folder == tmp_path / "out" / "tiny-full" / "ce" / "seed0"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("overrides.optimizer.lr=0.1", "experiment: overrides: optimizer.lr is set by the experiment's learning_rates"),
        ("models[Tiny (full)].overrides.optimizer={_component_: torch.optim.SGD, lr: 0.1}",
         r"experiment: models: Tiny \(full\): overrides: optimizer.lr is set by the experiment's learning_rates"),
    ],
)  # fmt: skip
def test_a_learning_rate_is_given_in_one_place(experiment_file, override, told):
    with pytest.raises(SetupError, match=told):
        load_experiment(experiment_file(), ["learning_rates=[0.1]", override])

    assert load_experiment(experiment_file(), [override]).learning_rates is None


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("[]", r"experiment: models: Tiny \(full\): learning_rates is empty"),
        ("[0.1,0.1]", r"models: Tiny \(full\): learning_rates holds 0.1 more than once"),
        ("[-1]", r"models: Tiny \(full\): learning_rates is \[-1.0\], possible are numbers above 0"),
    ],
)
def test_learning_rates_of_a_model_are_checked_as_the_experiments_are(experiment_file, own, told):
    with pytest.raises(SetupError, match=told):
        load_experiment(experiment_file(), ["learning_rates=[0.1]", f"models[Tiny (full)].learning_rates={own}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sedes=[1]", "experiment: no key 'sedes'; did you mean 'seeds'?"),
        ("eval.batch=3", "experiment: eval: no key 'batch'; did you mean 'batch_size'?"),
        ("models[Tiny (full)].recpe=x", r"experiment: models: Tiny \(full\): no key 'recpe'; did you mean 'recipe'?"),
        ("models.other.recipe=full_finetune", "experiment: models: other: missing config"),
        ("models[Tiny (full)].recipe=full", "recipe is 'full', possible are full_finetune, lora_finetune"),
        ("models[Tiny (full)].config=nowhere", "no config file nowhere, and no config of that name"),
        ("models[Tiny (full)].recipe=lora_finetune", "recipe is lora_finetune, but the model has no lora_attn_modules"),
        ("models=null", "experiment: missing models"),
        ("seeds=[a]", "could not be converted to Integer"),
        ("seeds=[]", "experiment: seeds is empty"),
        ("seeds=[1,1]", "experiment: seeds holds 1 more than once"),
        ("learning_rates=[]", "experiment: learning_rates is empty"),
        ("learning_rates=[0.001,1e-3]", "experiment: learning_rates holds 0.001 more than once"),
        ("learning_rates=[0.1,0]", r"learning_rates is \[0.1, 0.0\], possible are numbers above 0"),
        ("learning_rates=[.nan]", r"learning_rates is \[nan\], possible are numbers above 0"),
        ("learning_rates=[.inf]", r"learning_rates is \[inf\], possible are numbers above 0"),
        ("learning_rates=[a]", "could not be converted to Float"),
        ("models[Tiny (full)].learning_rates=[0.1]", r"Tiny \(full\): learning_rates: the experiment has none; name"),
        ("references=[TF-IDF]", "references are for the frontier, which needs learning_rates: name some"),
        ("references=[TFIDF]", "experiment: references: no objective 'TFIDF'; did you mean 'TF-IDF'?"),
        ("launcher.name=ray", "launcher: name is 'ray', possible are local, slurm"),
        ("launcher.name=slurm", "launcher: slurm needs timeout_min"),
        ("launcher={name: slurm, timeout_min: 9, nodes: 2}", "launcher: nodes is 2, but a job is one process"),
        ("launcher.gpus_per_node=x", "launcher: gpus_per_node is 'x', it has to be a whole number"),
        ("milestones=[0]", r"milestones is \[0\], possible are whole percents from 1 to 100"),
        ("tasks=[tfidf_sqaud]", "experiment: no task tfidf_sqaud; there are tfidf_cnn_dailymail, "),
        ("eval.batch_size=0", "eval: batch_size is 0, it has to be at least 1"),
        ("eval.dtype=float", "eval: dtype is 'float', possible are fp32, bf16, fp16"),
        ("eval.metadata.num_bloks=3", "eval.metadata: no setting 'num_bloks'; did you mean 'num_blocks'?"),
        ("eval.metadata.probe_file=./nowhere.jsonl", "CE: eval.metadata.probe_file: .*nowhere.jsonl"),
        ("overrides=3", "overrides is 3, it has to hold keys of a training config"),
        ("overrides.seed=3", "overrides: seed is set by the experiment's seeds"),
        ("overrides.optimiser.lr=3", r"experiment: Tiny \(full\), CE: config: no key 'optimiser'; did you mean"),
        ("overrides.dataset.source=./nowhere.txt", "CE: dataset.source: .*nowhere.txt"),
        ("overrides.dataset.probe_file=null", "tfidf_memorization needs passages to probe for"),
        ("overrides.checkpointer.checkpoint_dir=./nowhere", "CE: checkpointer.checkpoint_dir: no such folder nowhere"),
        ("objectives.CE={_component_: torch.nn.CrossEntropyLoss}", "not one of tfidf_tune's objectives"),
        ("objectives.CE={_component_: tfidf_tune.loss.Nothing}", "no component 'tfidf_tune.loss.Nothing'"),
        (
            "objectives.Other={_component_: tfidf_tune.loss.WeightedCrossEntropyLoss, "
            "weighting: {_component_: tfidf_tune.weighting.GoldfishWeighting, k: 1}}",
            "Other: config: loss.weighting: k is 1: one token in k",
        ),
        ("objectives.CE._component_=null", "loss has to be a section with `_component_`"),
        ("objectives.ce={_component_: tfidf_tune.loss.CrossEntropyLoss}", "'CE' and 'ce' would share the folder ce"),
        ("objectives.report={_component_: tfidf_tune.loss.CrossEntropyLoss}", "makes no folder of its own"),
        ("models[Tiny (full)].start={seed: 1}", "start: has to be a section with `_component_`"),
        ("models[Tiny (full)].start={_component_: tfidf_tune.nothing}", "CE: start: "),
        (
            "models[Tiny (full)].start={_component_: tfidf_tune.experiment.random_model, seed: x}",
            "CE: start: seed is 'x', it has to be a whole number",
        ),
        (
            "models[Tiny (full)].start={_component_: tfidf_tune.experiment.trained_model, epoch: 1}",
            "CE: start: .*unexpected keyword argument 'epoch'",
        ),
        (
            "models[Tiny (full)].start={_component_: tfidf_tune.experiment.trained_model, source: ./nowhere.txt}",
            "CE: start.source: .*nowhere.txt",
        ),
    ],
)
def test_what_is_wrong_is_told_before_any_work_begins(experiment_file, tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        expand(load_experiment(experiment_file(), [override]))

    assert not (tmp_path / "out").exists()


def test_a_dotted_key_in_a_file_is_refused(experiment_file):
    with pytest.raises(
        ValueError, match=r"overrides: dataset.source has a dot; in a file, keys of sections are nested"
    ):
        load_experiment(experiment_file(overrides={"dataset.source": "x"}))


@pytest.mark.parametrize(("text", "message"), [("a: [", "config .*mine.yaml: while parsing"), ("- a", "holds a list")])
def test_a_file_that_is_no_experiment_is_refused(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)

    with pytest.raises(ValueError, match=message):
        load_experiment(str(tmp_path / "mine.yaml"))


def test_a_name_that_is_none_is_told_what_there_is():
    with pytest.raises(ValueError, match="no experiment of that name; there are: demo, .*table1_memorization"):
        load_experiment("table5")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Pythia 1.4B (LoRA)", "pythia-1.4b-lora"), ("TF-IDF (tf=log)", "tf-idf-tf-log"), ("CE", "ce"), ("…", "")],
)
def test_slugs(name, expected):
    assert slug(name) == expected


def test_the_settings_of_tasks_are_those_that_the_tasks_take():
    modules = {
        "tfidf_memorization": "memorization", "tfidf_wikitext2_ppl": "perplexity",
        "tfidf_cnn_dailymail": "cnn_dailymail", "tfidf_squad": "squad",
    }  # fmt: skip
    for task, module in modules.items():
        parameters = inspect.signature(import_module(f"tfidf_tune.tasks.{module}").documents).parameters.values()
        taken = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        # Of a task's prefix length its own file tells.
        assert list(TASK_SETTINGS[task]) == [name for name in taken if name != "task_prefix_length"]
    assert TASK_SETTINGS.keys() == modules.keys()


def test_files_of_tasks_have_the_tasks_names():
    for file in tasks_folder().glob("*.yaml"):
        assert re.search(rf"^(task|group): {file.stem}$", file.read_text(), re.MULTILINE), file


def test_the_demo_is_the_training_config_of_that_name_on_embedded_text():
    run = expand(load_experiment("demo"))[1].training
    given = OmegaConf.load(Path(shipped_experiments()["demo"]).parents[1] / "demo" / "llama_3M_full_memorization.yaml")
    ours = OmegaConf.to_container(run.config, resolve=True)
    theirs = OmegaConf.to_container(given, resolve=True)

    different = {key for key in theirs if ours[key] != theirs[key]}
    assert different == {"output_dir", "checkpointer", "tokenizer", "dataset", "metric_logger"}
    assert {key for key in ours["dataset"] if ours["dataset"][key] != theirs["dataset"][key]} == {"probe_file"}


def test_a_training_config_may_mix_data_sets(experiment_file, recipe_config, tmp_path, text_file):
    file = experiment_file()
    text = {"_component_": "tfidf_tune.data.text_dataset", "source": str(text_file)}
    cfg = recipe_config()
    cfg.dataset = [text, cfg.dataset]
    OmegaConf.save(cfg, tmp_path / "training.yaml")

    run, *_ = expand(load_experiment(file))

    sources = [section["source"] for section in run.training.settings["dataset"]]
    assert sources[0].startswith("contents "), "a local file counts by what it holds"
    assert sources[0] == sources[1]
    assert not any("probe_file" in section for section in run.training.settings["dataset"])
    assert run.evaluations[0].arguments["metadata"]["probe_file"] == str(run.training.folder / "probe.jsonl")
    with pytest.raises(SetupError, match=r"CE: dataset\[0\]\.source: .*nowhere"):
        expand(
            load_experiment(
                file, ["overrides.dataset=[{_component_: tfidf_tune.data.text_dataset, source: ./nowhere.txt}]"]
            )
        )
    with pytest.raises(SetupError, match="overrides: dataset"):
        expand(load_experiment(file, ["overrides.dataset.source=a"]))


def test_with_learning_rates_the_report_is_the_frontier(experiment_file, tmp_path):
    experiment = load_experiment(experiment_file(), ["learning_rates=[0.1,0.2]", "references=[TF-IDF]"])
    runs = [
        run(objective, [evaluation(samples=targets(4, 6), blocks=blocks(10 * rate))], learning_rate=rate)
        for objective in ("CE", "TF-IDF")
        for rate in (1, 2)
    ]

    report = _write_report(results(*runs), experiment, tmp_path / "report")

    (differences,) = [table for table in report.tables if table.name == "differences"]
    assert [row[1:3] for row in differences.rows] == [("TF-IDF", "CE"), ("CE", "TF-IDF")]
    assert {"results.jsonl", "index.html", "report.md"} <= {file.name for file in (tmp_path / "report").iterdir()}


def test_a_reference_that_is_not_done_yet_is_left_out(experiment_file, tmp_path):
    experiment = load_experiment(experiment_file(), ["learning_rates=[0.1]", "references=[TF-IDF]"])
    runs = [run("CE", [evaluation(samples=targets(4), blocks=blocks(10))], learning_rate=0.1)]

    report = _write_report(results(*runs), experiment, tmp_path / "report")

    assert not [table for table in report.tables if table.name == "differences"]


def test_names_cannot_steer_the_terminal_and_any_encoding_will_do(experiment_file, monkeypatch):
    name = "Ünï \x1b[31m\u202e"
    objectives = {"CE": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}}
    file = experiment_file(objectives=objectives | {name: {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}})
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", "experiment", file, "--dry-run"])
    cli.main()
    stream.flush()
    printed = stream.buffer.getvalue().decode("ascii")
    assert "?n? \\u001b[31m\\u202e" in printed
    assert "\x1b" not in printed
