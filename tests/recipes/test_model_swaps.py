"""The paper's five models by their configs, other models by one short file, and every family by both recipes."""

import json
import sys
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from recipe_processes import run_command
from tfidf_tune.recipes import full_finetune, lora_finetune
from tiny_llama import make_tokenizer
from tiny_models import FAMILY_MODELS, MODELS
from torchao.dtypes.nf4tensor import NF4Tensor

from tfidf_tune.loss import HeadInput
from tfidf_tune.models import FAMILIES, is_adapter
from tfidf_tune.training import HFCheckpointer

LORA = "tfidf_tune.recipes.lora_finetune:recipe_main"
MILESTONES = [f"checkpoint_{percent}pct" for percent in (10, 25, 50, 75, 100)]
TOKENS = torch.arange(1, 31)[None]
# Config, architecture, and what the builder of that architecture is called where sizes are free.
PAPER = {
    "tinyllama/1.1B_lora_memorization": ("llama", "torchtune.models.llama2.lora_llama2"),
    "pythia/1.4B_qlora_memorization": ("gpt_neox", "tfidf_tune.models.gpt_neox.lora_gpt_neox"),
    "gptj/6B_lora_memorization": ("gptj", "tfidf_tune.models.gptj.lora_gptj"),
    "llama2/7B_qlora_memorization": ("llama", "torchtune.models.llama2.lora_llama2"),
    "llama2/13B_qlora_memorization": ("llama-4-kv-heads", "torchtune.models.llama2.lora_llama2"),
}
TEXT = [
    "dataset.source=embedded", "dataset.target_source=embedded", "dataset.target_name=null", "dataset.num_base=20",
    "dataset.num_targets=3", "dataset.num_repeats=4", "dataset.block_size=32", "dataset.min_target_tokens=32",
    "device=cpu", "optimizer.lr=1e-2",
]  # fmt: skip


@pytest.fixture(scope="module")
def make_base(tmp_path_factory, text_file):
    """A tiny random checkpoint of an architecture, in several files, with a tokenizer."""

    @cache
    def make(name, dim) -> Path:
        folder = tmp_path_factory.mktemp("base") / name
        MODELS[name].build_hf(dim).save_pretrained(folder, max_shard_size=f"{2 * dim}KB")
        return make_tokenizer(folder, text_file)

    return make


def width(config):
    """Only the wider model can be quantized."""
    return 256 if "qlora" in config else 64


def paths_and_sizes(config, base, output_dir):
    """The overrides that turn a config of the paper into a run of a tiny model on local text."""
    name, builder = PAPER[config]
    sizes = {key: value for key, value in MODELS[name].section(width(config)).items() if key != "_component_"}
    return [
        f"model={builder}",
        *(f"model.{key}={value}" for key, value in sizes.items()),
        f"checkpointer.checkpoint_dir={base}", f"output_dir={output_dir}", *TEXT,
    ]  # fmt: skip


@pytest.mark.parametrize("config", PAPER)
def test_a_model_of_the_paper_is_trained_by_its_config(config, make_base, tmp_path):
    """As a process, in the config's own precision; the milestones generate in peft on the untouched base."""
    base = make_base(PAPER[config][0], width(config))

    arguments = ["--config", config, *paths_and_sizes(config, base, tmp_path / "run")]
    ended = run_command(LORA, arguments, cwd=tmp_path)

    assert ended.codes == [0], ended.output
    assert "Warning" not in ended.output
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    inputs = tokenizer("the old sailor", return_tensors="pt")
    for milestone in (MILESTONES[0], MILESTONES[-1]):
        model = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "run" / milestone
        )
        assert model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0).shape[1] > 4
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in lines)


