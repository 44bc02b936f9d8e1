"""lm-evaluation-harness with our tasks and our model."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model, model_registry

from tfidf_tune._checks import check_at_least, require_no_options
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import run_of
from tfidf_tune.probe.sample_fields import (
    MEMBERSHIP,
    MEMORIZATION,
    POSITIVE_CONTROL,
    POSITIVE_CONTROL_NLL,
)
from tfidf_tune.tasks._kept import kept_between_evaluations
from tfidf_tune.tasks._requests import cached_prompts
from tfidf_tune.tasks.bos import settle_bos
from tfidf_tune.tasks.memorization import PROBE_FILE_VARIABLE

MODEL_NAME = "tfidf-hf"
SERVER_NAME = "tfidf-server"
VLLM_NAME = "tfidf-vllm"
_MODELS = {
    MODEL_NAME: "tfidf_tune.tasks._transformers:TokenExactHFLM",
    SERVER_NAME: "tfidf_tune.tasks.server:ServerLM",
    VLLM_NAME: "tfidf_tune.tasks._vllm:TokenExactVLLM",
}


def tasks_folder() -> Path:
    """Return the absolute path of the folder with the tasks' YAML files, for ``lm_eval
    --include_path``.
    """
    return Path(__file__).parent


def register_model() -> None:
    """Register our models with the harness, in this process; outside of a repository it does not
    ask git.
    """
    import lm_eval.models  # noqa: F401  (first: the harness registers its own models only into an empty registry)
    from lm_eval import evaluator

    if not any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        evaluator.get_git_commit_hash = lambda: None  # git would print that this is no repository

    for name, target in _MODELS.items():
        if name not in model_registry:
            model_registry.register(name, target=target)


@kept_between_evaluations()
def evaluate(
    model_args: dict[str, Any],
    tasks: Sequence[str],
    output_path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    batch_size: int = 64,
    device: str | None = None,
    limit: int | None = None,
    model_name: str = MODEL_NAME,
    model: LM | None = None,
) -> None:
    """Evaluate a model with the harness, with prompts of token ids, and write results and samples.

    The same as ``tfidf-tune eval --model_args ... --tasks ... --log_samples``, but without indexing
    the harness's own tasks, which takes seconds. It can be called repeatedly in one process:
    neither the model nor its tokenizer is kept.

    Args:
        model_args (dict[str, Any]): of the harness's ``hf`` model: ``pretrained``, ``peft``,
            ``dtype``, ...
        tasks (Sequence[str]): names of our tasks and groups.
        output_path (Path): folder below which ``results_*.json`` and ``samples_*.jsonl`` are
            written.
        metadata (dict[str, Any] | None): settings of the tasks.
        batch_size (int): sequences in a forward pass.
        device (str | None): device of the model. Default: a GPU if there is one, else the CPU.
        limit (int | None): documents of each task. Default: None, all.
        model_name (str): of the harness; ``tfidf-server`` and ``tfidf-vllm`` take other
            ``model_args``. Default: "tfidf-hf".
        model (LM | None): the model of this name and these arguments, if it is there already.
            Default: None, it is loaded.

    Raises:
        ValueError: If a task is unknown or one of its settings is invalid; if device or dtype do
            not exist, or the batch size is below 1.
        OSError: If the results cannot be written; an output path that is not writable is refused
            first.
    """
    require_no_options(model_args)
    if model_name == MODEL_NAME:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        _check_model_settings(model_args.get("dtype", "auto"), device, batch_size)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from tfidf_tune.tasks.tracker import CompleteTracker

    tracker = CompleteTracker(output_path=str(output_path))
    register_model()
    cached_prompts.cache_clear()  # another model's tokenizer may be in a folder of the same name
    # What the harness records with the results: the run, and all settings of the tasks.
    settings = {"prompts": "token_ids", "run": run_of(model_args), "backend": model_name}
    settings |= model_args
    settings |= metadata or {}
    model_source = _ModelSource(model, partial(load_lm, model_name, model_args, batch_size, device))
    settings = settle_bos(settings, model_source.load)
    # The tasks come before the model: errors in the settings appear at once.
    manager = TaskManager(
        include_path=str(tasks_folder()), include_defaults=False, metadata=settings
    )
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise ValueError(
            f"no task {', '.join(unknown)}; possible are {', '.join(sorted(manager.all_tasks))}"
        )
    loaded_tasks = manager.load(list(tasks))
    results = simple_evaluate(
        model=model_name if model_source.model is None else model_source.model,
        model_args=model_args,
        tasks=[loaded_tasks["groups"].get(name) or loaded_tasks["tasks"][name] for name in tasks],
        batch_size=batch_size,
        device=device,
        limit=limit,
        log_samples=True,
        evaluation_tracker=tracker,
        task_manager=manager,
        metadata=settings,
    )
    if results is None:  # not the first of several processes
        return
    results["config"]["model"] = model_name
    # As the harness's own command writes them.
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])


class _ModelSource:
    """A model that is loaded when it is first needed; ``model`` is None until then."""

    def __init__(self, model: LM | None, load: Callable[[], LM]) -> None:
        self.model = model
        self._load = load

    def load(self) -> LM:
        """Return the model, loaded now if it was not."""
        if self.model is None:
            self.model = self._load()
        return self.model


def with_positive_controls(tasks: str | Sequence[str], metadata: Mapping[str, Any]) -> list[str]:
    """Add the positive control of the named tasks, without which their clean results say nothing.

    A probe file that cannot be read, or is not named, is an error of the task itself.
    """
    named = tasks.split(",") if isinstance(tasks, str) else [*tasks]
    added = []
    if any(name.startswith(MEMORIZATION) for name in named):
        added.append(POSITIVE_CONTROL)
    if MEMBERSHIP in named:
        added.append(POSITIVE_CONTROL_NLL)
    file = metadata.get("probe_file") or os.environ.get(PROBE_FILE_VARIABLE)
    if added and file:
        with suppress(OSError, ValueError):
            if any(passage.kind == "control" for passage in read_probe_file(file)):
                named += [task for task in added if task not in named]
    return named


def load_lm(model_name: str, model_args: dict[str, Any], batch_size: Any, device: str | None) -> LM:
    """Load a model as the harness does."""
    options = {"batch_size": batch_size, "max_batch_size": None, "device": device}
    return get_model(model_name).create_from_arg_obj(model_args, options)


def loaded_model(
    model_name: str, model_args: dict[str, Any], batch_size: int, device: str | None
) -> LM:
    """Load a model for several calls of :func:`evaluate`, on its default device."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_model_settings(model_args.get("dtype", "auto"), device, batch_size)
    register_model()
    return load_lm(model_name, model_args, batch_size, device)


