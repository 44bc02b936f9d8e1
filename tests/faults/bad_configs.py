"""Configs that no run can begin with."""

import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from omegaconf import DictConfig, OmegaConf
from refusals import CONFIG, OPENED, BadInput, Site
from torch import Tensor

from tfidf_tune.weighting import UniformWeighting

LLAMA = "torchtune.models.llama2.llama2"
LORA_LLAMA = "torchtune.models.llama2.lora_llama2"
LOSS = "tfidf_tune.loss.TFIDFCrossEntropyLoss"
VALIDATE = (sys.executable, "-m", "tfidf_tune.cli", "validate")
TUNE_RUN = (sys.executable, "-m", "torchtune._cli.tune", "run", "tfidf_tune/recipes/full_finetune.py")
TFIDF_TUNE_RUN = (sys.executable, "-m", "tfidf_tune.cli", "run", "full_finetune")


class NoWeights(UniformWeighting):
    """A user's weighting that holds back everything."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Give every token a weight of 0."""
        return super().forward(*args, **kwargs) * 0


def changed(overrides: Mapping[str, Any], *, lora: bool = False) -> Callable[[Site], DictConfig]:
    """A config that works but for some keys."""
    return lambda site: site.config(lora=lora, **overrides)


def without(*keys: str) -> Callable[[Site], DictConfig]:
    """A config that lacks keys."""

    def make(site: Site) -> DictConfig:
        cfg = site.config()
        for key in keys:
            section, _, name = key.rpartition(".")
            del (OmegaConf.select(cfg, section) if section else cfg)[name]
        return cfg

    return make


def text(content: str) -> Callable[[Site], str]:
    """A config of these characters."""
    return lambda site: content


def bases(*names: str) -> Callable[[Site], str]:
    """A config on top of a file, on top of the next, the last on top of the config."""

    def make(site: Site) -> str:
        for name, base in pairwise((*names, CONFIG)):
            (site.folder / name).write_text(f"base: {base}\n")
        return f"base: {(*names, CONFIG)[0]}\n"

    return make


def over_base(content: str) -> Callable[[Site], str]:
    """A config of these keys on top of one that works."""

    def make(site: Site) -> str:
        OmegaConf.save(site.config(), site.folder / "whole.yaml")
        return f"base: whole.yaml\n{content}\n"

    return make


def value(key: str, given: Any, message: str, **expected: Any) -> BadInput:
    """A row in which one key has a wrong value."""
    return BadInput(f"{key}: {_shown(given)}", changed({key: given}), message, **expected)


def lora_value(key: str, given: Any, message: str) -> BadInput:
    """A row of the LoRA recipe in which one key has a wrong value."""
    return BadInput(f"{key}: {_shown(given)}", changed({key: given}, lora=True), message, lora=True)


def _shown(given: Any) -> str:
    return "null" if given is None else str(given).lower() if isinstance(given, bool) else str(given)


