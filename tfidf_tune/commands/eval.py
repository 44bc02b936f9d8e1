"""``tfidf-tune eval``."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfidf_tune._checks import require_no_options
from tfidf_tune.commands import rename_command, whole_number

_HELP = """usage: tfidf-tune eval RUN [OPTIONS]
       tfidf-tune eval --model_args pretrained=MODEL --tasks TASK ... [OPTIONS]

Evaluate the start and all milestones of a run in one process, on the passages and the held-out
text that the run wrote; results go to RUN/evaluation, and `tfidf-tune eval RUN --help` lists its
options. Or evaluate a Hugging Face model or a PEFT adapter with lm-evaluation-harness: its
command, with our tasks included and prompts of token ids. MODEL is a folder, such as
RUN/checkpoint_100pct, or a hub id.

tasks:
  tfidf_memorization    what the model recites of the passages of a probe file, after 32, 50 and
      100 tokens
  tfidf_memorization_prefixes    the same after other numbers of tokens:
      --metadata prefix_lengths=[16,24]
  tfidf_membership    likelihood of the passages, and whether it tells them from text that training
      did not see
  tfidf_positive_control, tfidf_positive_control_nll    whether the model reads passages that it is
      shown; they run with the tasks above, whose clean results say nothing without them
  tfidf_wikitext2_ppl, tfidf_squad, tfidf_cnn_dailymail    perplexity, questions, summaries
  tfidf_other_ppl    perplexity on a second text: --metadata other_source=TEXT

options that are often needed:
  --metadata probe_file=RUN/probe.jsonl    settings of our tasks, key=value
  --metadata bos=true|false                BOS before prompts and texts; default auto: as the model
                                           was trained
  --log_samples --output_path FOLDER       write what `tfidf-tune compare` reads
  --batch_size N, --device DEVICE, --limit N

example:
  tfidf-tune eval --model_args pretrained=RUN/checkpoint_100pct --tasks tfidf_memorization \\
      --metadata probe_file=RUN/probe.jsonl --batch_size 32 --log_samples \\
      --output_path RUN/evaluation

`tfidf-tune eval run --help` lists all options of the harness, `tfidf-tune eval ls tasks` its
tasks."""


_OF_HARNESS = ("run", "ls", "validate")  # its commands


def main(arguments: list[str]) -> None:
    """Run lm-evaluation-harness with our tasks included and, unless a model is named, our model."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP)
        return
    if not arguments[0].startswith("-") and arguments[0] not in _OF_HARNESS:
        _evaluate_run(arguments)
        return
    from lm_eval._cli.harness import HarnessCLI

    sys.argv = ["tfidf-tune eval", *arguments]
    harness = HarnessCLI()
    for parser in (harness._parser, *harness._subparsers.choices.values()):
        rename_command(parser, r"lm-eval(?![\w-])", "tfidf-tune eval")
    options = harness.parse_args()
    from lm_eval import loggers
    from lm_eval.config import evaluate_config

    from tfidf_tune.tasks import register_model
    from tfidf_tune.tasks.tracker import CompleteTracker

    if options.command is not None:
        register_model()
    # These two do not use the class.
    if options.command in ("ls", "validate"):
        options.include_path = _with_ours(getattr(options, "include_path", None))
    # The harness's command makes its configuration by this class, after options and --config have
    # been read, and writes by the other.
    their_config: Any = evaluate_config.EvaluatorConfig
    their_tracker = loggers.EvaluationTracker
    evaluate_config.EvaluatorConfig = _with_our_settings(their_config)
    loggers.EvaluationTracker = CompleteTracker
    try:
        harness.execute(options)
    finally:
        evaluate_config.EvaluatorConfig = their_config
        loggers.EvaluationTracker = their_tracker


