"""What the tasks have in common."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.task import TaskConfig
from transformers import AutoConfig

_TASK_KEYS = {field.name for field in dataclasses.fields(TaskConfig)}


class PromptTask(ConfigurableTask):  # type: ignore[misc]
    """A task of the harness whose documents say what is sent and how many tokens are generated.

    The request is the document's ``request`` as it stands, whatever system instruction or chat template the harness was
    given: training saw none. ``max_new_tokens``, a setting of the task, takes the place of ``max_gen_toks``.

    Args:
        config (dict[str, Any]): the task's YAML file and metadata.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key in _TASK_KEYS})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Instance:
        """Make the request of a document."""
        kwargs.pop("apply_chat_template", None)
        kwargs.pop("chat_template", None)
        if self.OUTPUT_TYPE == "loglikelihood":
            arguments: tuple[Any, ...] = (doc["request"], doc["continuation"])
        else:
            arguments = (doc["request"], {**self.config.generation_kwargs, "max_gen_toks": doc["max_new_tokens"]})
        return Instance(request_type=self.OUTPUT_TYPE, doc=doc, arguments=arguments, idx=0, **kwargs)


def test_split(rows: Iterable[dict[str, Any]]) -> dict[str, Dataset]:
    """Put rows into the form that the harness takes from ``custom_dataset``.

    Args:
        rows (Iterable[dict[str, Any]]): documents, at least one, all with the same keys.

    Returns:
        dict[str, Dataset]: the documents as the split ``test``.
    """
    return {"test": Dataset.from_list(list(rows))}


def check_length(metadata: Mapping[str, Any], num_tokens: int, shorten: str) -> None:
    """Refuse sequences that the model cannot take; the harness would cut prompts at their start.

    Args:
        metadata (Mapping[str, Any]): the harness's; ``pretrained`` names the model, without it nothing is known.
        num_tokens (int): the longest sequence, what is generated included.
        shorten (str): the settings that decide on it.

    Raises:
        ValueError: If the model has fewer positions.
    """
    if not metadata.get("pretrained"):
        return
    config = AutoConfig.from_pretrained(
        str(metadata["pretrained"]),
        revision=metadata.get("revision") or "main",
        trust_remote_code=metadata.get("trust_remote_code"),
    )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and num_tokens > positions:
        raise ValueError(
            f"sequences of {num_tokens} tokens exceed the model's {positions} positions: lower {shorten} by "
            f"{num_tokens - positions} or more"
        )


def setting(name: str, value: Any, least: int) -> int:
    """Read a whole number from ``--metadata``.

    Args:
        name (str): its key.
        value (Any): its value.
        least (int): the least that makes sense.

    Returns:
        int: the number.

    Raises:
        ValueError: If it is no whole number or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return value