FILES = [
    BadInput(
        "no file of that name",
        text("a: 1"),
        r"no config file nothing\.yaml, and no config of that name; there are: .*tinyllama/1\.1B_full_memorization",
        arguments=("--config", "nothing.yaml"),
    ),
    BadInput("a folder", text("a: 1"), r"no config file .*/run, and no config", arguments=("--config", "{folder}/run")),
    BadInput("YAML that does not end", text("batch_size: [1"), r"config .*mine\.yaml.*line 1"),
    BadInput("YAML with a tab", text("model:\n\tlr: 1"), r"config .*mine\.yaml.*line 2"),
    BadInput("a list", text("- batch_size"), r"config .*mine\.yaml holds a list, not keys and values"),
    BadInput("a word", text("batch_size"), r"config: missing checkpointer, dataset, loss"),
    BadInput("nothing at all", text(""), r"config: missing batch_size, checkpointer, dataset, .*output_dir, tokenizer"),
    BadInput("null for a key", text("null: 2"), r"config .*mine\.yaml: .*NoneType.*: keys must be strings"),
    BadInput("a reference to itself", changed({"model": "${model}"}), r"config: Recursive interpolation.*'model'"),
    BadInput("a reference that breaks off", text("seed: ${"), r"config .*mine\.yaml: .*'seed'"),
    BadInput(
        "20,000 nested lists",
        text(f"seed: {'[' * 20_000}{']' * 20_000}"),
        r"mine\.yaml: something is nested too deeply",
    ),
    BadInput(
        "??? over a base's value",
        over_base("optimizer:\n  lr: ???\nepochs: ???"),
        r"^error: config: missing epochs, optimizer\.lr$",
    ),
    BadInput(
        "??? as an override",
        changed({}),
        r"^error: config: missing optimizer\.lr$",
        arguments=("--config", "{folder}/mine.yaml", "optimizer.lr=???"),
    ),
    BadInput("a number for a key", text("1: 2"), r"config .*mine\.yaml: key 1: keys must be strings"),
    BadInput("bytes that are no UTF-8", text("output_dir: \udcff"), r"mine\.yaml.*UTF-8"),
    BadInput("a reference that does not end", text("output_dir: ${seed"), r"config .*output_dir"),
    BadInput("a base that is nowhere", text("base: nowhere"), r"no config file nowhere, .*\(base of .*mine\.yaml\)"),
    BadInput("a base that is a list", text("base: [a, b]"), r"base is \['a', 'b'\], it has to be the name or path"),
    BadInput("its own base", bases(), r"mine\.yaml builds on itself: .*mine\.yaml -> .*mine\.yaml"),
    BadInput("bases in a circle", bases("a.yaml", "b.yaml"), r"builds on itself: .*a\.yaml -> .*b\.yaml -> "),
    BadInput(
        "an override without a value",
        changed({}),
        r"config: .*key=value, got batch_size",
        arguments=("--config", "{folder}/mine.yaml", "batch_size"),
    ),
    BadInput(
        "an option that is none",
        changed({}),
        r"unknown options --batch_size=3: write keys as key=value",
        arguments=("--config", "{folder}/mine.yaml", "--batch_size=3"),
    ),
]

