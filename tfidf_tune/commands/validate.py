"""``tfidf-tune validate``."""

import argparse
from typing import TYPE_CHECKING, Any

from tfidf_tune._checks import SetupError

if TYPE_CHECKING:
    from tfidf_tune._config import FinetuneConfig


def main(arguments: list[str]) -> None:
    """Check a config, base included: as our recipes do if it is for one of them, else as torchtune does."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune validate",
        usage="tfidf-tune validate <config> [key=value ...]",
        description="Check a config without running it.",
        epilog="example: tfidf-tune validate mine/lora checkpointer.checkpoint_dir=MODEL dataset.source=my_texts.jsonl",
    )
    parser.add_argument("config", nargs="?", help="path of a config, or a name that `tfidf-tune ls` lists")
    parser.add_argument("--config", dest="named", metavar="<config>", help="the same, as `tfidf-tune run` takes it")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as `tfidf-tune run` takes them")
    options = parser.parse_args(arguments)
    name, overrides = options.config, options.overrides
    if options.named is not None:
        name, overrides = options.named, [*filter(None, [name]), *overrides]
    if name is None:
        parser.error("name a config")
    if wrong := [one for one in overrides if "=" not in one and not one.startswith("~")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")

    from omegaconf import OmegaConf

    from tfidf_tune._config import LoRAFinetuneConfig, check_keys, read_config

    if _schema(read_config(name)):
        check_keys(name, overrides, LoRAFinetuneConfig)  # overrides may name another model
    from torchtune.config import validate
    from torchtune.config._errors import ConfigError

    from tfidf_tune import training

    try:
        cfg = training.load_config(name, overrides)
        sections: Any = OmegaConf.to_container(cfg, resolve=False)
        if not sections:
            raise SetupError(f"config {name} is empty")
        if schema := _schema(sections):
            training.check_loss(training.check_config(cfg, schema))
        else:
            with training.setup_errors("config"):
                for key, section in sections.items():
                    component = section.get("_component_", "") if isinstance(section, dict) else ""
                    if not isinstance(component, str):
                        raise ValueError(f"{key}: _component_ is {component!r}, it has to be a dotted path")
                validate(cfg)
    except ConfigError as error:
        raise SetupError(str(error)) from error
    print("Config is well-formed!")


def _schema(content: dict[str, Any]) -> "type[FinetuneConfig] | None":
    """Return the keys of the recipe of ours that a config is for, None if it is for another recipe."""
    from tfidf_tune._config import FinetuneConfig, LoRAFinetuneConfig

    checkpointer = str(content.get("checkpointer"))
    if "HFCheckpointer" not in checkpointer or "torchtune.training" in checkpointer:
        return None
    return LoRAFinetuneConfig if "lora_" in str(content.get("model")) else FinetuneConfig
