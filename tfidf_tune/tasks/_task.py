"""Shared by all tasks: the class of a task, its documents, and the check of lengths."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.task import TaskConfig
from transformers import AutoConfig

from tfidf_tune.analysis import adapter_base

_TASK_KEYS = {field.name for field in dataclasses.fields(TaskConfig)}

logger = logging.getLogger(__name__)


class PromptTask(ConfigurableTask):  # type: ignore[misc]
    """A task of the harness whose documents hold the request and the number of tokens to generate.

    The request is sent unchanged, without the harness's system instruction or chat template, because training saw
    none. The document's ``max_new_tokens`` replaces ``max_gen_toks``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key in _TASK_KEYS})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Make the request of a document, as often as its ``generation`` asks for samples."""
        kwargs.pop("apply_chat_template", None)
        kwargs.pop("chat_template", None)
        generation = dict(doc.get("generation") or {})
        number = generation.pop("num_samples", 1)
        if self.OUTPUT_TYPE == "loglikelihood":
            arguments: tuple[Any, ...] = (doc["request"], doc["continuation"])
        else:
            settings = {**self.config.generation_kwargs, **generation, "max_gen_toks": doc["max_new_tokens"]}
            arguments = (doc["request"], settings)
        return [
            Instance(request_type=self.OUTPUT_TYPE, doc=doc, arguments=arguments, idx=index, **kwargs)
            for index in range(number)
        ]


def task_documents(rows: list[dict[str, Any]], unit: str, settings: Mapping[str, Any]) -> dict[str, Dataset]:
    """Return documents in the form of the harness's ``custom_dataset``, and warn if text prompts change token ids.

    At least one row, all with the same keys, ``round_trip`` among them; ``unit`` names them in the warning. The result
    of :func:`~tfidf_tune.tasks._prompts.prompt_settings` is added to each.
    """
    if num_lost := sum(not row["round_trip"] for row in rows):
        bos = "without add_bos_token=False in --model_args the tokenizer may add a BOS to each; "
        logger.warning(
            "%d of %d %s change as text, the model sees different token ids: %s`tfidf-tune eval` or a tokenizer of "
            "`tfidf-tune tasks --token-ids-tokenizer` sends ids instead",
            num_lost, len(rows), unit, "" if settings["add_bos_token"] is False else bos,
        )  # fmt: skip
    return {"test": Dataset.from_list([{**row, **settings} for row in rows])}


def on_base_model(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Replace an adapter's folder as ``pretrained`` by its base model, with ``peft`` and ``tokenizer`` of the folder.

    Other arguments of the harness's ``hf`` model, and those that name ``peft`` already, are returned unchanged.
    """
    arguments = dict(model_args)
    pretrained = arguments.get("pretrained")
    if not isinstance(pretrained, str) or arguments.get("peft"):
        return arguments
    folder = Path(pretrained).expanduser()
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return arguments
    base, revision = adapter_base(folder, f"name it by --model_args pretrained=BASE,peft={folder}")
    if any(folder.glob("tokenizer*")):
        arguments.setdefault("tokenizer", str(folder))
    if revision is not None:
        arguments.setdefault("revision", revision)
    return arguments | {"pretrained": base, "peft": str(folder)}


def num_positions(metadata: Mapping[str, Any]) -> int | None:
    """Return how many positions the model ``pretrained`` has; None if that is not known."""
    if not metadata.get("pretrained"):
        return None
    metadata = on_base_model(metadata)
    more = {"revision": metadata.get("revision") or "main", "trust_remote_code": metadata.get("trust_remote_code")}
    config = AutoConfig.from_pretrained(str(metadata["pretrained"]), **more)
    return getattr(config, "max_position_embeddings", None)


def check_length(metadata: Mapping[str, Any], num_tokens: int, shorten: str) -> None:
    """Raise a ``ValueError`` if the model ``pretrained`` has fewer positions than the longest sequence has tokens.

    The harness would truncate prompts at their start. ``shorten`` names the settings to lower.
    """
    positions = num_positions(metadata)
    if positions is not None and num_tokens > positions:
        raise ValueError(
            f"sequences of {num_tokens} tokens exceed the model's {positions} positions: lower {shorten} by "
            f"{num_tokens - positions} or more"
        )