@pytest.fixture(scope="module")
def task_files(tmp_path_factory, text_file):
    """Small files with the columns of the two data sets."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = text_file.read_text().splitlines()[:60]
    answers = [text.split(".")[0].split()[1] for text in texts]
    questions = [
        {"context": text, "question": "Who?", "answers": {"text": [answer], "answer_start": [text.index(answer)]}}
        for text, answer in zip(texts, answers, strict=True)
    ]
    articles = [{"article": text, "highlights": text.split(".")[0]} for text in texts]
    for name, rows in {"qa": questions, "summarization": articles}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize(
    ("config", "task"),
    [("pythia/1.4B_qlora", "qa"), ("gptj/6B_lora", "summarization"), ("tinyllama/1.1B_full", "qa")],
)
def test_the_other_tasks_run_on_local_files_of_the_same_columns(
    config, task, make_base, task_files, tmp_path, monkeypatch
):
    memorization = f"{config}_memorization"
    name, builder = PAPER.get(memorization, ("llama", "torchtune.models.llama2.llama2"))
    monkeypatch.setitem(PAPER, memorization, (name, builder))
    text = {
        "qa": ["dataset.max_seq_len=60"],
        "summarization": ["dataset.max_source_tokens=44", "dataset.max_target_tokens=20", "dataset.name=null"],
    }
    arguments = [
        argument
        for argument in paths_and_sizes(memorization, make_base(name, width(config)), tmp_path / "run")
        if not argument.startswith("dataset.")
    ]
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(
        sys, "argv",
        ["recipe", "--config", f"{config}_{task}", *arguments, *text[task], f"dataset.source={task_files}/{task}.jsonl",
         "dtype=fp32", "epochs=2", "log_every_n_steps=1"],
    )  # fmt: skip

    (full_finetune if "full" in config else lora_finetune).recipe_main()

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["cross_entropy"] for line in lines[-2:]) < sum(line["cross_entropy"] for line in lines[:2])
    assert {path.name for path in (tmp_path / "run").glob("checkpoint_*")} == set(MILESTONES)


@pytest.fixture
def watched_saves(monkeypatch):
    """Logits of the model in training at each save, and its base weights, by transformers' names."""
    seen = {"logits": {}, "base": None}
    for method in ("save_adapter", "save_model"):
        save = getattr(HFCheckpointer, method)

        def watch(self, model, folder, save=save):
            with torch.no_grad():
                model.eval()
                output = model(TOKENS)
                logits = F.linear(*output) if isinstance(output, HeadInput) else torch.cat(output, dim=1)
                seen["logits"][folder.name] = logits.float()
                model.train()
            weights = {
                key: value.get_original_weight() if isinstance(value, NF4Tensor) else value.detach().clone()
                for key, value in model.named_parameters()
                if not is_adapter(key)
            }
            config = self.transformers_config
            seen["base"] = FAMILIES[config.model_type].tune_to_hf(weights, config)
            save(self, model, folder)

        monkeypatch.setattr(HFCheckpointer, method, watch)
    return seen


METHODS = ["full", "lora", "qlora", "lora-merged"]


@pytest.mark.parametrize(
    ("name", "method"), [(name, METHODS[number % len(METHODS)]) for number, name in enumerate(FAMILY_MODELS)]
)
def test_every_family_learns_and_saves_by_both_recipes(name, method, make_base, recipe_config, watched_saves):
    base, is_lora = make_base(name, width(method)), method != "full"
    cfg = recipe_config(lora=is_lora, epochs=2, save_at_percent=[50, 100], **{"dataset.num_base": 28})
    everywhere = {"apply_lora_to_mlp": True} | ({} if MODELS[name].tied else {"apply_lora_to_output": True})
    lora = {"lora": True, "lora_alpha": 16, "quantize_base": method == "qlora", **everywhere} if is_lora else {}
    cfg.model = MODELS[name].section(width(method), **lora)
    cfg.checkpointer.checkpoint_dir = str(base)
    if method == "lora-merged":
        cfg.merge_adapter = True

    (lora_finetune if is_lora else full_finetune).recipe_main.__wrapped__(cfg)

    run = Path(cfg.output_dir)
    losses = [json.loads(line)["cross_entropy"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])
    for milestone, expected in watched_saves["logits"].items():
        if method in ("full", "lora-merged"):
            model = transformers.AutoModelForCausalLM.from_pretrained(run / milestone).eval()
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            if method == "qlora":
                weights = {key.replace("embed_out", "lm_head"): v for key, v in watched_saves["base"].items()}
                model.load_state_dict(weights, strict=False)
            model = peft.PeftModel.from_pretrained(model, run / milestone).eval()
        with torch.no_grad():
            logits = model(TOKENS).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        output = model.generate(input_ids=TOKENS, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert output.shape == (1, 34)


# One file each, on top of a config of the package: the model, its checkpoint, the run's folder.
OTHER_MODELS = {
    "qwen2-tied": {"base": "tinyllama/1.1B_lora_memorization"},
    "mistral": {"base": "llama2/7B_qlora_memorization"},
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_another_model_needs_one_override_file_and_no_code(name, make_base, tmp_path):
    dim = width(OTHER_MODELS[name]["base"])
    base = make_base(name, dim)
    quantize = {"quantize_base": True} if "qlora" in OTHER_MODELS[name]["base"] else {}
    override = OTHER_MODELS[name] | {
        "output_dir": "run",
        "model": MODELS[name].section(dim, lora=True, **quantize),
        "checkpointer": {"checkpoint_dir": str(base)},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(override))

    ended = run_command(LORA, ["--config", "mine.yaml", *TEXT], cwd=tmp_path)

    assert ended.codes == [0], ended.output
    for milestone in MILESTONES[:1]:
        adapted = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "run" / milestone
        )
        with torch.no_grad():
            assert torch.isfinite(adapted(TOKENS).logits).all()


def test_every_architecture_is_tested():
    assert {MODELS[name].model_type for name in FAMILY_MODELS} == FAMILIES.keys()
