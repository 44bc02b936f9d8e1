"""``tfidf-tune eval`` and ``tfidf-tune tasks``, in this process but where the exit of a process is
looked at.
"""

import inspect
import json
import os
import shutil
import weakref

import pytest
import torch
import yaml
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import MEMORIZATION, Output, run_tasks
from helpers.fakes.tiny_run import Payload
from lm_eval.models.api_models import TemplateAPI
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file, save_file

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.probe import load_model
from tfidf_tune.tasks import tasks_folder
from tfidf_tune.tasks._requests import original_tokenizer
from tfidf_tune.tasks.settings import prompts_for

OURS = {
    "tfidf_positive_control",
    "tfidf_positive_control_nll",
    *MEMORIZATION,
    "tfidf_memorization",
    "tfidf_memorization_prefixes",
    "tfidf_membership",
    "tfidf_wikitext2_ppl",
    "tfidf_other_ppl",
    "tfidf_cnn_dailymail",
    "tfidf_squad",
}
THEIR_TASK = """task: theirs
custom_dataset: !function tfidf_tune.tasks.squad.documents
dataset_kwargs: {squad_source: SOURCE}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answers[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 3, do_sample: false}
metric_list: [{metric: exact_match}]
"""


pytestmark = pytest.mark.usefixtures("only_our_tasks")


@pytest.fixture
def evaluation(llama, probe_file, tmp_path):
    return [
        "--model_args",
        f"pretrained={llama},dtype=float32",
        "--tasks",
        MEMORIZATION[0],
        "--device",
        "cpu",
        "--log_samples",
        "--output_path",
        tmp_path / "out",
        "--metadata",
        f"probe_file={probe_file}",
        "max_new_tokens=4",
    ]


def samples(folder, task=MEMORIZATION[0]):
    return [doc["sample"] for doc in Output(folder).docs(task)]


def test_tasks_prints_the_folder_of_the_tasks(run_command, capsys):
    run_command("tasks")
    printed = capsys.readouterr().out
    assert printed == f"{tasks_folder()}\n"
    assert tasks_folder().is_absolute()
    assert {file.stem for file in tasks_folder().glob("*.yaml")} == OURS
    manager = TaskManager(include_path=printed.strip(), include_defaults=False)
    assert set(manager.all_tasks) == OURS


def test_tasks_writes_a_pass_through_tokenizer(run_command, capsys, llama, tmp_path):
    run_command("tasks", "--token-ids-tokenizer", tmp_path / "ids", "--tokenizer", llama)
    assert capsys.readouterr().out == f"{tmp_path / 'ids'}\n"
    assert (
        hf_tokenizer(original_tokenizer(str(tmp_path / "ids"))).fingerprint
        == hf_tokenizer(str(llama)).fingerprint
    )
    with pytest.raises(
        SystemExit, match="error: .* already exists and is not empty: name another folder"
    ):
        run_command("tasks", "--token-ids-tokenizer", tmp_path / "ids", "--tokenizer", llama)
    for option in ("--token-ids-tokenizer", "--tokenizer"):
        with pytest.raises(SystemExit) as ended:
            run_command("tasks", option, tmp_path / "x")
        assert ended.value.code == 2
        assert "--token-ids-tokenizer and --tokenizer belong together" in capsys.readouterr().err


def test_eval_sends_ids_to_our_model(run_command, evaluation, llama, probe_file, tmp_path, capsys):
    run_command("eval", *evaluation)
    printed = capsys.readouterr().out
    assert "tfidf-hf (" in printed
    assert "verbatim_rate" in printed
    expected = run_tasks(
        llama, MEMORIZATION[0], tmp_path / "api", probe_file=probe_file, max_new_tokens=4
    )
    assert samples(tmp_path / "out") == samples(expected.folder)
    assert {doc["prompts"] for doc in Output(tmp_path / "out").docs(MEMORIZATION[0])} == {
        "token_ids"
    }
    # What the user names counts more than what the command would set.
    run_command("eval", *evaluation, "prompts=text", "--output_path", tmp_path / "text")
    assert {doc["prompts"] for doc in Output(tmp_path / "text").docs(MEMORIZATION[0])} == {"text"}


@pytest.mark.parametrize("form", ["of options", "of texts", "of another model"])
def test_a_config_file_is_read(form, run_command, llama, probe_file, squad_file, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "theirs.yaml").write_text(THEIR_TASK.replace("SOURCE", squad_file))
    metadata = {"probe_file": str(probe_file), "max_new_tokens": 4}
    model_args = {"pretrained": str(llama), "dtype": "float32"}
    if form == "of texts":
        metadata, model_args = (
            ",".join(f"{k}={v}" for k, v in values.items()) for values in (metadata, model_args)
        )
    config = {
        **({"model": "hf"} if form == "of another model" else {}),
        "tasks": [MEMORIZATION[0], "theirs"],
        "model_args": model_args,
        "metadata": metadata,
        "include_path": str(tmp_path / "theirs"),
        "device": "cpu",
        "log_samples": True,
        "output_path": str(tmp_path / "out"),
    }
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(config))
    run_command("eval", "--config", tmp_path / "eval.yaml")
    assert len(samples(tmp_path / "out")) == 4
    prompts = {doc["prompts"] for doc in Output(tmp_path / "out").docs(MEMORIZATION[0])}
    assert prompts == {"text" if form == "of another model" else "token_ids"}
    assert len(Output(tmp_path / "out").docs("theirs")) == 3


