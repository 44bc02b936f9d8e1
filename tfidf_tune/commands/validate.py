"""``tfidf-tune validate``."""

import argparse
from typing import Any

from tfidf_tune._checks import SetupError


def main(arguments: list[str]) -> None:
    """Check a config, base included, as the recipes do."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune validate",
        usage="tfidf-tune validate <config> [key=value ...]",
        description="Check a config without running it.",
        epilog="example: tfidf-tune validate mine/lora checkpointer.checkpoint_dir=MODEL "
        "dataset.source=my_texts.jsonl",
    )
    parser.add_argument(
        "config", nargs="?", help="path of a config, or a name that `tfidf-tune ls` lists"
    )
    parser.add_argument(
        "--config", dest="named", metavar="<config>", help="the same, as `tfidf-tune run` takes it"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="as `tfidf-tune run` takes them"
    )
    options = parser.parse_args(arguments)
    name = options.config
    overrides = options.overrides
    if options.named is not None:
        if name:
            overrides = [name, *overrides]
        name = options.named
    if name is None:
        parser.error("name a config")
    wrong = [one for one in overrides if "=" not in one and not one.startswith("~")]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")

    from tfidf_tune._config import FinetuneConfig, LoRAFinetuneConfig, check_keys, read_config

    _require_ours(name, read_config(name))
    check_keys(name, overrides, LoRAFinetuneConfig)  # overrides may name another model
    import tfidf_tune._torchao

    from torchtune.config._errors import ConfigError

    from tfidf_tune import training

    try:
        cfg = training.load_config(name, overrides)
        schema = LoRAFinetuneConfig if "lora_" in str(cfg.get("model")) else FinetuneConfig
        training.check_loss(training.check_config(cfg, schema))
    except ConfigError as error:
        raise SetupError(str(error)) from error
    print("Config is well-formed!")


def _require_ours(name: str, content: dict[str, Any]) -> None:
    """Raise a SetupError if a config is empty, or for a recipe of torchtune."""
    if not content:
        raise SetupError(f"config {name} is empty")
    checkpointer = str(content.get("checkpointer"))
    if "HFCheckpointer" not in checkpointer or "torchtune.training" in checkpointer:
        raise SetupError(
            f"config {name} is for no recipe of this package, whose checkpointer is "
            "tfidf_tune.training.HFCheckpointer: `tune validate` checks configs of torchtune"
        )
