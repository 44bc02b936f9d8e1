"""A wrong config is refused in one message before training, and nothing is written; one row for each message."""

import sys
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from refusals import CONFIG, OPENED, BadInput, Site, changed, each_row, problems_of, value
from torch import Tensor

from tfidf_tune.weighting import UniformWeighting

MINE = ("--config", f"{{folder}}/{CONFIG}")
LOSS = "tfidf_tune.loss.TFIDFCrossEntropyLoss"
WEIGHTED = "tfidf_tune.loss.WeightedCrossEntropyLoss"
LOGGER = "torchtune.training.metric_logging.WandBLogger"


class NoWeights(UniformWeighting):
    """A user's weighting that gives every token a weight of 0."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 0


def text(content: str) -> Callable[[Site], str]:
    return lambda site: content


def without(*keys: str) -> Callable[[Site], DictConfig]:
    """Make a config that lacks keys."""

    def make(site: Site) -> DictConfig:
        cfg = site.config()
        for key in keys:
            section, _, name = key.rpartition(".")
            del (OmegaConf.select(cfg, section) if section else cfg)[name]
        return cfg

    return make


def over_base(content: str) -> Callable[[Site], str]:
    """Make a config of these keys, whose base works."""

    def make(site: Site) -> str:
        OmegaConf.save(site.config(), site.folder / "base.yaml")
        return f"base: base.yaml\n{content}\n"

    return make


FILES = [
    BadInput(
        "no file of that name",
        text("a: 1"),
        r"no config file nothing\.yaml, and no config of that name; available are .*tinyllama/1\.1B_full_memorization",
        arguments=("--config", "nothing.yaml"),
    ),
    BadInput("YAML that does not end", text("batch_size: [1"), r"config .*mine\.yaml.*line 1"),
    BadInput("a list", text("- batch_size"), r"config .*mine\.yaml: it has to hold keys and values"),
    BadInput("an empty file", text(""), r"config: missing batch_size, checkpointer, dataset, .*output_dir, tokenizer"),
    BadInput("null for a key", text("null: 2"), r"config .*mine\.yaml: .*NoneType"),
    BadInput("a reference to itself", changed({"model": "${model}"}), r"config: Recursive interpolation.*'model'"),
    BadInput("a reference that does not end", text("output_dir: ${seed"), r"config .*output_dir"),
    BadInput("20,000 nested lists", text(f"seed: {'[' * 20_000}{']' * 20_000}"), r"mine\.yaml: RecursionError"),
    BadInput("bytes that are not UTF-8", text("output_dir: \udcff"), r"mine\.yaml.*utf-8"),
    BadInput("??? over a base", over_base("optimizer:\n  lr: ???\nepochs: ???"), r"missing epochs, optimizer\.lr$"),
    BadInput("a base that is nowhere", text("base: nowhere"), r"no config file nowhere, .*\(base of .*mine\.yaml\)"),
    BadInput("a base that is a list", text("base: [a, b]"), r"mine\.yaml: .* its base the name or path of a config"),
    BadInput("its own base", text(f"base: {CONFIG}"), r"mine\.yaml builds on itself: .*mine\.yaml -> .*mine\.yaml"),
    BadInput("an override without a value", changed({}), r"key=value, got batch_size", arguments=(*MINE, "batch_size")),
    BadInput(
        "an unknown option",
        changed({}),
        r"unknown options --batch_size=3: write keys as key=value",
        arguments=(*MINE, "--batch_size=3"),
    ),
]

KEYS = [
    value("zzz", 4, r"no key 'zzz'; possible are batch_size, .*tokenizer"),
    value("merge_adapter", True, r"no key 'merge_adapter'; the recipe lora_finetune has it"),
    value("output_dir", "${nothing}", r"'nothing' not found.*output_dir"),
    value("batch_size", 2.0, r"batch_size is 2\.0: Input should be a valid integer"),
    value("batch_size", True, r"batch_size is True: Input should be a valid integer"),
    value("batch_size", 1000, r"has 80 sequences, one step takes batch_size .* = 1000: lower .*or add data"),
    value("max_steps", 0, r"max_steps is 0: Input should be greater than or equal to 1"),
    value("clip_grad_norm", 0.0, r"clip_grad_norm is 0\.0: Input should be greater than 0"),
    value("clip_grad_norm", float("nan"), r"clip_grad_norm is nan: Input should be a finite number"),
    value("save_at_percent", [], r"save_at_percent is \[\]: List should have at least 1 item"),
    value("save_at_percent", [50, 101], r"save_at_percent\[1\] is 101: Input should be less than or equal to 100"),
    value("save_at_percent", 50, r"save_at_percent is 50: Input should be a valid list"),
    BadInput(
        "checkpoints of which none is kept",
        changed({"save_every_n_steps": 5, "keep_last_n_checkpoints": 0}),
        r"save_every_n_steps is 5, but keep_last_n_checkpoints is 0, which keeps none: change one of them",
    ),
    value("shuffle", "perhaps", r"shuffle is 'perhaps': Input should be a valid boolean"),
    value("fsdp_param_dtype", "fp16", r"fsdp_param_dtype is 'fp16': Input should be 'bf16' or 'fp32'$"),
    value("seed", 2**32, r"seed .*4294967296\. .*range \[0, 4294967295\]"),
    value(
        "dtype",
        "fp16",
        r"dtype is 'fp16': Input should be 'fp32', 'bf16' or 'auto'; fp16 needs the recipe lora_finetune",
    ),
]

COMPONENTS = [
    value("loss", LOSS, r"loss has to be a section with `_component_`"),
    value("model._component_", 3, r"model: no component '3'"),
    value("loss._component_", "no_such_package.Loss", r"loss: no component 'no_such_package\.Loss'"),
    value("loss._component_", "tfidf_tune.loss", r"loss: 'tfidf_tune\.loss' is not a class or function"),
    value("loss._component_", "builtins.dict", r"builtins\.dict does not declare its arguments: name a class or fun"),
    value("loss._component_", "torch.nn.CrossEntropyLoss", r"torch\.nn\.CrossEntropyLoss has no terms: take, "),
    value("loss.num_batchs", 4, r"unexpected keyword argument 'num_batchs'; its arguments are .*num_batches"),
    value("loss.num_batches", 0, r"config: loss: num_batches is 0: .*set it to 1 or more"),
    value("loss.tf", "sqrt", r"config: loss: tf is 'sqrt': possible are count, log, binary"),
    value(
        "loss",
        {"_component_": WEIGHTED, "weighting": {"_component_": "tfidf_tune.weighting.FocalWeighting", "gamma": 1e6}},
        r"loss.weighting: gamma is 1000000.0: .*from 0 to 20",
    ),
    BadInput(
        "a weighting that leaves no token",
        changed(
            {
                "loss._component_": WEIGHTED,
                "loss.weighting": {"_component_": "test_bad_configs.NoWeights"},
                "save_at_percent": [60, 100],
            }
        ),
        r"the weights of all tokens were 0 in 10 steps in a row, up to step 10, so that nothing was learned",
        leaves=OPENED,
        needs_training=True,
    ),
    value("optimizer._component_", "torch.nn.Linear", r"config: optimizer: torch\.nn\.Linear"),
    value("optimizer._component_", "torch.optim.LBFGS", r"optimizer: .* torch\.optim\.LBFGS without arg.*'closure'"),
    value("optimizer.lr", -1.0, r"config: optimizer: .*[Ii]nvalid learning rate: -1\.0"),
    value("optimizer.lr", float("inf"), r"config: optimizer: lr is inf, it has to be a finite number"),
    value("optimizer.lr", 1e30, r"step \d+.*lower learning rate", leaves=OPENED, needs_training=True),
    value(
        "optimizer.betas",
        [0.9],
        r"config: optimizer: .*given were .*betas=\[0\.9\]|config: optimizer: not enough values",
    ),
    value(
        "optimizer",
        {"_component_": "torchao.optim.AdamW8bit", "betas": [0.9]},
        r"config: optimizer: .* given were betas=\[0\.9\]",
    ),
    value("lr_scheduler.num_warmup_steps", "x", r"lr_scheduler: TypeError: .* given were num_warmup_steps='x'"),
    value("lr_scheduler", {"_component_": "types.SimpleNamespace"}, r"lr_scheduler: "),
    value("metric_logger", {"_component_": "torch.nn.Identity"}, r"Identity has no log_config, .*DiskLogger"),
    value("collate_fn", "math.sqrt", r"collate_fn: math\.sqrt takes no ignore_idx, padding_idx: take, for example"),
    value(
        "collate_fn",
        "torchtune.data.padded_collate_dpo",
        r"collate_fn: torchtune\.data\.padded_collate_dpo makes no batch of .* \(KeyError: 'chosen_",
    ),
    value("model", {"_component_": "torch.nn.Identity"}, r"model: torch\.nn\.Identity has no .*llama2\.llama2"),
    value("model.num_heads", 5, r"config: model: num_heads \(5\) must be divisible by num_kv_heads \(2\)"),
    BadInput(
        "no model.num_layers",
        without("model.num_layers"),
        r"model: torchtune\S+ missing a required .*'num_layers'; its arg",
    ),
    value("model.embed_dim", 64, r"head_dim is 8 in the checkpoint, 16 in the model.*make `model` the same"),
    value("checkpointer.max_shard_size", "huge", r"Supported units are TB, GB, MB, KB\. Got 'huge'"),
]

LORA = [
    BadInput("LoRA in full_finetune", changed({}, lora=True), r"has LoRA layers: name a plain .*recipe lora_finetune"),
    BadInput("no LoRA in lora_finetune", changed({}), r"no LoRA layers: name a LoRA .*recipe full_finetune", lora=True),
    value("model.lora_rank", 0, r"model: lora_rank is 0: Input should be greater than or equal to 1", lora=True),
    value("model.lora_dropout", 1.0, r"model: lora_dropout is 1\.0: Input should be less than 1", lora=True),
    value("model.lora_attn_modules", [], r"config: model: Must pass one or more of .*'q_proj', .*lora_mod", lora=True),
    value("model.lora_attn_modules", ["o_proj"], r"names 'o_proj', .*possible are k_proj, output_proj", lora=True),
    value("model.use_dora", True, r"DoRALinear.*; give all the same LoRALinear", lora=True),
    value(
        "model.quantize_base",
        True,
        r"NF4 takes multiples of 16384 weights of a layer: set model\.quantize_base=False",
        lora=True,
    ),
]

COMMANDS = [
    BadInput(
        "tune run",
        changed({"batch_sise": 3}),
        r"^error: config: no key 'batch_sise'; did you mean 'batch_size'\?$",
        tune="tfidf_tune/recipes/full_finetune.py",
    ),
]


@each_row([*FILES, *KEYS, *COMPONENTS, *LORA, *COMMANDS])
def test_a_wrong_config_is_refused_in_one_message(row, site):
    assert problems_of(row, site) == []


def test_a_logger_whose_package_is_missing_is_refused(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    row = value("metric_logger", {"_component_": LOGGER}, r"config: metric_logger: ImportError: .*pip install wandb")

    assert problems_of(row, site) == []


def test_the_checks_of_a_row_find_a_run_that_succeeds(site):
    problems = " ".join(problems_of(BadInput("nothing", changed({"max_steps": 1}), ""), site))

    for said in ("exit code 0", "not one message", "training had begun", "run/checkpoint_100pct"):
        assert said in problems


def test_the_checks_of_a_row_find_a_traceback_and_another_message(site, monkeypatch):
    def bug(cfg):
        raise KeyError("a bug")

    other = BadInput("batch_size: 0", changed({"batch_size": 0}), "epochs is 0")
    assert [problem[:19] for problem in problems_of(other, site)] == ["no /epochs is 0/ in"]
    monkeypatch.setattr("tfidf_tune.training.open_run", bug)
    elsewhere = Site(site.folder / "again", site.checkpoint, site.text_file)
    assert problems_of(BadInput("a bug", changed({}), "a bug"), elsewhere)[0] == "a traceback: KeyError: 'a bug'"
