"""``tfidf-tune tasks``."""

import argparse
from pathlib import Path

import tfidf_tune
from tfidf_tune.commands import require_extras


def main(arguments: list[str]) -> None:
    """Print the folder of our tasks, or write a tokenizer for prompts of token ids."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune tasks",
        description='Print the folder of our tasks: lm_eval --include_path "$(tfidf-tune tasks)" '
        "...",
    )
    parser.add_argument(
        "--token-ids-tokenizer",
        type=Path,
        metavar="FOLDER",
        help=(
            "write a tokenizer to this folder with which lm_eval --model hf --model_args "
            "pretrained=MODEL,tokenizer=FOLDER sends the prompts of our tasks as token ids"
        ),
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="folder or hub id of the model that FOLDER is for"
    )
    options = parser.parse_args(arguments)
    if (options.token_ids_tokenizer is None) != (options.tokenizer is None):
        parser.error("--token-ids-tokenizer and --tokenizer belong together")
    if options.token_ids_tokenizer is None:
        # Tasks_folder() without the imports of tfidf_tune.tasks.
        print(Path(tfidf_tune.__path__[0]) / "tasks")
        return
    require_extras("tasks", "eval")
    from tfidf_tune.tasks import save_token_ids_tokenizer

    save_token_ids_tokenizer(options.tokenizer, options.token_ids_tokenizer)
    print(options.token_ids_tokenizer)
