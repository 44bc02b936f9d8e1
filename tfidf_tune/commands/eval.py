"""``tfidf-tune eval``."""

import sys
from typing import Any

from tfidf_tune.commands import rename_command

_HELP = """usage: tfidf-tune eval --model_args pretrained=MODEL --tasks TASK ... [OPTIONS]

Evaluate a Hugging Face model or a PEFT adapter with lm-evaluation-harness: its command, with our tasks included and
prompts of token ids. MODEL is a folder, such as RUN/checkpoint_100pct, or a hub id.

tasks:
  tfidf_memorization    what the model recites of the passages of a probe file, after 32, 50 and 100 tokens
  tfidf_memorization_prefixes    the same after other numbers of tokens: --metadata prefix_lengths=[16,24]
  tfidf_membership    likelihood of the passages, and whether it tells them from text that training did not see
  tfidf_wikitext2_ppl, tfidf_squad, tfidf_cnn_dailymail    perplexity, questions, summaries
  tfidf_other_ppl    perplexity on a second text: --metadata other_source=TEXT

options that are often needed:
  --metadata probe_file=RUN/probe.jsonl    settings of our tasks, key=value
  --log_samples --output_path FOLDER       write what `tfidf-tune compare` reads
  --batch_size N, --device DEVICE, --limit N

example:
  tfidf-tune eval --model_args pretrained=RUN/checkpoint_100pct --tasks tfidf_memorization \\
      --metadata probe_file=RUN/probe.jsonl --batch_size 32 --log_samples --output_path RUN/evaluation

`tfidf-tune eval run --help` lists all options of the harness, `tfidf-tune eval ls tasks` its tasks."""


def main(arguments: list[str]) -> None:
    """Run lm-evaluation-harness with our tasks included and, unless a model is named, our model.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune eval``: those of ``lm_eval``.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP)
        return
    from lm_eval._cli.harness import HarnessCLI

    sys.argv = ["tfidf-tune eval", *arguments]
    harness = HarnessCLI()
    for parser in (harness._parser, *harness._subparsers.choices.values()):
        rename_command(parser, r"lm-eval(?![\w-])", "tfidf-tune eval")
    options = harness.parse_args()
    if options.command is not None:
        _include_ours(options)
    harness.execute(options)


def _include_ours(options: Any) -> None:
    from lm_eval.utils import simple_parse_args_string

    from tfidf_tune.tasks import MODEL_NAME, VLLM_NAME, register_model, tasks_folder

    register_model()
    in_file = _read_config_file(options.config) if getattr(options, "config", None) else {}
    if hasattr(options, "include_path"):
        theirs = options.include_path or in_file.get("include_path") or []
        options.include_path = [str(tasks_folder()), *([theirs] if isinstance(theirs, str) else theirs)]
    if options.command == "run":
        options.model = options.model or in_file.get("model") or MODEL_NAME
        if options.model in (MODEL_NAME, VLLM_NAME):
            metadata = in_file.get("metadata") or {}
            if isinstance(metadata, str):
                metadata = simple_parse_args_string(metadata)
            options.metadata = {"prompts": "token_ids"} | metadata | (options.metadata or {})
        _load_tasks_before_model()


def _load_tasks_before_model() -> None:
    from lm_eval.config.evaluate_config import EvaluatorConfig

    from tfidf_tune.tasks import load_now

    process_tasks = EvaluatorConfig.process_tasks

    def process_and_load(self: Any, metadata: dict[str, Any] | None = None) -> Any:
        manager = process_tasks(self, metadata)
        load_now(manager, self.tasks)
        return manager

    EvaluatorConfig.process_tasks = process_and_load


def _read_config_file(path: str) -> dict[str, Any]:
    from lm_eval.config.evaluate_config import EvaluatorConfig

    try:
        config: dict[str, Any] = EvaluatorConfig.load_yaml_config(path)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return config
