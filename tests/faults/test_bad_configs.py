"""A wrong config is refused in one message before training, and nothing is written; rows for what
differs in kind.
"""

import sys
from collections.abc import Callable

from helpers.processes.recipes import run_command
from helpers.refusals import CONFIG, BadInput, Site, assert_refused, each_row, value
from omegaconf import OmegaConf

MINE = ("--config", f"{{folder}}/{CONFIG}")
LOSS = "tfidf_tune.loss.TFIDFCrossEntropyLoss"
LOGGER = "torchtune.training.metric_logging.WandBLogger"


def text(content: str) -> Callable[[Site], str]:
    return lambda site: content


FILES = [
    BadInput(
        "no such file",
        text(""),
        r"no config file no\.yaml, and .*; available are .*injected/full",
        arguments=("--config", "no.yaml"),
    ),
    BadInput("YAML that does not end", text("batch_size: [1"), r"config .*mine\.yaml.*line 1"),
    BadInput("a list", text("- batch_size"), r"mine\.yaml: it has to hold keys and values"),
    BadInput(
        "an empty file",
        text(""),
        "missing batch_size, checkpointer, dataset, loss, metric_logger, model, optimizer, "
        "output_dir",
    ),
    BadInput(
        "2,000 nested lists", text(f"seed: {'[' * 2_000}{']' * 2_000}"), r"config .*mine\.yaml: "
    ),
    BadInput(
        "bytes that are not UTF-8", text("output_dir: \udcff"), r"config .*mine\.yaml: .*utf-8"
    ),
    BadInput(
        "a base that is nowhere",
        text("base: nowhere"),
        r"no config file nowhere, .*available are .*\(base of .*mine\.yaml\)",
    ),
    BadInput(
        "its own base",
        text(f"base: {CONFIG}"),
        r"mine\.yaml builds on itself: .*mine\.yaml -> .*mine\.yaml",
    ),
    BadInput(
        "an override without a value",
        text("a: 1"),
        "overrides must be in the form of key=value, got seed",
        arguments=(*MINE, "seed"),
    ),
    BadInput(
        "an unknown option",
        text("a: 1"),
        "unknown options --seed=3: write keys as key=value",
        arguments=(*MINE, "--seed=3"),
    ),
]
KEYS = [
    value("zzz", 4, "no key 'zzz'; possible are batch_size, checkpointer"),
    value("merge_adapter", True, "no key 'merge_adapter'; possible are batch_size, checkpointer"),
    value("model", "${model}", "full_key: model"),
    value("batch_size", 2.0, r"batch_size is 2\.0: "),
    value("save_at_percent", [50, 101], r"save_at_percent\[1\] is 101: "),
    BadInput(
        "checkpoints of which none is kept",
        lambda site: site.config(save_every_n_steps=5, keep_last_n_checkpoints=0),
        "save_every_n_steps is set, but keep_last_n_checkpoints is 0: change one of them",
    ),
    value("seed", 2**32, "seed .*4294967296"),
    value("dtype", "fp16", "dtype is 'fp16': .*fp32.*bf16.*auto"),
]
COMPONENTS = [
    value("loss", LOSS, "loss is .*possible are ce, .*or a section with _component_"),
    value(
        "loss._component_", "no_such_package.Loss", r"loss: no component 'no_such_package\.Loss'"
    ),
    value(
        "loss._component_",
        "tfidf_tune.loss",
        r"loss: 'tfidf_tune\.loss' is not a class or function",
    ),
    value("loss._component_", "builtins.dict", r"loss: builtins\.dict: "),
    value(
        "loss._component_",
        "torch.nn.CrossEntropyLoss",
        r"loss: torch\.nn\.CrossEntropyLoss has no terms: take, for example, tfidf_tune\.loss\.",
    ),
    value("loss.num_batchs", 4, "loss: .*'num_batchs'; its arguments are num_batches, tf"),
    value("optimizer._component_", "torch.optim.LBFGS", r"optimizer: torch\.optim\.LBFGS: "),
    value("optimizer.lr", float("-inf"), "optimizer: lr is -inf, it has to be a finite number"),
    value("optimizer.lr", -1.0, r"optimizer: .*-1\.0"),
    value(
        "optimizer.lr",
        1e30,
        r"not finite: loss .* at step \d+ .*: try a lower learning rate, fp32, clipping, or on_non_finite=skip",
        begins=True,
    ),
    value(
        "lr_scheduler.num_warmup_steps",
        "x",
        "lr_scheduler: .*; given were num_warmup_steps='x'",
    ),
    value("optimizer.lr", "abc", "optimizer: lr is 'abc', it has to be a number"),
    value(
        "optimizer.amsgrad", "maybe", "optimizer: amsgrad is 'maybe', it has to be true or false"
    ),
    value(
        "metric_logger",
        {"_component_": "torch.nn.Identity"},
        "metric_logger: .*has no log_config, .*: take, for example, .*DiskLogger",
    ),
    value(
        "collate_fn",
        "math.sqrt",
        r"collate_fn: math\.sqrt makes no batch .*: use one that belongs to the data set",
    ),
    value(
        "collate_fn",
        "torchtune.data.padded_collate_dpo",
        "collate_fn: .*padded_collate_dpo makes no batch .*KeyError.*: use one that belongs to the "
        "data set",
    ),
    value(
        "model",
        {"_component_": "torch.nn.Identity"},
        r"model: .*has no tok_embeddings, .*: take, for example, torchtune\.models",
    ),
    value("model.num_heads", 5, "model: num_heads .*5.*num_kv_heads .*2"),
    value("checkpointer.max_shard_size", "huge", r"checkpointer: .*'huge'"),
]
LORA = [
    BadInput(
        "LoRA in full_finetune",
        lambda site: site.config(lora=True),
        "has LoRA layers: name a plain builder, or use the recipe lora_finetune",
    ),
    BadInput(
        "no LoRA in lora_finetune",
        Site.config,
        "has no LoRA layers: name a LoRA builder, or use the recipe full_finetune",
        lora=True,
    ),
    value("model.lora_rank", 0, r"model: lora_rank is 0: ", lora=True),
    value(
        "model.use_dora",
        True,
        r"layers of DoRALinear differ in \(rank, alpha, dropout\)",
        lora=True,
    ),
]


@each_row([*FILES, *KEYS, *COMPONENTS, *LORA])
def test_a_wrong_config_is_refused_in_one_message(row, site):
    assert_refused(row, site)


def test_a_logger_whose_package_is_missing_is_refused(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert_refused(value("metric_logger", {"_component_": LOGGER}, "metric_logger: .*wandb"), site)


def test_tune_run_ends_in_the_same_message(site):
    site.folder.mkdir()
    OmegaConf.save(site.config(batch_sise=3), site.folder / CONFIG)
    arguments = ["run", "tfidf_tune/recipes/full_finetune.py", "--config", CONFIG]

    ended = run_command("torchtune._cli.tune:main", arguments, site.folder)

    assert ended.codes == [1]
    assert (
        ended.output.splitlines()[-1]
        == "error: config: no key 'batch_sise'; did you mean 'batch_size'?"
    )
