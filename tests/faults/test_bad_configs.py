"""A wrong config is refused in one message before training, and nothing is written; rows for what differs in kind."""

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
    BadInput("no such file", text(""), r"no\.yaml", arguments=("--config", "no.yaml")),
    BadInput("YAML that does not end", text("batch_size: [1"), r"config .*mine\.yaml.*line 1"),
    BadInput("a list", text("- batch_size"), r"mine\.yaml"),
    BadInput("an empty file", text(""), "missing batch_size, checkpointer"),
    BadInput("2,000 nested lists", text(f"seed: {'[' * 2_000}{']' * 2_000}"), r"mine\.yaml"),
    BadInput("bytes that are not UTF-8", text("output_dir: \udcff"), r"mine\.yaml.*utf-8"),
    BadInput("a base that is nowhere", text("base: nowhere"), r"nowhere, .*\(base of .*mine\.yaml\)"),
    BadInput("its own base", text(f"base: {CONFIG}"), r"mine\.yaml builds on itself"),
    BadInput("an override without a value", text("a: 1"), "got seed", arguments=(*MINE, "seed")),
    BadInput("an unknown option", text("a: 1"), "--seed=3", arguments=(*MINE, "--seed=3")),
]
KEYS = [
    value("zzz", 4, "'zzz'"),
    value("merge_adapter", True, "'merge_adapter'"),
    value("model", "${model}", "full_key: model"),
    value("batch_size", 2.0, r"batch_size is 2\.0: "),
    value("save_at_percent", [50, 101], r"save_at_percent\[1\] is 101: "),
    BadInput(
        "checkpoints of which none is kept",
        lambda site: site.config(save_every_n_steps=5, keep_last_n_checkpoints=0),
        "save_every_n_steps .*keep_last_n_checkpoints",
    ),
    value("seed", 2**32, "seed .*4294967296"),
    value("dtype", "fp16", "dtype is 'fp16': "),
]
COMPONENTS = [
    value("loss", LOSS, "loss .*`_component_`"),
    value("loss._component_", "no_such_package.Loss", r"loss: .*'no_such_package\.Loss'"),
    value("loss._component_", "tfidf_tune.loss", r"loss: 'tfidf_tune\.loss'"),
    value("loss._component_", "builtins.dict", r"loss: builtins\.dict"),
    value("loss._component_", "torch.nn.CrossEntropyLoss", "loss: .*terms"),
    value("loss.num_batchs", 4, "loss: .*'num_batchs'"),
    value("optimizer._component_", "torch.optim.LBFGS", "optimizer: .*'closure'"),
    value("optimizer.lr", float("-inf"), "optimizer: lr is -inf"),
    value("optimizer.lr", -1.0, r"optimizer: .*-1\.0"),
    value("optimizer.lr", 1e30, r"step \d+.*lower learning rate", begins=True),
    value("lr_scheduler.num_warmup_steps", "x", "lr_scheduler: .*num_warmup_steps='x'"),
    value("metric_logger", {"_component_": "torch.nn.Identity"}, "metric_logger: .*log_config"),
    value("collate_fn", "math.sqrt", r"collate_fn: math\.sqrt"),
    value("collate_fn", "torchtune.data.padded_collate_dpo", "collate_fn: .*KeyError"),
    value("model", {"_component_": "torch.nn.Identity"}, "model: .*tok_embeddings"),
    value("model.num_heads", 5, "model: num_heads"),
    value("checkpointer.max_shard_size", "huge", r"checkpointer: .*'huge'"),
]
LORA = [
    BadInput("LoRA in full_finetune", lambda site: site.config(lora=True), "recipe lora_finetune"),
    BadInput("no LoRA in lora_finetune", Site.config, "recipe full_finetune", lora=True),
    value("model.lora_rank", 0, r"model: lora_rank is 0: ", lora=True),
    value("model.use_dora", True, "DoRALinear", lora=True),
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
    assert ended.output.splitlines()[-1] == "error: config: no key 'batch_sise'; did you mean 'batch_size'?"