KEYS = [
    value("batch_sise", 4, r"no key 'batch_sise'; did you mean 'batch_size'\?"),
    value("zzz", 4, r"no key 'zzz'; possible are batch_size, .*tokenizer"),
    value("merge_adapter", True, r"no key 'merge_adapter'; it is one of the recipe lora_finetune"),
    BadInput("no loss, no batch_size", without("loss", "batch_size"), r"missing batch_size, loss"),
    value("output_dir", None, r"output_dir is None, it has to be "),
    value("output_dir", "${nothing}", r"'nothing' not found.*output_dir"),
    value("batch_size", "many", r"batch_size is 'many', it has to be a whole number"),
    value("batch_size", None, r"batch_size is None, it has to be a whole number"),
    value("batch_size", 2.5, r"batch_size is 2\.5, it has to be a whole number"),
    value("batch_size", 2.0, r"batch_size is 2\.0, it has to be a whole number"),
    value("batch_size", True, r"batch_size is True, it has to be a number, not a boolean"),
    value("batch_size", 0, r"batch_size is 0, it has to be at least 1"),
    value(
        "batch_size",
        1000,
        r"the data set has 80 sequences, one step takes batch_size .* = 1000: lower .*or add data",
    ),
    value("gradient_accumulation_steps", 0, r"gradient_accumulation_steps is 0, it has to be at least 1"),
    value(
        "gradient_accumulation_steps",
        30,
        r"the data set has 80 sequences, one step takes .* = 120: lower ",
    ),
    value("epochs", -1, r"epochs is -1, it has to be at least 1"),
    value("max_steps", 0, r"max_steps is 0, it has to be at least 1, or null"),
    value("log_every_n_steps", 0, r"log_every_n_steps is 0, it has to be at least 1"),
    value("clip_grad_norm", 0.0, r"clip_grad_norm is 0\.0, it has to be greater than 0, or null"),
    value("clip_grad_norm", float("nan"), r"clip_grad_norm is nan, it has to be a finite number, or null"),
    value("save_at_percent", [], r"save_at_percent is \[\], list should have at least 1 item"),
    value("save_at_percent", [50, 101], r"save_at_percent\[1\] is 101, it has to be at most 100"),
    value("save_at_percent", [12.5], r"save_at_percent\[0\] is 12\.5, it has to be a whole number"),
    value("save_at_percent", 50, r"save_at_percent is 50, it has to be a valid list"),
    value("save_every_n_steps", 0, r"save_every_n_steps is 0, it has to be at least 1, or null"),
    value("keep_last_n_checkpoints", -1, r"keep_last_n_checkpoints is -1, it has to be at least 0"),
    BadInput(
        "saves of which none is kept",
        changed({"save_every_n_steps": 5, "keep_last_n_checkpoints": 0}),
        r"save_every_n_steps is 5, but keep_last_n_checkpoints is 0, which keeps none: change one of them",
    ),
    value("resume_from_checkpoint", "newest", r"resume_from_checkpoint is 'newest', it has to be true or false"),
    value("on_non_finite", "ignore", r"on_non_finite is 'ignore', it has to be 'stop' or 'skip'"),
    value("fsdp_param_dtype", "fp8", r"fsdp_param_dtype is 'fp8', it has to be 'bf16' or 'fp32', or null"),
    value("fsdp_param_dtype", "fp16", r"fsdp_param_dtype is 'fp16', it has to be 'bf16' or 'fp32', or null"),
    value("fsdp_reduce_dtype", "half", r"fsdp_reduce_dtype is 'half', it has to be 'bf16' or 'fp32', or null"),
    value("fsdp_reduce_dtype", "fp16", r"fsdp_reduce_dtype is 'fp16', it has to be 'bf16' or 'fp32', or null"),
    value("fsdp_cpu_offload", "some", r"fsdp_cpu_offload is 'some', it has to be true or false"),
    value("fsdp_reshard_after_forward", "later", r"fsdp_reshard_after_forward is 'later', it has to be true or false"),
    value("seed", -1, r"seed .*-1\. .*range \[0, 4294967295\]"),
    value("seed", 2**32, r"seed .*4294967296\. .*range \[0, 4294967295\]"),
    value("seed", "abc", r"seed is 'abc', it has to be a whole number.*, or null"),
    value("shuffle", "perhaps", r"shuffle is 'perhaps', it has to be true or false"),
    value("dtype", "fp16", r"dtype is 'fp16', it has to be 'fp32' or 'bf16'; fp16 needs the recipe lora_finetune"),
    value("dtype", "float32", r"dtype is 'float32', it has to be 'fp32' or 'bf16'"),
    value("device", "cuda:99", r"device 'cuda:99' is not available, possible are cpu, cuda where present"),
    value("device", "gpu", r"device 'gpu' is not available, possible are cpu, cuda where present"),
    value("device", "meta", r"device 'meta' is not available, possible are cpu, cuda where present"),
]

