"""Starting a recipe: its config, the components that it names, and how errors end it."""

import logging
import re
import sys

import pytest
import torch
from helpers.fakes.tiny_models import MODELS
from omegaconf import OmegaConf

from tfidf_tune._config import OBJECTIVES, check_keys
from tfidf_tune.commands._shipped import config_files
from tfidf_tune.training import (
    FinetuneConfig,
    LoRAFinetuneConfig,
    Run,
    SetupError,
    build_model,
    check_config,
    load_config,
    recipe,
)
from tfidf_tune.training._config import loggable
from tfidf_tune.training._resume import _settings_affecting_results


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start a recipe as torchtune does; ``cfg`` is what it was given."""

    def run(body, *arguments, text="a: 1"):
        (tmp_path / "mine.yaml").write_text(text)
        monkeypatch.setattr("signal.signal", lambda *_: None)
        monkeypatch.setattr(
            sys, "argv", ["recipe", "--config", str(tmp_path / "mine.yaml"), *arguments]
        )
        try:
            recipe(body)()
        except SystemExit as ended:
            return ended.code
        return None

    return run


def raising(error):
    def body(cfg):
        raise error

    return body


def test_an_error_of_the_user_is_one_message_and_bugs_keep_their_traceback(start):
    for error, message in (
        (SetupError("the value 5 is too small"), "the value 5 is too small"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nmore"),
            "out of memory before training began (CUDA out of mem",
        ),
        (MemoryError("for 8 TiB"), "out of host memory (for 8 TiB)"),
    ):
        assert start(raising(error)).startswith(f"error: {message}")
    assert "out of memory before training began" in start(
        lambda cfg: torch.empty(2**60, dtype=torch.uint8)
    )
    for error in (RuntimeError("mat1 and mat2"), ValueError("a bug")):
        with pytest.raises(type(error), match=str(error)):
            start(raising(error))


def write_configs(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_config_is_merged_into_its_base(tmp_path):
    """References are resolved after overrides; sections with a component and lists are replaced."""
    write_configs(
        tmp_path,
        bottom="a: 1\nb: ${a}\nm: ???\nmodel: {_component_: x, rank: 8}\nloss: {_component_: y, k: "
        "1}\nsets: {d: 1}",
        middle="base: bottom.yaml\na: 2\nmodel: {rank: 16}\nsets: [{_component_: y}]",
        top="base: middle.yaml\nc: ???\nloss: {_component_: z}\nsets: {_component_: w}",
    )

    assert load_config(str(tmp_path / "middle.yaml")).sets == [{"_component_": "y"}]
    cfg = load_config(str(tmp_path / "top.yaml"), ["model=w", "a=3", "c=4", "m=5", "~model.rank"])
    assert cfg == {
        "a": 3,
        "b": 3,
        "c": 4,
        "m": 5,
        "model": {"_component_": "w"},
        "loss": {"_component_": "z"},
        "sets": {"_component_": "w"},
    }
    for override in ("~z", "~a.b"):
        with pytest.raises(SetupError, match="^config: "):
            load_config(str(tmp_path / "top.yaml"), [override])


def test_a_base_is_looked_up_next_to_the_file_then_in_the_working_directory_then_by_name(
    tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    write_configs(
        tmp_path,
        base="found: next to it",
        mine="base: base.yaml",
        by_name="base: tinyllama/1.1B_lora_qa",
        from_here="base: only_here.yaml",
    )
    write_configs(tmp_path / "here", base="found: here", only_here="found: here")
    monkeypatch.chdir(tmp_path / "here")

    assert load_config("../mine.yaml").found == "next to it"
    assert load_config("../from_here.yaml").found == "here"
    assert load_config("../by_name.yaml").batch_size == 8


def test_a_part_of_a_list_cannot_be_changed(tmp_path):
    write_configs(
        tmp_path,
        parent="dataset: [{_component_: x}]",
        child="base: parent.yaml\ndataset: {source: a}",
    )

    for override in ("dataset.source=a", "dataset.0.source=a", "dataset[0].source=a"):
        with pytest.raises(SetupError, match=r"config: dataset.*source=a: dataset is a list"):
            load_config(str(tmp_path / "parent.yaml"), [override])
    with pytest.raises(SetupError, match=r"child\.yaml: dataset is a list"):
        load_config(str(tmp_path / "child.yaml"))


def test_another_component_drops_the_keys_that_it_does_not_take(tmp_path, caplog):
    """In whatever order the overrides come, because a user means the component of the run."""
    write_configs(
        tmp_path,
        mine="loss: {_component_: tfidf_tune.loss.TFIDFCrossEntropyLoss, tf: log, num_batches: 4, "
        "head: chunked}\noptimizer: {_component_: torch.optim.AdamW, lr: 1, betas: [0, 0]}",
    )
    ce = {"_component_": "tfidf_tune.loss.CrossEntropyLoss", "head": "chunked"}

    def load(*overrides):
        return load_config(str(tmp_path / "mine.yaml"), overrides)

    for override in (
        "loss=tfidf_tune.loss.CrossEntropyLoss",
        "loss._component_=tfidf_tune.loss.CrossEntropyLoss",
    ):
        caplog.clear()
        assert load(override).loss == ce
        assert caplog.messages == [
            "config: loss: tfidf_tune.loss.CrossEntropyLoss takes no tf, num_batches: left out"
        ]
    caplog.clear()
    assert load("loss=ce").loss == ce  # a word stands for the whole objective
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert load("optimizer.momentum=0.9", "optimizer=torch.optim.SGD").optimizer == {
        "_component_": "torch.optim.SGD",
        "lr": 1,
        "momentum": 0.9,
    }
    # Is refused.
    assert load("loss.tf=binary", "loss=tfidf_tune.loss.CrossEntropyLoss").loss == ce | {
        "tf": "binary"
    }
    caplog.clear()
    assert load("loss={_component_: x, k: 3}").loss == {"_component_": "x", "k": 3}
    assert load("loss=[{_component_: x}]").loss == [{"_component_": "x"}]
    assert load("loss=tfidf_tune.loss.TFIDFCrossEntropyLoss").loss.tf == "log"
    assert load("loss=no.such.loss").loss.tf == "log"
    assert not caplog.messages
    goldfish = (
        "loss={_component_: tfidf_tune.loss.WeightedCrossEntropyLoss, weighting: {_component_: x, "
        "k: 3}}"
    )
    of_weighting = load(
        goldfish, "loss.weighting=tfidf_tune.weighting.TFIDFWeighting"
    ).loss.weighting
    assert of_weighting == {"_component_": "tfidf_tune.weighting.TFIDFWeighting"}


def test_values_marked_as_missing_are_named_wherever_they_are(recipe_config):
    """A value that another one refers to as well."""
    dataset = [{"_component_": "x", "source": "???"}]
    cfg = recipe_config(
        epochs="???",
        dataset=dataset,
        **{"optimizer.lr": "???", "checkpointer.checkpoint_dir": "???"},
    )

    message = r"^config: missing checkpointer\.checkpoint_dir, dataset\[0\]\.source, epochs, optimizer\.lr$"
    with pytest.raises(SetupError, match=message):
        check_config(cfg, FinetuneConfig)


def test_without_a_seed_one_is_drawn_that_all_references_share(recipe_config):
    drawn = [check_config(recipe_config(seed=None), FinetuneConfig) for _ in range(2)]

    assert drawn[0].seed == drawn[0].dataset.seed
    assert drawn[0].seed != drawn[1].seed


def test_device_and_dtype_are_those_of_the_machine(recipe_config, monkeypatch):
    auto = {"device": "auto", "dtype": "auto"}
    for lora, schema in ((False, FinetuneConfig), (True, LoRAFinetuneConfig)):
        cfg = check_config(
            recipe_config(lora=lora, **auto, **{"optimizer.fused": "${compile}"}), schema
        )
        on_gpu = torch.cuda.is_available()
        assert (cfg.device, cfg.dtype) == (("cuda", "bf16") if on_gpu else ("cpu", "fp32"))
    for capable, dtype in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, capable=capable: capable
        )
        found = check_config(recipe_config(**auto), FinetuneConfig)
        assert (found.device, found.dtype) == ("cuda", dtype)
        assert check_config(recipe_config(dtype="auto"), FinetuneConfig).dtype == "fp32", (
            "a run on the CPU"
        )


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        (
            "gptj",
            {"lora_attn_modules": ["out_proj"]},
            "names 'out_proj', .*possible are k_proj, output_proj, q_proj",
        ),
        (
            "llama3_2-tied",
            {"apply_lora_to_output": True},
            "apply_lora_to_output is .*tied to the embeddings",
        ),
        (
            "qwen2-tied",
            {"apply_lora_to_output": True},
            "apply_lora_to_output is .*tie_word_embeddings",
        ),
        ("gpt_neox", {"quantize_base": True}, "multiples of 16384 weights, not 64 x 192"),
    ],
)
def test_lora_settings_that_the_model_cannot_have_are_refused(name, lora, message, tmp_path):
    cfg = OmegaConf.create({"model": MODELS[name].section(lora=True, **lora)})

    with pytest.raises(SetupError, match=f"^config: model: .*{message}"):
        build_model(cfg, Run(torch.device("cpu"), torch.float32, 0, tmp_path))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(
            (text, text)
            for text in (
                "texts #2.jsonl",
                "part 1: a.jsonl",
                "[1] a.jsonl",
                "{x} y",
                "*x",
                "&x y",
                "!x",
            )
        ),
        *(
            (text, text)
            for text in (
                "%x",
                "@x",
                "it's",
                "- x",
                "|",
                "5 #x",
                "2026-01-01",
                "${a}/x: y",
                "a=b",
                '"a" b',
            )
        ),
        *((text, text) for text in ("---", "...")),
        ("5", 5),
        ("1e-5", 1e-5),
        ("true", True),
        ("null", None),
        ("None", None),
        ("", None),
        ("'5'", "5"),
        ('"a #b"', "a #b"),
        ("[a, 'b #2']", ["a", "b #2"]),
        ("{c: [1]}", {"c": [1]}),
    ],
)
def test_the_value_of_an_override_is_taken_whole(text, value, tmp_path):
    write_configs(tmp_path, mine="a: 1\nb: {c: 2}")
    cfg = load_config(str(tmp_path / "mine.yaml"), [f"d={text}", f"b.e={text}"])
    content = OmegaConf.to_container(cfg, resolve=False)
    assert (content["d"], content["b"]["e"], content["b"]["c"]) == (value, value, 2)


def test_a_value_that_is_no_yaml_is_refused_with_what_to_do(tmp_path):
    write_configs(tmp_path, mine="a: 1")
    with pytest.raises(SetupError, match=r"config: a=\[b #c\]: .*put quotes around a text"):
        load_config(str(tmp_path / "mine.yaml"), ["a=[b #c]"])


def test_what_comes_from_the_environment_is_in_no_file_and_no_log(recipe_config, monkeypatch):
    """References to it, and to values with it, are read as what they mean, and written as they are
    written.
    """
    monkeypatch.setenv("TFIDF_KEY", "s3cret")
    given = recipe_config(**{"dataset.source": "${oc.env:TFIDF_KEY}/texts.jsonl"})
    given.metric_logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${dataset.source}",
    }
    cfg = check_config(given, FinetuneConfig)
    assert (cfg.dataset.source, cfg.metric_logger.log_dir) == ("s3cret/texts.jsonl",) * 2
    assert cfg.output_dir == str(given.output_dir)  # other references are resolved
    settings = _settings_affecting_results(cfg)
    logged = OmegaConf.to_container(loggable(cfg), resolve=True)
    for text in (OmegaConf.to_yaml(cfg), str(settings), str(logged)):
        assert "s3cret" not in text
        assert "${oc.env:TFIDF_KEY}/texts.jsonl" in text
    # A run is resumed with the same value only.
    monkeypatch.setenv("TFIDF_KEY", "another")
    assert _settings_affecting_results(check_config(given, FinetuneConfig)) != settings
    given.batch_size = "${oc.env:TFIDF_KEY}"
    with pytest.raises(SetupError, match="batch_size is the value of an environment variable"):
        check_config(given, FinetuneConfig)


def test_numbers_from_the_environment_are_numbers_and_a_folder_from_it_may_move(
    recipe_config, monkeypatch, tmp_path
):
    monkeypatch.setenv("TFIDF_SEED", "7")
    monkeypatch.setenv("TFIDF_OUT", str(tmp_path / "first"))
    given = recipe_config(
        seed="${oc.decode:${oc.env:TFIDF_SEED}}",
        output_dir="${oc.env:TFIDF_OUT}/run",
        **{"dataset.probe_file": "${output_dir}/probe.jsonl"},
    )
    cfg = check_config(given, FinetuneConfig)
    assert "\nseed: 7\n" in OmegaConf.to_yaml(cfg)
    settings = _settings_affecting_results(cfg)
    monkeypatch.setenv("TFIDF_OUT", str(tmp_path / "second"))
    assert _settings_affecting_results(check_config(given, FinetuneConfig)) == settings


@pytest.mark.parametrize("word", list(OBJECTIVES))
def test_a_word_stands_for_an_objective_and_keeps_what_it_takes(word, tmp_path):
    write_configs(
        tmp_path,
        mine="loss: {_component_: tfidf_tune.loss.TFIDFCrossEntropyLoss, tf: log, head: chunked}",
    )
    components = OBJECTIVES[word]
    section = load_config(str(tmp_path / "mine.yaml"), [f"loss={word}"]).loss
    assert section["_component_"] == components["loss"]
    assert section.head == "chunked"
    assert section.get("tf") == ("log" if word == "tfidf" else None)
    weighting = components.get("loss.weighting")
    assert OmegaConf.select(section, "weighting._component_") == weighting


def test_a_word_stands_for_an_objective_in_a_file_and_an_unknown_word_is_refused(tmp_path):
    write_configs(
        tmp_path, mine="base: mine/lora\nloss: goldfish", wrong="base: mine/lora\nloss: goldfisch"
    )
    section = load_config(str(tmp_path / "mine.yaml"), ["loss.weighting.k=3"]).loss
    assert section == {
        "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
        "weighting": {"_component_": "tfidf_tune.weighting.GoldfishWeighting", "k": 3},
    }
    section = load_config(str(tmp_path / "mine.yaml"), ["loss.weighting=mile"]).loss
    assert section.weighting == {"_component_": "tfidf_tune.weighting.MiLeWeighting"}
    with pytest.raises(SetupError, match="loss is 'goldfisch'; did you mean 'goldfish'"):
        load_config(str(tmp_path / "wrong.yaml"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.dedup=minhash"], "no key 'dataset.dedup'; did you mean 'dataset.deduplicate'"),
        (["dataset.sorce=a.jsonl"], "no key 'dataset.sorce'; did you mean 'dataset.source'"),
        (["model.lora_rnk=4"], "no key 'model.lora_rnk'; did you mean 'model.lora_rank'"),
        (["dedup=minhash"], "no key 'dedup'; did you mean 'dataset.deduplicate'?"),
        (["deduplicate=minhash"], "no key 'deduplicate'; did you mean 'dataset.deduplicate'?"),
        (["learning_rate=1"], "no key 'learning_rate'; did you mean 'optimizer.lr'?"),
        (["batchsize=1"], "no key 'batchsize'; did you mean 'batch_size'?"),
        (["loss=tf-idf"], "loss is 'tf-idf'; did you mean 'tfidf'?"),
        (["loss=TFIDF"], "loss is 'TFIDF'; did you mean 'tfidf'?"),
        (["loss.weighting=goldfsh"], "loss.weighting is 'goldfsh'; did you mean 'goldfish'?"),
        (["loss=mse"], "loss is 'mse'; possible are ce, repetition, "),
        (["loss=ce", "loss.tf=log"], "no key 'loss.tf': possible are num_output_chunks, "),
        (["loss=tfidf_tune.loss.TFDIFCrossEntropyLoss"], "did you mean 'TFIDFCrossEntropyLoss'"),
        (
            ["dataset=tfidf_tune.data.sft_dataset", "dataset.trainon=all"],
            "did you mean 'dataset.train_on'",
        ),
    ],
)
def test_wrong_arguments_of_our_components_are_known_from_the_source(overrides, message):
    with pytest.raises(SetupError, match=re.escape(message)):
        check_keys("mine/lora", overrides, LoRAFinetuneConfig)


def test_arguments_that_a_component_takes_and_those_of_others_are_left_to_the_later_check():
    for overrides in (
        ["loss=goldfish", "loss.weighting.k=3", "loss.head=chunked"],
        ["model=torchtune.models.llama2.llama2", "model.anything=1"],
        ["dataset={_component_: my.data, anything: 1}", "optimizer.foreach=true"],
        ["dataset=tfidf_tune.data.text_dataset", "dataset.packed=true"],
    ):
        check_keys("mine/lora", overrides, LoRAFinetuneConfig)
    for name in config_files():
        check_keys(name, [], LoRAFinetuneConfig)
