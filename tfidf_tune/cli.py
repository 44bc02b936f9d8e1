"""The command ``tfidf-tune``: torchtune's commands with our recipes and configs registered, and ours beside them."""

import argparse
import sys
from importlib.resources import files
from pathlib import Path

from yaml import YAMLError

_OURS = {"demo": "train a small Llama under CE and TF-IDF on this computer and show what each recites"}
_RECIPES = {"lora_finetune": "lora_", "full_finetune": "_full_"}


def main() -> None:
    """Run the command line."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "demo":
        _run_demo(sys.argv[2:])
        return
    _register_recipes()
    from torchtune._cli.tune import main as tune_main

    if command in ("", "-h", "--help"):
        print("tfidf-tune adds to the commands of torchtune (all below but download):")
        print("".join(f"  {name:<8} {purpose}\n" for name, purpose in _OURS.items()))
    if command == "validate" and len(sys.argv) == 3 and not sys.argv[2].startswith("-"):
        _check_config(sys.argv[2])
        return
    tune_main()


def _register_recipes() -> None:
    """Put our recipes in front of torchtune's: its registry takes absolute paths."""
    from torchtune import _recipe_registry as registry

    recipe_folder, config_folder = (Path(str(files(f"tfidf_tune.{name}"))) for name in ("recipes", "configs"))
    config_files = sorted(config_folder.rglob("*.yaml"))
    registry._ALL_RECIPES[:0] = [
        registry.Recipe(
            name=name,
            file_path=str(recipe_folder / f"{name}.py"),
            configs=[
                registry.Config(name=file.relative_to(config_folder).with_suffix("").as_posix(), file_path=str(file))
                for file in config_files
                if method in file.stem
            ],
            supports_distributed=False,
        )
        for name, method in _RECIPES.items()
    ]


def _check_config(name: str) -> None:
    """Run torchtune's ``validate`` on a path or name, base included; on configs of our recipes, the recipes' check."""
    from torchtune.config import validate
    from torchtune.config._errors import ConfigError

    from tfidf_tune.training import FinetuneConfig, LoRAFinetuneConfig, SetupError, check_config, load_config

    try:
        cfg = load_config(name)
        if "HFCheckpointer" in str(cfg.get("checkpointer")):
            check_config(cfg, LoRAFinetuneConfig if "lora_attn_modules" in cfg.get("model", {}) else FinetuneConfig)
        else:
            validate(cfg)
    except (SetupError, ConfigError, YAMLError) as error:
        sys.exit(f"error: {error}")
    print("Config is well-formed!")


def _run_demo(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="tfidf-tune demo", description=_OURS["demo"])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and injections; default: %(default)s")
    options = parser.parse_args(arguments)
    from tfidf_tune.demo import run_demo

    run_demo(options.output_dir.expanduser(), seed=options.seed)


if __name__ == "__main__":
    main()