COMPONENTS = [
    value("loss", LOSS, r"loss has to be a section with `_component_`"),
    value("loss", None, r"loss has to be a section with `_component_`"),
    value("loss._component_", None, r"loss has to be a section with `_component_`"),
    value("loss", [LOSS], r"loss has to be a section with `_component_`"),
    value("model._component_", 3, r"model: component is 3, it has to be a dotted path such as"),
    value("loss._component_", "tfidf_tune.loss.TFIDFLoss", r"no component 'tfidf_tune\.loss\.TFIDFLoss'"),
    value("loss._component_", "no_such_package.Loss", r"loss: no component 'no_such_package\.Loss'"),
    value("loss._component_", "Loss", r"loss: no component 'Loss'"),
    value("loss._component_", "tfidf_tune..Loss", r"loss: no component 'tfidf_tune\.\.Loss'"),
    value("loss._component_", "tfidf_tune.loss", r"loss: 'tfidf_tune\.loss' is not a class or function"),
    value(
        "loss._component_", "builtins.dict", r"loss: builtins\.dict does not declare its arguments: name a class or fun"
    ),
    value(
        "loss._component_",
        "torch.nn.CrossEntropyLoss",
        r"CrossEntropyLoss, not one of tfidf_tune's objectives: take, for example, tfidf_tune\.loss",
    ),
    value(
        "loss._component_", "tfidf_tune.loss.token_cross_entropy", r"loss: .*token_cross_entropy makes Tensor, not one"
    ),
    value("loss.num_batchs", 4, r"has no argument 'num_batchs'; did you mean 'num_batches'\?"),
    value("loss.num_batches", 0, r"config: loss: num_batches is 0: .*set it to 1 or more"),
    value("loss.num_batches", 2.5, r"config: loss: num_batches is 2\.5, it has to be a whole number"),
    value("loss.num_batches", None, r"config: loss: num_batches is None, it has to be a whole number"),
    value("loss.tf", "sqrt", r"config: loss: tf is 'sqrt': possible are count, log, binary"),
    value("loss.max_weight", 0.5, r"config: loss: max_weight is 0\.5: .*from 1 to 1e"),
    value("loss.head", "flash", r"config: loss: head is 'flash': possible are fused, torch, chunked"),
    value("loss.num_output_chunks", 0, r"config: loss: num_output_chunks is 0: .*1 or more"),
    value("loss.accumulate_in_fp32", "yes please", r"accumulate_in_fp32 is 'yes please', it has to be true or false"),
    value("loss.sync", "sometimes", r"config: loss: sync is 'sometimes', it has to be true or false"),
    value("loss.normalization", "batch", r"config: loss: normalization is 'batch': possible are rank, global"),
    BadInput(
        "a cap on a mean over all ranks without sync",
        changed({"loss.max_weight": 4.0, "loss.normalization": "global"}),
        r"config: loss: max_weight is 4\.0 and normalization 'global' without sync: .* set sync to true or",
    ),
    *(
        value(
            "loss",
            {
                "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
                "weighting": {"_component_": f"tfidf_tune.weighting.{name}Weighting", key: given},
            },
            f"loss.weighting: {key} is {told}: {why}",
        )
        for name, key, given, told, why in (
            ("Focal", "gamma", 1e6, "1000000.0", ".*from 0 to 20 .a larger one can make all weights 0 in float32"),
            ("MiLe", "gamma", 1e6, "1000000.0", ".*from 0 to 20 .a larger one can make weights infinite"),
            ("PowerLaw", "alpha", 1e6, "1000000.0", ".*from 0 to 4 .a larger one can make all weights 0"),
            ("PowerLaw", "epsilon", 1e300, r"1e\+300", ".*from 1e-08 to 1e.06 .*weights 0 or infinite"),
            ("Repetition", "alpha", 1e6, "1000000.0", ".*above 0, up to 4 .a larger one can make weights 0"),
            ("TokenDrop", "p", 1 - 1e-12, "0.999999999999", ".*from 0 to 0.99 .a larger one can leave no token"),
            ("Goldfish", "k", 10**12, "1000000000000", ".*set it to 2 to 2147483648"),
            ("Goldfish", "h", 10**9, "1000000000", ".*set it to 1 to 1024"),
            (
                "TFIDF",
                "max_weight",
                1e39,
                r"1e\+39",
                ".*from 1 to 1e.09 .a larger one would cap nothing; null for none",
            ),
        )
    ),
    BadInput(
        "a weighting that leaves no token",
        changed(
            {
                "loss._component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
                "loss.weighting": {"_component_": "bad_configs.NoWeights"},
                "save_at_percent": [60, 100],
            }
        ),
        r"the weights of all tokens were 0 in 10 steps in a row, up to step 10, so that nothing was learned",
        leaves=OPENED,
        only_training_shows=True,
    ),
    value("loss.ignore_index", 0, r"config: loss: ignore_index is 0: ignored labels are marked by -100"),
    value("optimizer._component_", "torch.optim.AdamX", r"optimizer: no component 'torch\.optim\.AdamX'"),
    value("optimizer._component_", "torch.nn.Linear", r"config: optimizer: torch\.nn\.Linear"),
    value(
        "optimizer",
        {"_component_": "torch.nn.ParameterList"},
        r"optimizer: torch\.nn\.ParameterList makes ParameterList, not an optimizer: .*torch\.optim\.AdamW",
    ),
    value(
        "optimizer._component_", "torch.optim.LBFGS", r"optimizer: torch\.optim\.LBFGS needs a closure that computes"
    ),
    value("optimizer._component_", "torch.nn.SGD", r"optimizer: no component 'torch\.nn\.SGD'"),
    value("optimizer.learning_rate", 1.0, r"optimizer: torch\.optim\.AdamW has no argument 'learning_rate'"),
    value("optimizer.lr", -1.0, r"config: optimizer: .*[Ii]nvalid learning rate: -1\.0"),
    value("optimizer.lr", "abc", r"config: optimizer: lr is 'abc', it has to be a number"),
    value("optimizer.lr", float("nan"), r"config: optimizer: lr is nan, it has to be a finite number"),
    value("optimizer.lr", float("inf"), r"config: optimizer: lr is inf, it has to be a finite number"),
    value(
        "optimizer.lr",
        1e30,
        r"step \d+.*lower learning rate",
        leaves=OPENED,
        only_training_shows=True,
    ),
    value("optimizer.betas", [0.9], r"optimizer: betas is \[0\.9\], it has to be a list of 2 values"),
    value(
        "optimizer",
        {"_component_": "torchao.optim.AdamW8bit", "betas": [0.9]},
        r"config: optimizer: .* given were betas=\[0\.9\]",
    ),
    value("optimizer.betas", [0.9, 1.5], r"config: optimizer: .*beta.*1\.5"),
    value(
        "lr_scheduler.num_warmup_steps",
        "x",
        r"config: lr_scheduler: TypeError: .* given were num_warmup_steps='x'",
    ),
    value(
        "lr_scheduler", {"_component_": "torch.optim.lr_scheduler.StepLR", "step_size": 1}, r"lr_scheduler: .*num_tr"
    ),
    value("lr_scheduler", {"_component_": "types.SimpleNamespace"}, r"lr_scheduler: "),
    value("lr_scheduler.num_warmup", 1, r"has no argument 'num_warmup'; did you mean 'num_warmup_steps'\?"),
    value(
        "model",
        {"_component_": "torch.nn.Identity"},
        r"model: torch\.nn\.Identity has no .*torchtune\.models\.llama2\.llama2",
    ),
    value(
        "metric_logger",
        {"_component_": "torch.nn.Identity"},
        r"metric_logger: torch\.nn\.Identity makes Identity, not a metric logger: .*DiskLogger",
    ),
    value(
        "collate_fn",
        "math.sqrt",
        r"collate_fn: math\.sqrt takes no ignore_idx, padding_idx: take, for example, torchtune",
    ),
    value(
        "collate_fn",
        "torchtune.data.padded_collate_dpo",
        r"collate_fn: torchtune\.data\.padded_collate_dpo makes no batch of .* \(KeyError: 'chosen_",
    ),
    value("collate_fn", "foo.bar", r"collate_fn: no component 'foo\.bar'"),
    value("collate_fn", "tfidf_tune.data", r"collate_fn: 'tfidf_tune\.data' is not a class or function"),
    value("metric_logger._component_", "torchtune.training.Logger", r"metric_logger: no component '.*\.Logger'"),
    value("metric_logger.log_dir", None, r"config: metric_logger: log_dir is None, it has to be a text"),
    value("model.num_layer", 2, r"has no argument 'num_layer'; did you mean 'num_layers'\?"),
    value("model.num_heads", "x", r"config: model: num_heads is 'x', it has to be a whole number"),
    value("model.num_heads", 5, r"config: model: num_heads \(5\) must be divisible by num_kv_heads \(2\)"),
    value("model.num_heads", 0, r"config: model: num_heads is 0, it has to be at least 1"),
    BadInput("no model.num_layers", without("model.num_layers"), r"model: torchtune\S+ needs num_layers"),
    value("model.num_layers", 3, r"2 layers in the checkpoint, 3 in the model.*change `model`"),
    value("model.embed_dim", 64, r"head_dim is 8 in the checkpoint, 16 in the model.*change `model` or `checkpointer"),
    value("model.max_seq_len", 128, r"max_seq_len is 64 in the checkpoint, 128 in the model"),
    value("checkpointer.max_shard_size", "huge", r"max_shard_size is 'huge', it has to be a size such as 5GB or 500MB"),
    value("checkpointer.checkpoint_dir", None, r"config: checkpointer: checkpoint_dir is None, it has to be a text"),
]