def likelihood_problem(model_name: str, model_args: Mapping[str, Any]) -> str | None:
    """Say why a model that is loaded here gives no log-probabilities of prompts; None
    if it does.
    """
    if model_name != VLLM_NAME:
        return None
    from tfidf_tune.tasks._vllm import likelihood_problem as problem_of_vllm

    return problem_of_vllm(model_args)


def _check_model_settings(dtype: Any, device: str, batch_size: int) -> None:
    """Refuse settings that fail only after the model is loaded, or that the harness silently
    replaces.
    """
    # The harness falls back to another device without a word.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator else "cpu"
    devices = ["cpu"]
    if kind in ("cuda", "mps"):  # the harness accepts other kinds only with a number
        devices.append(kind)
    devices += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    if device not in devices:
        raise ValueError(
            f"no device {device!r} on this machine: choose one of {', '.join(devices)}"
        )
    possible = ("float32", "bfloat16", "float16", "float64")
    named_dtype = getattr(torch, str(dtype).removeprefix("torch."), None)
    possible_dtypes = [getattr(torch, name) for name in possible]
    if dtype != "auto" and named_dtype not in possible_dtypes:
        raise ValueError(
            f"a model cannot be loaded with dtype {dtype!r}: choose one of auto, "
            f"{', '.join(possible)}"
        )
    check_at_least(1, batch_size=batch_size)