def _evaluate_run(arguments: list[str]) -> None:
    """Evaluate the milestones of a run."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune eval",
        usage="tfidf-tune eval RUN [OPTIONS]",
        description="Evaluate all milestones of a run and the model that it was started from in "
        "one process, each into RUN/evaluation. A model that has results of the same tasks and "
        "settings is left as it is.",
        epilog="example: tfidf-tune eval runs/mine_lora",
    )
    from lm_eval._cli.utils import MergeDictAction

    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    add(
        "--tasks",
        help="names with commas between them; default: what the run wrote passages and text for",
    )
    add(
        "--metadata",
        nargs="+",
        action=MergeDictAction,
        metavar="KEY=VALUE",
        help="settings of the tasks",
    )
    add(
        "--model_args",
        nargs="+",
        action=MergeDictAction,
        metavar="KEY=VALUE",
        help="dtype=float32, base=..., ...",
    )
    add("--batch_size", type=whole_number(1), default=32, help="default: %(default)s")
    add("--device", help="default: a GPU if there is one")
    add("--limit", type=whole_number(1), help="documents of each task; default: all")
    add("--no-start", action="store_true", help="leave out the model that the run was started from")
    add("--overwrite", action="store_true", help="evaluate milestones again that have results")
    options = parser.parse_args(arguments)
    from tfidf_tune.tasks.run_evaluation import evaluate_run

    evaluate_run(
        options.run.expanduser(),
        options.tasks.split(",") if options.tasks else None,
        options.metadata,
        model_args=options.model_args,
        batch_size=options.batch_size,
        device=options.device,
        limit=options.limit,
        overwrite=options.overwrite,
        with_start=not options.no_start,
    )


def _with_ours(include_path: str | list[str] | None) -> list[str]:
    from tfidf_tune.tasks import tasks_folder

    return [
        str(tasks_folder()),
        *([include_path] if isinstance(include_path, str) else include_path or []),
    ]


def _with_our_settings(theirs: Any) -> type:
    """Derive a class that sets what the harness has no option for: defaults, and when tasks are
    loaded.
    """
    from tfidf_tune.probe import run_of
    from tfidf_tune.tasks import MODEL_NAME, VLLM_NAME
    from tfidf_tune.tasks.bos import settle_bos
    from tfidf_tune.tasks.evaluation import load_lm, with_positive_controls
    from tfidf_tune.tasks.settings import settings_of_tasks

    @dataclass
    class Evaluation(theirs):  # type: ignore[misc]
        model: str = MODEL_NAME

        def _load(self) -> Any:
            if isinstance(self.model, str):  # else it is loaded already
                self.model = load_lm(self.model, self.model_args, self.batch_size, self.device)
            return self.model

        def _require_settings(self) -> None:
            """Refuse keys of --metadata that are no setting, unless there are tasks of others, who
            may read them.
            """
            named: list[str] = self.tasks.split(",") if isinstance(self.tasks, str) else self.tasks  # type: ignore[has-type]
            unknown = sorted(self.metadata.keys() - settings_of_tasks() - self.model_args.keys())
            if unknown and all(name.startswith("tfidf_") for name in named):
                raise ValueError(
                    f"--metadata: no task has the setting {', '.join(unknown)}; there are "
                    f"{', '.join(sorted(settings_of_tasks()))}"
                )

        @classmethod
        def load_yaml_config(cls, config_path: str) -> Any:
            try:
                return theirs.load_yaml_config(config_path)
            except TypeError as error:
                raise ValueError(str(error)) from error  # a message instead of a traceback

        def process_tasks(self, metadata: dict[str, Any] | None = None) -> Any:
            if self.use_cache or self.cache_requests:
                raise ValueError(
                    "the keys of --use_cache and --cache_requests have neither the model nor the "
                    "probe file, so that answers of another model would be taken: leave them out"
                )
            self.include_path = _with_ours(self.include_path)  # type: ignore[has-type]
            self._require_settings()
            require_no_options(self.model_args)
            # What the user names in --metadata has precedence.
            ours = {"prompts": "token_ids"} if self.model in (MODEL_NAME, VLLM_NAME) else {}
            known = {"run": run_of(self.model_args), "backend": self.model} | ours
            self.tasks = with_positive_controls(self.tasks, self.metadata)  # type: ignore[has-type]
            metadata = known | self.metadata
            if ours and any(name.startswith("tfidf_") for name in self.tasks):
                metadata = settle_bos(metadata, self._load)
            manager = super().process_tasks(metadata)
            # Before the model: errors in the settings appear at once.
            loaded = manager.load(self.tasks)
            manager.load = lambda _: loaded
            return manager

    return Evaluation