def test_an_adapter_folder_is_loaded_on_the_base_that_it_names(
    run_command, evaluation, llama, taught_adapter, tokenizers, tmp_path, capsys
):
    adapter = shutil.copytree(taught_adapter, tmp_path / "checkpoint_100pct")
    config = json.loads((adapter / "adapter_config.json").read_text())
    arguments = evaluation[2:]

    def named(base):
        (adapter / "adapter_config.json").write_text(
            json.dumps(config | {"base_model_name_or_path": base})
        )
        return ["eval", "--model_args", f"pretrained={adapter},dtype=float32", *arguments]

    shutil.copytree(tokenizers["plain"], adapter, dirs_exist_ok=True)  # as in a checkpoint of a run
    base_without_tokenizer = shutil.copytree(
        llama, tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer*")
    )
    (
        tmp_path / "config.yaml"
    ).write_text("""{seed: 7, model: {_component_: m.lora_llama, lora_rank: 8},
        loss: {_component_: tfidf_tune.loss.TFIDFCrossEntropyLoss, tf: log}, checkpointer: {checkpoint_dir: a/tiny}}""")
    run_command(*named(str(base_without_tokenizer)))
    found = samples(tmp_path / "out")
    recorded = json.loads(Output(tmp_path / "out").file.read_text())["configs"][MEMORIZATION[0]][
        "metadata"
    ]["run"]
    loss = {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss", "tf": "log"}
    names = {"model": "tiny (LoRA)", "objective": "TF-IDF (tf=log)", "seed": 7, "progress": 100}
    assert recorded.items() >= {**names, "folder": str(tmp_path), "loss": loss}.items()
    run_command(
        "eval",
        "--model_args",
        f"pretrained={llama},peft={taught_adapter},dtype=float32",
        *arguments,
        "--output_path",
        tmp_path / "by hand",
    )
    assert found == samples(tmp_path / "by hand")
    assert any(sample["verbatim"] for sample in found)

    for base, message in (
        (str(tmp_path / "gone"), "belongs to the base model .*gone, which does not exist"),
        (None, "names no base"),
    ):
        with pytest.raises(SystemExit, match=f"error: the adapter .*{message}.*base=BASE"):
            run_command(*named(base))


def test_bad_input_ends_with_one_message(
    run_command, llama, tokenizers, probe_file, tmp_path, monkeypatch
):
    monkeypatch.delenv("TFIDF_TUNE_PROBE_FILE", raising=False)
    config = tmp_path / "eval.yaml"
    for text in (None, "- a", "a: ["):
        if text is not None:
            config.write_text(text)
        with pytest.raises(SystemExit, match=f"error: .*{config}"):  # in the words of the harness
            run_command("eval", "--config", config)
    arguments = [
        "--tasks",
        MEMORIZATION[0],
        "--device",
        "cpu",
        "--metadata",
        f"probe_file={probe_file}",
    ]
    with pytest.raises(
        SystemExit,
        match=r"error: .*'/nowhere/model': name a folder with tokenizer\.json .* or a hub id",
    ):
        run_command("eval", "--model_args", "pretrained=/nowhere/model", *arguments)

    # All else before the model is loaded.
    monkeypatch.setattr(
        "tfidf_tune.tasks._transformers.TokenExactHFLM.__init__",
        lambda *_, **__: pytest.fail("the model was loaded"),
    )
    other = task_fakes.probe_file(
        tmp_path / "other.jsonl", task_fakes.passages_of(tokenizers["llama"])
    )
    short = "cnn_dailymail_max_source_tokens=100"
    for task, metadata, named in (
        (
            "tfidf_memorization",
            "max_new_tokens=4",
            "no probe file is named: give --metadata probe_file=.*`tfidf-tune probe make`",
        ),
        (
            "tfidf_memorization",
            f"probe_file={other},prefixlengths=[16]",
            "--metadata: no task has the setting prefixlengths; there are .*prefix_lengths",
        ),
        (
            "tfidf_membership",
            f"probe_file={other},min_kk=3",
            "--metadata: no task has the setting min_kk; there are .*block_size",
        ),
        (
            "tfidf_memorization",
            "probe_file=gone.jsonl",
            r"no such probe file: 'gone\.jsonl'; .*`tfidf-tune probe make` makes one",
        ),
        (
            "tfidf_memorization",
            f"probe_file={other}",
            "'target-0000' needs the tokenizer .* has .*Name that tokenizer",
        ),
        ("tfidf_other_ppl", "block_size=8", "tfidf_other_ppl needs other_source: a hub id"),
        (
            "tfidf_squad",
            "squad_source=no/such_data_set",
            "'no/such_data_set' is not on this machine, and the Hugging Face hub could not be",
        ),
        ("tfidf_memoization", short, "tfidf_memoization"),
    ):
        arguments = ["--model_args", f"pretrained={llama}", "--tasks", task, "--device", "cpu"]
        with pytest.raises(SystemExit, match=f"error: .*{named}"):
            run_command("eval", *arguments, "--metadata", metadata, short)


def pickle_with_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload(folder / "executed")}, folder / "pytorch_model.bin")


