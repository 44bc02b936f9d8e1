"""The file of an experiment: its runs, and what is refused before any work begins."""

import itertools
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from research.experiment import CONFIGS, load_experiment
from research.experiment._expand import expand
from research.experiment._schema import Objective
from tfidf_tune.training import SetupError

CE = {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}
TFIDF = {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}


def one_run_of_each(experiment, **keys):
    """Leave out all but one seed and learning rate."""
    models = {
        model: settings.model_copy(update={"learning_rates": None})
        for model, settings in experiment.models.items()
    }
    update = {"models": models, "seeds": [0], "learning_rates": None, "references": []}
    return experiment.model_copy(update=update | keys)


def test_every_shipped_experiment_is_valid():
    """Of one for each recipe also the runs, each model with one objective, and each objective with
    one model.
    """
    for file in CONFIGS.glob("*.yaml"):
        load_experiment(file.stem)
    for name in ("evidence_reduced", "table1_memorization"):
        experiment = load_experiment(name)
        for key in ("models", "objectives"):
            first = dict([*getattr(experiment, key).items()][:1])
            expected = (
                len(experiment.models) * len(experiment.objectives) / len(getattr(experiment, key))
            )
            assert (
                len(expand(one_run_of_each(experiment.model_copy(update={key: first})))) == expected
            )


def test_an_objective_can_change_the_data_and_how_long_it_is_trained_on(experiment_file):
    plain = Objective(loss=CE)
    other = {"loss": CE, "overrides": {"epochs": 7, "dataset": {"deduplicate": "exact"}}}
    experiment = load_experiment(
        experiment_file(objectives={"CE": CE, "CE deduplicated": other}),
        [
            "overrides.epochs=2",
            "overrides.max_steps=9",
            "models[Tiny (full)].overrides.epochs=3",
            "objectives[CE deduplicated].overrides.max_steps=${epochs}",
        ],
    )
    first, second = expand(experiment)

    assert experiment.objectives["CE"] == plain
    assert [run.settings["loss"] for run in (first, second)] == [CE, CE]
    assert [(run.settings["epochs"], run.settings["max_steps"]) for run in (first, second)] == [
        (3, 9),
        (7, 7),
    ]
    assert second.settings["dataset"] == first.settings["dataset"] | {"deduplicate": "exact"}
    assert "deduplicate" not in first.settings["dataset"]


def test_a_start_has_a_folder_of_its_own_for_everything_that_affects_it(tmp_path):
    def starts(*overrides):
        start = "start: {_component_: research.experiment.random_model}"
        own = (
            "models.Own={recipe: full_finetune, config: demo/llama_3M_full_memorization, "
            f"{start}}}"
        )
        runs = expand(load_experiment("demo", [own, *overrides]))
        return {run.config.tokenizer.path for run in runs if run.model == "Own"}

    def trained(epochs):
        component = "_component_: research.experiment.trained_model"
        start = f"start: {{{component}, source: {tmp_path}/text.txt, epochs: {epochs}}}"
        own = (
            "models.Own={recipe: full_finetune, config: demo/llama_3M_full_memorization, "
            f"{start}}}"
        )
        return expand(load_experiment("demo", [own]))[-1]

    (one,) = starts()  # all objectives have the same start
    assert starts("overrides.batch_size=2") == {one}
    different = [one, *starts("seeds=[1]"), *starts("overrides.model.num_layers=2")]
    seeded = starts("seeds=[0,1]", "models.Own.start.seed=7")
    assert seeded == starts("seeds=[7]")
    (tmp_path / "text.txt").write_text("some text\n")
    first = trained(1)
    longer = trained(2)
    (tmp_path / "text.txt").write_text("other text\n")
    edited = trained(1)
    different += [*seeded, *(str(run.start.folder) for run in (first, longer, edited))]
    assert len(set(different)) == len(different) == 7
    assert Path(*seeded).name.startswith("seed7-")
    source, changed = (run.settings["start"]["arguments"].pop("source") for run in (first, edited))
    assert source.startswith("contents ")
    assert source != changed
    assert first.settings["start"] == {
        "component": "research.experiment.trained_model",
        "arguments": {"epochs": 1},
        "seed": first.seed,
    }
    assert first.start.arguments == {"source": f"{tmp_path}/text.txt", "epochs": 1}


def test_every_learning_rate_has_a_run_and_a_model_can_have_its_own(experiment_file, tmp_path):
    file = experiment_file()
    own = (
        f"models.Other={{recipe: full_finetune, config: {tmp_path}/training.yaml, learning_rates: "
        "[0.02]}"
    )
    runs = expand(load_experiment(file, [own, "seeds=[0,1]", "learning_rates=[5e-4,1,0.00001]"]))
    out = tmp_path / "out"

    expected = []
    for model, rates in (("Tiny (full)", (0.0005, 1.0, 1e-5)), ("Other", (0.02,))):
        expected += itertools.product([model], (0, 1), rates, ("CE", "TF-IDF"))
    assert [(run.model, run.seed, run.learning_rate, run.objective) for run in runs] == expected
    assert runs[1].folder == out / "tiny-full" / "tf-idf" / "lr0.0005" / "seed0"
    assert [run.folder.parent.name for run in runs[2:6:2]] == ["lr1.0", "lr1e-05"]
    assert runs[4].title == "Tiny (full), CE, lr 1e-05, seed 0"
    assert all(
        run.config.optimizer.lr == run.settings["optimizer"]["lr"] == run.learning_rate
        for run in runs
    )
    assert runs[0].config.optimizer._component_ == "torch.optim.AdamW"
    without = expand(load_experiment(file, ["learning_rates=null", "overrides.optimizer.lr=0.1"]))[
        0
    ]
    assert (without.learning_rate, without.config.optimizer.lr, without.title) == (
        None,
        0.1,
        "Tiny (full), CE, seed 0",
    )
    assert without.folder == out / "tiny-full" / "ce" / "seed0"


