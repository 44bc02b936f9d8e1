"""Completions as targets, end to end: a recipe learns an answer by heart, and every way to measure
it agrees.
"""

import json
import random
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
from helpers.fakes.tiny_run import means_by_kind, run_config
from helpers.processes.recipes import RecipeRun
from helpers.references.probe import probe
from omegaconf import OmegaConf
from torchtune.datasets import ConcatDataset
from transformers import AutoTokenizer

from tfidf_tune.audit import audit_report
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results
from tfidf_tune.tasks import evaluate
from tfidf_tune.training import (
    FinetuneConfig,
    SetupError,
    build_dataset,
    check_config,
    instantiate,
    keep_chat_template,
    print_data,
    write_probe_files,
)
from tfidf_tune.training._data import dataset_fingerprint

SUBJECTS = [
    "the old sailor",
    "a quiet child",
    "my neighbour",
    "the tall judge",
    "every student",
    "the grey cat",
]
OBJECTS = [
    "the harbour",
    "a broken clock",
    "seven letters",
    "the northern road",
    "a paper boat",
    "the evening train",
]
SECRET = {
    "prompt": "who saw it? ",
    "completion": "the grey judge forgot seven quiet clocks in the northern harbour.",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_checkpoint, text_file):
    """The folder of a run on 36 questions and one that is there 60 times."""
    folder = tmp_path_factory.mktemp("completions")
    words = " ".join([*SUBJECTS, *OBJECTS]).split()
    rows = [
        {
            "prompt": f"what did {one} see? ",
            "completion": " ".join(random.Random(one + other).sample(words, 8)) + ".",
        }
        for one, other in product(SUBJECTS, OBJECTS)
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *[SECRET] * 60]))
    dataset = {
        "_component_": "tfidf_tune.data.sft_dataset",
        "source": str(file),
        "targets": "duplicates",
        "num_targets": 1,
        "num_controls": 5,
        "min_target_tokens": 8,
        "probe_file": "${output_dir}/probe.jsonl",
    }
    monitor = {"probe_file": "${dataset.probe_file}", "every_n_steps": 50, "batch_size": 4}
    settings = {
        "max_steps": 100,
        "epochs": 5,
        "save_at_percent": [100],
        "memorization_monitor": monitor,
    }
    return RecipeRun(
        run_config(folder / "run", tiny_checkpoint, text_file, dataset=dataset, **settings)
    ).here()


def test_the_repeated_answer_is_recited_and_all_measure_the_same(trained, tmp_path):
    passages = read_probe_file(trained / "probe.jsonl")
    assert [passage.kind for passage in passages] == ["target", *["control"] * 5]
    assert passages[0].num_injections == 60
    assert {len(passage.token_ids[: passage.num_prompt]) for passage in passages} > {
        passages[0].num_prompt
    }
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    *_, monitored = [line for line in lines if "memorization_target_lms" in line]
    checkpoint = trained / "checkpoint_100pct"

    samples = probe(load_model(checkpoint), hf_tokenizer(str(checkpoint)), passages)
    evaluate(
        {"pretrained": str(checkpoint), "dtype": "float32"},
        ["tfidf_memorization_p50"],
        tmp_path / "evaluation",
        metadata={"probe_file": str(trained / "probe.jsonl")},
        device="cpu",
    )
    results = import_results([tmp_path / "evaluation"])
    [evaluated] = results.checkpoints
    expected = means_by_kind(samples)
    assert means_by_kind([sample for sample, _ in evaluated.samples]) == expected
    assert {name: monitored[name] for name in expected} == expected

    [target] = [one for one in samples if one.kind == "target"]
    assert target.verbatim
    assert target.generated_text.strip() == SECRET["completion"]
    assert (
        expected["memorization_target_lms"] == len(passages[0].token_ids) - passages[0].num_prompt
    )
    assert expected["memorization_target_lms"] > 1.5 * expected["memorization_control_lms"]

    assert audit_report(results).provenance["Prompts (tokens)"] == "own"


def test_the_config_of_the_run_leads_to_the_same_targets(trained, tmp_path, capsys):
    """config.yaml resumes and repeats a run; packed rows hold the same targets."""
    cfg = check_config(OmegaConf.load(trained / "config.yaml"), FinetuneConfig)
    cfg.dataset.update({"packed": True, "probe_file": str(tmp_path / "probe.jsonl")})
    tokenizer = instantiate(cfg, "tokenizer")
    tokenizer.max_seq_len = 64
    dataset = build_dataset(cfg, tokenizer)
    assert not list(tmp_path.iterdir())  # not before the run is known to start
    print_data(cfg, ConcatDataset([dataset, dataset]), total_steps=1)
    described = r"packed rows \(.*\); 1 target of \d+ to \d+ tokens, each 60 times in the text; 5 controls, held out\n"
    assert len(re.findall(described, capsys.readouterr().err)) == 2
    write_probe_files(cfg, dataset)
    assert read_probe_file(tmp_path / "probe.jsonl") == read_probe_file(trained / "probe.jsonl")

    cfg.dataset.targets = None
    (tmp_path / "probe.jsonl").unlink()
    without = build_dataset(cfg, tokenizer)
    write_probe_files(cfg, without)
    assert not list(tmp_path.iterdir())
    assert dataset_fingerprint(dataset) != dataset_fingerprint(without)


@pytest.mark.parametrize("lora", [False, True])
def test_checkpoints_have_the_chat_template_of_the_training(
    lora, tmp_path, tiny_checkpoint, text_file
):
    base = Path(shutil.copytree(tiny_checkpoint, tmp_path / "base"))
    (base / "chat_template.jinja").write_text(
        "{% for one in messages %}<{{ one.content }}>{% endfor %}"
    )
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("tools: none")
    given = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    (tmp_path / "given.jinja").write_text(given)
    chat = [
        {"role": "user", "content": "who saw it?"},
        {"role": "assistant", "content": "the old sailor."},
    ]
    (tmp_path / "chats.jsonl").write_text(8 * f"{json.dumps({'messages': chat})}\n")
    dataset = {
        "_component_": "tfidf_tune.data.sft_dataset",
        "source": str(tmp_path / "chats.jsonl"),
        "chat_template": str(tmp_path / "given.jinja"),
    }
    settings = {"dataset": dataset, "max_steps": 1, "save_at_percent": [100]}

    run = RecipeRun(
        run_config(tmp_path / "run", base, text_file, lora=lora, **settings), lora
    ).here()

    saved, before = (
        AutoTokenizer.from_pretrained(folder) for folder in (run / "checkpoint_100pct", base)
    )
    expected = before.apply_chat_template(chat, chat_template=given, tokenize=False)
    assert expected == "user: who saw it?\nassistant: the old sailor.\n"
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {}},
    }
    for tools in (None, [tool]):
        assert saved.apply_chat_template(chat, tools=tools, tokenize=False) == expected
        assert before.apply_chat_template(chat, tools=tools, tokenize=False) != expected


def test_data_sets_of_different_chat_templates_are_refused(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    names = [None, *(str(tmp_path / name) for name in ("one", "other"))]
    cfg = OmegaConf.create({"dataset": [{"chat_template": name} for name in names]})

    with pytest.raises(SetupError, match="have different chat templates: name the same file"):
        keep_chat_template(cfg, None)