def no_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"junk" * 100)


def cut(folder):
    os.truncate(folder / "model.safetensors", 1000)


def without_a_layer(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def own_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "brand-new", "auto_map": {"AutoConfig": "configuration_new.NewConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_new.py").write_text(
        "import pathlib\npathlib.Path(__file__, '../executed').mkdir()"
    )


def own_code_of_the_tokenizer(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "NewTokenizer",
        "auto_map": {"AutoTokenizer": [None, "new.NewTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            pickle_with_code,
            "model are damaged, or hold more than tensors.* not run: take them as safetensors",
        ),
        (
            no_pickle,
            "the weights of .*model cannot be read .*: they are damaged.* download or write them "
            "again",
        ),
        (
            cut,
            "the weights of .*model cannot be read .*: they are damaged.* download or write them "
            "again",
        ),
        (
            without_a_layer,
            r"lacks 1 of the model's weights, model\.layers\.0\.mlp\.up_proj\.weight first.* finished checkpoint",
        ),
        (
            own_code,
            "model has Python files of its own, which were not run: .*set trust_remote_code=True",
        ),
        (
            own_code_of_the_tokenizer,
            "tokenizer .*Python files of its own, which were not run: .*set trust_remote_code=True",
        ),
    ],
)
def test_a_model_that_is_damaged_or_holds_code_is_one_message_and_no_question(
    damage, named, run_command, llama, probe_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "builtins.input", lambda *_: pytest.fail("transformers asks on the terminal")
    )
    folder = shutil.copytree(llama, tmp_path / "model")
    damage(folder)
    arguments = [
        "--model_args",
        f"pretrained={folder}",
        "--tasks",
        MEMORIZATION[0],
        "--device",
        "cpu",
    ]
    with pytest.raises(SystemExit, match=f"error: .*{named}"):
        run_command("eval", *arguments, "--metadata", f"probe_file={probe_file}")
    if damage is not own_code_of_the_tokenizer:
        with pytest.raises(ValueError, match=named):
            load_model(folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize("option", [("--use_cache", "answers"), ("--cache_requests", "true")])
def test_caches_that_do_not_know_the_model_are_refused(run_command, llama, wiki_file, option):
    arguments = [
        "--model_args",
        f"pretrained={llama}",
        "--tasks",
        "tfidf_wikitext2_ppl",
        "--device",
        "cpu",
        *option,
    ]
    message = (
        "error: .*--use_cache and --cache_requests have neither the model nor the probe file.*: "
        "leave them out"
    )
    with pytest.raises(SystemExit, match=message):
        run_command("eval", *arguments, "--metadata", f"wikitext2_source={wiki_file}")


# ---- evaluate, the function


def test_bad_arguments_of_the_function_are_refused(llama, probe_file, tmp_path):
    with pytest.raises(
        ValueError, match="no task tfidf_swag; possible are tfidf_cnn_dailymail, tfidf_mem"
    ):
        run_tasks(llama, "tfidf_swag", tmp_path)
    with pytest.raises(ValueError, match="batch_size must be .* got 0"):
        run_tasks(llama, MEMORIZATION[0], tmp_path, batch_size=0)


def test_a_setting_that_is_nearly_the_name_of_another_is_refused_whoever_calls(
    llama, probe_file, tmp_path
):
    """The harness gives tasks the arguments of the model, too."""
    for wrong, right in (
        ("offest", "offset"),
        ("num_sample", "num_samples"),
        ("prefixlengths", "prefix_lengths"),
    ):
        with pytest.raises(
            ValueError, match=f"no setting '{wrong}' of a task: did you mean '{right}'"
        ):
            run_tasks(llama, MEMORIZATION[0], tmp_path, probe_file=probe_file, **{wrong: 3})
    arguments = {}
    for function in (HFLM.__init__, HFLM._create_model, TemplateAPI.__init__):
        arguments |= dict.fromkeys(inspect.signature(function).parameters)
    prompts_for(
        arguments | {"pretrained": str(llama), "trust_remote_code": False, "revision": "main"}
    )


def test_evaluations_in_one_process_keep_no_model_and_do_not_affect_each_other(
    llama, models, wiki_file, tmp_path
):
    """Experiments evaluate the milestones of a run this way."""
    task = "tfidf_wikitext2_ppl"
    modules = weakref.WeakSet()
    num_calls = []

    def record(module, args):
        modules.add(module)
        num_calls.append(1)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(record)
    try:
        first, other, again = (
            run_tasks(
                model, task, tmp_path / name, wikitext2_source=wiki_file, block_size=64
            ).metrics(task)
            for name, model in {"1": llama, "2": models["gptj"], "3": llama}.items()
        )
    finally:
        hook.remove()
    assert first == again != other
    assert num_calls
    assert len(modules) == 0
