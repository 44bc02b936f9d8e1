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
    BadInput("no such file", text(""), r"no\.yaml", arguments=("--config", "no.yaml")),
    BadInput("YAML that does not end", text("batch_size: [1"), r"config .*mine\.yaml.*line 1"),
    BadInput("a list", text("- batch_size"), r"mine\.yaml"),
    BadInput("an empty file", text(""), "missing batch_size, checkpointer"),
    BadInput("2,000 nested lists", text(f"seed: {'[' * 2_000}{']' * 2_000}"), r"mine\.yaml"),
    BadInput("bytes that are not UTF-8", text("output_dir: \udcff"), r"mine\.yaml.*utf-8"),
    BadInput("??? over a base", over_base("optimizer:\n  lr: ???\nepochs: ???"), r"missing epochs, optimizer\.lr$"),
    BadInput("a base that is nowhere", text("base: nowhere"), r"nowhere, .*\(base of .*mine\.yaml\)"),
    BadInput("its own base", text(f"base: {CONFIG}"), r"mine\.yaml builds on itself"),
    BadInput("an override without a value", text("a: 1"), "got seed", arguments=(*MINE, "seed")),
    BadInput("an unknown option", text("a: 1"), "--seed=3", arguments=(*MINE, "--seed=3")),
]
KEYS = [
    value("zzz", 4, "'zzz'"),
    value("merge_adapter", True, "'merge_adapter'"),
    value("model", "${model}", "full_key: model"),
    value("output_dir", "${nothing}", "'nothing' .*output_dir"),
    value("batch_size", 2.0, r"batch_size is 2\.0: "),
    value("batch_size", 1000, "batch_size .* = 1000: "),
    value("clip_grad_norm", float("nan"), r"clip_grad_norm is nan: "),
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
    value("loss", {"_component_": WEIGHTED, "weighting": FOCAL}, r"loss\.weighting: gamma is 1000000.0: "),
    BadInput(
        "a weighting that leaves no token",
        lambda site: site.config(
            loss={"_component_": WEIGHTED, "weighting": {"_component_": "test_bad_configs.NoWeights"}},
            save_at_percent=[60, 100],
        ),
        "weights of all tokens were 0",
        begins=True,
    ),
    value("optimizer._component_", "torch.optim.LBFGS", "optimizer: .*'closure'"),
    value("optimizer.lr", float("-inf"), "optimizer: lr is -inf"),
    value("optimizer.lr", -1.0, r"optimizer: .*-1\.0"),
    value("optimizer.lr", 1e30, r"step \d+.*lower learning rate", begins=True),
    value("optimizer.betas", [0.9], "optimizer: "),
    value("lr_scheduler.num_warmup_steps", "x", "lr_scheduler: .*num_warmup_steps='x'"),
    value("metric_logger", {"_component_": "torch.nn.Identity"}, "metric_logger: .*log_config"),
    value("collate_fn", "math.sqrt", r"collate_fn: math\.sqrt"),
    value("collate_fn", "torchtune.data.padded_collate_dpo", "collate_fn: .*KeyError"),
    value("model", {"_component_": "torch.nn.Identity"}, "model: .*tok_embeddings"),
    value("model.num_heads", 5, "model: num_heads"),
    value("model.embed_dim", 64, "head_dim is 8 in the checkpoint, 16 in the model"),
    value("checkpointer.max_shard_size", "huge", r"checkpointer: .*'huge'"),
]
LORA = [
    BadInput("LoRA in full_finetune", lambda site: site.config(lora=True), "recipe lora_finetune"),
    BadInput("no LoRA in lora_finetune", Site.config, "recipe full_finetune", lora=True),
    value("model.lora_rank", 0, r"model: lora_rank is 0: ", lora=True),
    value("model.lora_attn_modules", ["o_proj"], "lora_attn_modules .*'o_proj'", lora=True),
    value("model.use_dora", True, "DoRALinear", lora=True),
    value("model.quantize_base", True, r"model\.quantize_base=False", lora=True),
]


@each_row([*FILES, *KEYS, *COMPONENTS, *LORA])
def test_a_wrong_config_is_refused_in_one_message(row, site):
    assert problems_of(row, site) == []


def test_a_logger_whose_package_is_missing_is_refused(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    row = value("metric_logger", {"_component_": LOGGER}, "metric_logger: .*wandb")

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