LORA = [
    BadInput(
        "a LoRA model in full_finetune",
        changed({}, lora=True),
        r"has LoRA layers: name a plain builder .* or use the recipe lora_finetune",
    ),
    BadInput(
        "a plain model in lora_finetune",
        changed({}),
        r"no LoRA layers: name a LoRA builder .* or use the recipe full_finetune",
        lora=True,
    ),
    lora_value("model.lora_rank", 0, r"model: lora_rank is 0, it has to be at least 1"),
    lora_value("model.lora_rank", 2.5, r"model: lora_rank is 2\.5, it has to be a whole number"),
    lora_value("model.lora_rank", True, r"model: lora_rank is True, it has to be a whole number"),
    lora_value("model.lora_alpha", -1, r"model: lora_alpha is -1, it has to be greater than 0"),
    lora_value("model.lora_alpha", float("nan"), r"model: lora_alpha is nan, it has to be a finite number"),
    lora_value("model.lora_alpha", float("inf"), r"model: lora_alpha is inf, it has to be a finite number"),
    lora_value("model.lora_dropout", 1.0, r"model: lora_dropout is 1\.0, it has to be less than 1"),
    lora_value("model.lora_attn_modules", [], r"config: model: Must pass one or more of .*'q_proj', .*lora_modules"),
    lora_value("model.lora_attn_modules", "q_proj", r"lora_attn_modules is 'q_proj', it has to be a list"),
    lora_value(
        "model.lora_attn_modules", ["o_proj"], r"names 'o_proj', .*possible are k_proj, output_proj, q_proj, v_p"
    ),
    lora_value("model.use_dora", True, r"DoRALinear; supported is only LoRA"),
    lora_value("model.quantize_base", True, r"NF4 takes .* a multiple of 16384 weights .*set it to False"),
    lora_value("merge_adapter", "maybe", r"merge_adapter is 'maybe', it has to be true or false"),
]

COMMANDS = [
    BadInput(
        "tune run: batch_sise",
        changed({"batch_sise": 3}),
        r"^error: config: no key 'batch_sise'; did you mean "
        r"'batch_size'\?$",
        command=TUNE_RUN,
    ),
    BadInput(
        "tfidf-tune run: no file of that name",
        text("a: 1"),
        r"^error: no config file nothing, and no config of",
        command=TFIDF_TUNE_RUN,
        arguments=("--config", "nothing"),
    ),
    BadInput(
        "tfidf-tune validate: batch_size 0",
        changed({"batch_size": 0}),
        r"^error: config: batch_size is 0, it has to",
        command=VALIDATE,
        arguments=(CONFIG,),
    ),
]

BAD_CONFIGS = [*FILES, *KEYS, *COMPONENTS, *LORA, *COMMANDS]
