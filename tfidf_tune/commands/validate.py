"""``tfidf-tune validate``."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfidf_tune._checks import SetupError
from tfidf_tune._printing import say

if TYPE_CHECKING:
    from tfidf_tune._config import FinetuneConfig


def main(arguments: list[str]) -> None:
    """Check a config, base included, as the recipes do."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune validate",
        usage="tfidf-tune validate <config> [key=value ...]",
        description="Check a config without running it, and whether the folders and files that "
        "it names are there. Ids of the hub are not looked up.",
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
        checked = training.check_config(cfg, schema)
        training.check_loss(checked)
        on_hub = [*_checkpoint_on_hub(checked), *_texts_on_hub(checked)]
    except ConfigError as error:
        raise SetupError(str(error)) from error
    print("Config is well-formed!")
    for key, name in on_hub:
        say(
            f"not looked up: {key} is {name}, for which there is no such file or folder here, so "
            "that it is taken for an id of the Hugging Face hub",
            file=sys.stderr,
        )


def _checkpoint_on_hub(cfg: "FinetuneConfig") -> Iterator[tuple[str, str]]:
    """Check the folder of the checkpoint; yield its key and name if it is an id of the hub."""
    from tfidf_tune.training import is_complete_folder, setup_errors

    name = str(cfg.checkpointer.get("checkpoint_dir"))
    with setup_errors("config: checkpointer.checkpoint_dir"):
        is_here = is_complete_folder(name)
    if not is_here:
        yield "checkpointer.checkpoint_dir", name


def _texts_on_hub(cfg: "FinetuneConfig") -> Iterator[tuple[str, str]]:
    """Check the texts of our data sets, and how they are deduplicated; yield the keys and names of
    those on the hub.
    """
    from tfidf_tune.corpus import Deduplication
    from tfidf_tune.corpus.sources import EMBEDDED, is_local, local_files
    from tfidf_tune.training import setup_errors
    from tfidf_tune.training.components import sections

    for where, section in sections("dataset", cfg.dataset):
        if not section._component_.startswith("tfidf_tune."):
            continue
        for key in ("source", "target_source"):
            name = section.get(key)
            if name is None or name == EMBEDDED:
                continue
            if not is_local(name):
                yield f"{where}.{key}", name
                continue
            with setup_errors(f"config: {where}.{key}"):
                local_files(name)
        with setup_errors(f"config: {where}"):
            Deduplication.of(section.get("deduplicate", "none"))


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
