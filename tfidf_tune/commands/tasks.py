"""``tfidf-tune tasks``."""

import argparse
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Print the folder of our tasks, or write a tokenizer for prompts of token ids.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune tasks``.
    """
    parser = argparse.ArgumentParser(
        prog="tfidf-tune tasks",
        description='Print the folder of our tasks: lm_eval --include_path "$(tfidf-tune tasks)" ...',
    )
    parser.add_argument(
        "--token-ids-tokenizer",
        type=Path,
        metavar="FOLDER",
        help="write there a tokenizer with which lm_eval --model hf --model_args pretrained=MODEL,tokenizer=FOLDER "
        "sends our tasks' prompts by token ids",
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="folder or hub id of the model that FOLDER is for")
    options = parser.parse_args(arguments)
    if (options.token_ids_tokenizer is None) != (options.tokenizer is None):
        parser.error("--token-ids-tokenizer and --tokenizer belong together")
    from tfidf_tune.tasks import save_token_ids_tokenizer, tasks_folder

    if options.token_ids_tokenizer is None:
        print(tasks_folder())
    else:
        save_token_ids_tokenizer(options.tokenizer, options.token_ids_tokenizer)
        print(options.token_ids_tokenizer)
