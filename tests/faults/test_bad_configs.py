"""A wrong config is refused in one message before training, and nothing is written; rows for what differs in kind."""

import sys
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from recipe_processes import run_command
from refusals import CONFIG, BadInput, Site, each_row, problems_of, value
from torch import Tensor

from tfidf_tune.weighting import UniformWeighting

MINE = ("--config", f"{{folder}}/{CONFIG}")
LOSS = "tfidf_tune.loss.TFIDFCrossEntropyLoss"
WEIGHTED = "tfidf_tune.loss.WeightedCrossEntropyLoss"
LOGGER = "torchtune.training.metric_logging.WandBLogger"
FOCAL = {"_component_": "tfidf_tune.weighting.FocalWeighting", "gamma": 1e6}


class NoWeights(UniformWeighting):
    """A user's weighting that gives every token a weight of 0."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 0


def text(content: str) -> Callable[[Site], str]:
    return lambda site: content


def over_base(content: str) -> Callable[[Site], str]:
    """Make a config of these keys, whose base works."""

    def make(site: Site) -> str:
        OmegaConf.save(site.config(), site.folder / "base.yaml")
        return f"base: base.yaml\n{content}\n"

    return make


FILES = [
    BadInput("no such file", text(""), r"no config file no\.yaml, .*available are ", arguments=("--config", "no.yaml")),
    BadInput("YAML that does not end", text("batch_size: [1"), r"config .*mine\.yaml.*line 1"),
    BadInput("a list", text("- batch_size"), r"config .*mine\.yaml: it has to hold keys and values"),
    BadInput("an empty file", text(""), r"config: missing batch_size, checkpointer, dataset, .*output_dir, tokenizer"),
    BadInput("2,000 nested lists", text(f"seed: {'[' * 2_000}{']' * 2_000}"), r"mine\.yaml: RecursionError"),
    BadInput("bytes that are not UTF-8", text("output_dir: \udcff"), r"mine\.yaml.*utf-8"),
    BadInput("??? over a base", over_base("optimizer:\n  lr: ???\nepochs: ???"), r"missing epochs, optimizer\.lr$"),
    BadInput("a base that is nowhere", text("base: nowhere"), r"no config file nowhere, .*\(base of .*mine\.yaml\)"),
    BadInput("its own base", text(f"base: {CONFIG}"), r"mine\.yaml builds on itself"),
    BadInput("an override without a value", text("a: 1"), r"key=value, got seed", arguments=(*MINE, "seed")),
    BadInput("an unknown option", text("a: 1"), r"unknown options --seed=3", arguments=(*MINE, "--seed=3")),
]
KEYS = [
    value("zzz", 4, r"no key 'zzz'; possible are batch_size, .*tokenizer"),
    value("merge_adapter", True, r"no key 'merge_adapter'; the recipe lora_finetune has it"),
    value("model", "${model}", r"config: Recursive interpolation.*'model'"),
    value("output_dir", "${nothing}", r"'nothing' not found.*output_dir"),
    value("batch_size", 2.0, r"batch_size is 2\.0: "),
    value("batch_size", 1000, r"has 80 sequences, one step takes batch_size .* = 1000: "),
    value("clip_grad_norm", float("nan"), r"clip_grad_norm is nan: "),
    value("save_at_percent", [50, 101], r"save_at_percent\[1\] is 101: "),
    BadInput(
        "checkpoints of which none is kept",
        lambda site: site.config(save_every_n_steps=5, keep_last_n_checkpoints=0),
        r"save_every_n_steps is 5, but keep_last_n_checkpoints is 0",
    ),
    value("seed", 2**32, r"seed .*4294967296\. .*range \[0, 4294967295\]"),
    value("dtype", "fp16", r"dtype is 'fp16': .*; fp16 needs the recipe lora_finetune"),
]
COMPONENTS = [
    value("loss", LOSS, r"loss has to be a section with `_component_`"),
    value("loss._component_", "no_such_package.Loss", r"loss: no component 'no_such_package\.Loss'"),
    value("loss._component_", "tfidf_tune.loss", r"loss: 'tfidf_tune\.loss' is not a class or function"),
    value("loss._component_", "builtins.dict", r"builtins\.dict does not declare its arguments"),
    value("loss._component_", "torch.nn.CrossEntropyLoss", r"torch\.nn\.CrossEntropyLoss has no terms: take, "),
    value("loss.num_batchs", 4, r"unexpected keyword argument 'num_batchs'; its arguments are .*num_batches"),
    value("loss", {"_component_": WEIGHTED, "weighting": FOCAL}, r"loss.weighting: gamma is 1000000.0: .*from 0 to 20"),
    BadInput(
        "a weighting that leaves no token",
        lambda site: site.config(
            loss={"_component_": WEIGHTED, "weighting": {"_component_": "test_bad_configs.NoWeights"}},
            save_at_percent=[60, 100],
        ),
        r"the weights of all tokens were 0 in 10 steps in a row",
        begins=True,
    ),
    value("optimizer._component_", "torch.optim.LBFGS", r"optimizer: .* torch\.optim\.LBFGS without arg.*'closure'"),
    value("optimizer.lr", float("-inf"), r"config: optimizer: lr is -inf, it has to be a finite number"),
    value("optimizer.lr", -1.0, r"config: optimizer: .*[Ii]nvalid learning rate: -1\.0"),
    value("optimizer.lr", 1e30, r"step \d+.*lower learning rate", begins=True),
    value("optimizer.betas", [0.9], r"config: optimizer: "),
    value("lr_scheduler.num_warmup_steps", "x", r"lr_scheduler: TypeError: .* given were num_warmup_steps='x'"),
    value("metric_logger", {"_component_": "torch.nn.Identity"}, r"Identity has no log_config, .*DiskLogger"),
    value("collate_fn", "math.sqrt", r"collate_fn: math\.sqrt takes no ignore_idx, padding_idx: take, for example"),
    value("collate_fn", "torchtune.data.padded_collate_dpo", r"collate_fn: .*dpo makes no batch of .*KeyError"),
    value("model", {"_component_": "torch.nn.Identity"}, r"model: torch\.nn\.Identity has no .*llama2\.llama2"),
    value("model.num_heads", 5, r"config: model: num_heads \(5\) must be divisible by num_kv_heads \(2\)"),
    value("model.embed_dim", 64, r"head_dim is 8 in the checkpoint, 16 in the model.*make `model` the same"),
    value("checkpointer.max_shard_size", "huge", r"checkpointer: .*'huge'"),
]
LORA = [
    BadInput("LoRA in full_finetune", lambda site: site.config(lora=True), r"has LoRA layers: .*recipe lora_finetune"),
    BadInput("no LoRA in lora_finetune", Site.config, r"no LoRA layers: .*recipe full_finetune", lora=True),
    value("model.lora_rank", 0, r"model: lora_rank is 0: ", lora=True),
    value("model.lora_attn_modules", ["o_proj"], r"names 'o_proj', .*possible are k_proj, output_proj", lora=True),
    value("model.use_dora", True, r"DoRALinear.*; give all the same LoRALinear", lora=True),
    value("model.quantize_base", True, r"NF4 takes multiples of 16384 .*model\.quantize_base=False", lora=True),
]


@each_row([*FILES, *KEYS, *COMPONENTS, *LORA])
def test_a_wrong_config_is_refused_in_one_message(row, site):
    assert problems_of(row, site) == []


def test_a_logger_whose_package_is_missing_is_refused(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    row = value("metric_logger", {"_component_": LOGGER}, r"config: metric_logger: ImportError: .*pip install wandb")

    assert problems_of(row, site) == []


def test_tune_run_ends_in_the_same_message(site):
    site.folder.mkdir()
    OmegaConf.save(site.config(batch_sise=3), site.folder / CONFIG)
    arguments = ["run", "tfidf_tune/recipes/full_finetune.py", "--config", CONFIG]

    ended = run_command("torchtune._cli.tune:main", arguments, site.folder)

    assert ended.codes == [1]
    assert ended.output.splitlines()[-1] == "error: config: no key 'batch_sise'; did you mean 'batch_size'?"


def test_the_checks_of_a_row_find_what_is_not_refused(site, monkeypatch):
    problems = " ".join(problems_of(value("max_steps", 1, ""), site))
    for said in ("exit code 0", "not one message", "training had begun", "run/checkpoint_100pct"):
        assert said in problems

    def bug(cfg):
        raise KeyError("a bug")

    other, again = (Site(site.folder / name, site.checkpoint, site.text_file) for name in ("other", "again"))
    assert [problem[:19] for problem in problems_of(value("batch_size", 0, "epochs is 0"), other)] == [
        "no /epochs is 0/ in"
    ]
    monkeypatch.setattr("tfidf_tune.training.open_run", bug)
    assert problems_of(value("batch_size", 4, "a bug"), again)[0] == "a traceback: KeyError: 'a bug'"
