"""The command ``tfidf-tune``: torchtune's commands with our recipes and configs registered, and ours beside them."""

import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from tfidf_tune._printing import replace_unencodable, visible

# Each is the module of this name in tfidf_tune.commands.
_OURS = {
    "demo": "train a small Llama under CE and TF-IDF on this computer and show what each recites",
    "eval": "lm-evaluation-harness with our tasks and token-exact prompts",
    "experiment": "train and evaluate models, objectives and seeds as one file says, and compare them",
    "compare": "tables, intervals, figures and an HTML report of evaluated runs",
    "weights": "show the weights that TF-IDF gives the tokens of your own text",
    "probe": "make a probe file from your own text; audit one model with it",
    "tasks": "print the folder of our tasks, for lm_eval --include_path",
}
_RECIPES = {"lora_finetune": "lora_", "full_finetune": "_full_"}


def main() -> None:
    """Run the command line."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in _OURS:
        _run_ours(command, sys.argv[2:])
        return
    _register_recipes()
    from torchtune._cli.tune import main as tune_main

    if command in ("", "-h", "--help"):
        print("tfidf-tune adds to the commands of torchtune (all below but download):")
        print("".join(f"  {name:<10} {purpose}\n" for name, purpose in _OURS.items()))
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
            supports_distributed=True,
        )
        for name, method in _RECIPES.items()
    ]


def _check_config(name: str) -> None:
    """Run torchtune's ``validate`` on a path or name, base included; on configs of our recipes, the recipes' check."""
    from omegaconf import OmegaConf
    from torchtune.config import validate
    from torchtune.config._errors import ConfigError

    from tfidf_tune.training import (
        FinetuneConfig,
        LoRAFinetuneConfig,
        SetupError,
        check_config,
        check_loss,
        load_config,
        setup_errors,
    )

    try:
        cfg = load_config(name)
        sections = OmegaConf.to_container(cfg, resolve=False)
        if "HFCheckpointer" in str(sections.get("checkpointer")):
            is_lora = "lora_attn_modules" in str(sections.get("model"))
            check_loss(check_config(cfg, LoRAFinetuneConfig if is_lora else FinetuneConfig))
        else:
            with setup_errors("config"):
                for key, section in sections.items():
                    if isinstance(section, dict) and not isinstance(section.get("_component_", ""), str):
                        raise ValueError(
                            f"{key}: _component_ is {section['_component_']!r}, it has to be a dotted path"
                        )
                validate(cfg)
    except (SetupError, ConfigError) as error:
        sys.exit(f"error: {error}")
    print("Config is well-formed!")


def _run_ours(command: str, arguments: list[str]) -> None:
    """Run a command of ours; what the user gave and does not work is told in one message, without a traceback."""
    replace_unencodable()
    module = import_module(f"tfidf_tune.commands.{command}")
    try:
        module.main(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {visible(str(error))}")
    except MemoryError as error:
        sys.exit(f"error: out of memory{f' ({error})' if str(error) else ''}: use less text or a smaller batch size")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
