"""Models of the paper by their configs, another model by one short file, and every family by both
recipes.
"""

import json
import sys

import peft
import pytest
import torch
import transformers
import yaml
from helpers.fakes.tiny_models import FAMILY_MODELS, MODELS
from helpers.fakes.tiny_run import read_metrics
from helpers.processes.recipes import run_command
from tfidf_tune.recipes import full_finetune, lora_finetune

from tfidf_tune.models import FAMILIES

MILESTONES = [f"checkpoint_{percent}pct" for percent in (10, 25, 50, 75, 100)]
TOKENS = torch.arange(1, 31)[None]
SETTINGS = ["device=cpu", "optimizer.lr=1e-2"]
TEXT = [
    "dataset.source=embedded",
    "dataset.target_source=embedded",
    "dataset.target_name=null",
    "dataset.num_base=20",
    "dataset.num_targets=3",
    "dataset.num_repeats=4",
    "dataset.block_size=32",
    "dataset.min_target_tokens=32",
]


def tiny_model(name, dim, builder, base, output_dir):
    """The overrides that turn a config of the paper into a run of a tiny model."""
    sizes = {key: value for key, value in MODELS[name].section(dim).items() if key != "_component_"}
    where = [f"checkpointer.checkpoint_dir={base}", f"output_dir={output_dir}"]
    return [
        f"model={builder}",
        *(f"model.{key}={value}" for key, value in sizes.items()),
        *where,
        *SETTINGS,
    ]


def assert_milestones_generate(run, base):
    """In peft, on the untouched base."""
    inputs = transformers.AutoTokenizer.from_pretrained(base)("the old sailor", return_tensors="pt")
    for milestone in ("checkpoint_25pct", "checkpoint_100pct"):
        model = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base), run / milestone
        )
        assert (
            model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0).shape[1] > 4
        )
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in read_metrics(run))


def test_a_model_of_the_paper_is_trained_by_its_config(make_base, tmp_path):
    """As a process, in the config's precision, without a warning."""
    base = make_base("gpt_neox", 256)
    model = tiny_model(
        "gpt_neox", 256, "tfidf_tune.models.gpt_neox.lora_gpt_neox", base, tmp_path / "run"
    )

    arguments = ["--config", "pythia/1.4B_qlora_memorization", *model, *TEXT]
    ended = run_command("tfidf_tune.recipes.lora_finetune:recipe_main", arguments, cwd=tmp_path)

    assert ended.codes == [0], ended.output
    assert "Warning" not in ended.output
    assert_milestones_generate(tmp_path / "run", base)


@pytest.fixture
def run_here(monkeypatch, tmp_path):
    """Run a recipe with arguments in this process."""

    def run(recipe, arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("signal.signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["recipe", *arguments])
        recipe.recipe_main()

    return run


def test_another_model_needs_one_override_file_and_no_code(make_base, tmp_path, run_here):
    base = make_base("mistral", 256)
    override = {
        "base": "llama2/7B_qlora_memorization",
        "output_dir": "run",
        "model": MODELS["mistral"].section(256, lora=True, quantize_base=True),
        "checkpointer": {"checkpoint_dir": str(base)},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(override))

    run_here(lora_finetune, ["--config", "mine.yaml", *SETTINGS, *TEXT])

    assert_milestones_generate(tmp_path / "run", base)


@pytest.mark.parametrize(
    ("config", "name", "builder", "task"),
    [
        ("gptj/6B_lora", "gptj", "tfidf_tune.models.gptj.lora_gptj", "summarization"),
        ("tinyllama/1.1B_full", "llama", "torchtune.models.llama2.llama2", "qa"),
    ],
)
def test_the_other_tasks_run_on_local_files_of_the_same_columns(
    config, name, builder, task, make_base, text_file, tmp_path, run_here
):
    texts = text_file.read_text().splitlines()[:60]
    if task == "qa":
        answers = [text.split(".")[0].split()[1] for text in texts]
        rows = [
            {
                "context": text,
                "question": "Who?",
                "answers": {"text": [answer], "answer_start": [text.index(answer)]},
            }
            for text, answer in zip(texts, answers, strict=True)
        ]
        data = ["dataset.max_seq_len=60"]
    else:
        rows = [{"article": text, "highlights": text.split(".")[0]} for text in texts]
        data = ["dataset.max_source_tokens=44", "dataset.max_target_tokens=20", "dataset.name=null"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [
        "--config",
        f"{config}_{task}",
        f"dataset.source={tmp_path}/rows.jsonl",
        *data,
        *tiny_model(name, 64, builder, make_base(name), tmp_path / "run"),
        "dtype=fp32",
        "epochs=2",
        "log_every_n_steps=1",
    ]

    run_here(full_finetune if "full" in config else lora_finetune, arguments)

    losses = [line["cross_entropy"] for line in read_metrics(tmp_path / "run")]
    assert sum(losses[-2:]) < sum(losses[:2])
    assert {path.name for path in (tmp_path / "run").glob("checkpoint_*")} == set(MILESTONES)


def test_every_architecture_is_tested():
    assert {MODELS[name].model_type for name in FAMILY_MODELS} == FAMILIES.keys()