MODEL = "models[Tiny (full)]"
START = f"{MODEL}.start={{_component_: research.experiment"


INVALID = [
    (["sedes=[1]"], "experiment: sedes: there is no such key; did you mean 'seeds'?"),
    (
        [f"{MODEL}.recpe=x"],
        r"experiment: models: Tiny \(full\): recpe: there is no such key; did you mean 'recipe'?",
    ),
    ([f"{MODEL}.config=nowhere"], "no config file nowhere, and no config of that name"),
    (
        [f"{MODEL}.recipe=lora_finetune"],
        "recipe is lora_finetune, the model .* is trained by full_finetune",
    ),
    (["seeds=[1,1]"], r"experiment: seeds: \[1, 1\]: it has 1 more than once"),
    (
        ["learning_rates=[0.1]", f"{MODEL}.learning_rates=[0.1,0.1]"],
        r"Tiny \(full\): learning_rates: .* once",
    ),
    (
        [f"{MODEL}.learning_rates=[0.1]"],
        r"Tiny \(full\): learning_rates: the experiment has no learning_rates; set",
    ),
    (["references=[TF-IDF]"], "references: the experiment has no learning_rates; set them"),
    (
        ["learning_rates=[0.1]", "overrides.optimizer.lr=0.1"],
        "experiment: overrides: optimizer.lr is set by",
    ),
    (
        [
            "learning_rates=[0.1]",
            f"{MODEL}.overrides.optimizer={{_component_: torch.optim.SGD, lr: 0.1}}",
        ],
        r"experiment: models: Tiny \(full\): overrides: optimizer.lr is set by the experiment's learning_rates",
    ),
    (
        ["tasks=[tfidf_sqaud]"],
        "experiment: no task tfidf_sqaud; possible are tfidf_cnn_dailymail, ",
    ),
    (
        ["eval.metadata.num_bloks=3"],
        "eval.metadata: no setting 'num_bloks'; did you mean 'num_blocks'?",
    ),
    (["eval.metadata.probe_file=./nowhere.jsonl"], "CE: eval.metadata.probe_file: .*nowhere.jsonl"),
    (["overrides.seed=3"], "overrides: seed is set by the experiment's seeds"),
    (["overrides.dataset.probe_file=null"], "give the dataset, or eval.metadata, a probe_file"),
    (
        ["overrides.checkpointer.checkpoint_dir=./nowhere"],
        "checkpointer.checkpoint_dir: no such folder nowhere",
    ),
    (
        ["objectives.CE={_component_: torch.nn.CrossEntropyLoss}"],
        "torch.nn.CrossEntropyLoss has no terms",
    ),
    (
        ["learning_rates=[0.1]", "objectives.B={loss: {}, overrides: {optimizer: {lr: 1}}}"],
        "experiment: objectives: B: overrides: optimizer.lr is set by the experiment's "
        "learning_rates",
    ),
    (
        ["objectives.ce={_component_: tfidf_tune.loss.CrossEntropyLoss}"],
        "'ce' and 'CE' share the folder 'ce'; rename",
    ),
    (
        [f"{MODEL}.start={{seed: 1}}"],
        "start: it is {'seed': 1}, it has to have a `_component_` and",
    ),
    ([f"{START}.trained_model, epoch: 1}}"], "CE: start: .*unexpected keyword argument 'epoch'"),
    ([f"{START}.trained_model, source: ./nowhere.txt}}"], "CE: start.source: .*nowhere.txt"),
]


def test_invalid_settings_are_refused_before_any_work_begins(experiment_file, tmp_path):
    file = experiment_file()
    for overrides, message in INVALID:
        with pytest.raises(SetupError) as refused:
            expand(load_experiment(file, overrides))
        assert re.search(message, str(refused.value)), (overrides, message)

    assert not (tmp_path / "out").exists()


def test_a_training_config_can_mix_data_sets(experiment_file, recipe_config, tmp_path, text_file):
    file = experiment_file()
    cfg = recipe_config()
    cfg.dataset = [
        {"_component_": "tfidf_tune.data.text_dataset", "source": str(text_file)},
        cfg.dataset,
    ]
    OmegaConf.save(cfg, tmp_path / "training.yaml")

    run, *_ = expand(load_experiment(file))

    sources = [section["source"] for section in run.settings["dataset"]]
    assert sources[0].startswith("contents "), "a local file is identified by its contents"
    assert sources[0] == sources[1]
    assert not any("probe_file" in section for section in run.settings["dataset"])
    assert run.evaluations[50]["metadata"]["probe_file"] == str(run.folder / "probe.jsonl")
    nowhere = (
        "overrides.dataset=[{_component_: tfidf_tune.data.text_dataset, source: ./nowhere.txt}]"
    )
    for override, message in (
        (nowhere, r"CE: dataset\[0\]\.source: .*nowhere"),
        ("overrides.dataset.a=b", "dataset"),
    ):
        with pytest.raises(SetupError, match=message):
            expand(load_experiment(file, [override]))
