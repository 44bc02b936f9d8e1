"""The class of all tasks, and the form of their documents."""

import logging
from dataclasses import fields
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.task import TaskConfig

from tfidf_tune.tasks._requests import TokenIdPrompts

_TASK_KEYS = {field.name for field in fields(TaskConfig)}

logger = logging.getLogger(__name__)


class PromptTask(ConfigurableTask):  # type: ignore[misc]
    """A task of the harness whose documents hold the request and the number of tokens to generate.

    The request is sent unchanged, without the harness's system instruction or chat template,
    because training saw none. The document's ``max_new_tokens`` replaces ``max_gen_toks``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key in _TASK_KEYS})

    def construct_requests(self, doc: dict[str, Any], ctx: str, **options: Any) -> list[Instance]:
        """Make the request of a document, as often as its ``generation`` asks for samples."""
        generation = dict(doc.get("generation") or {})
        number = generation.pop("num_samples", 1)
        arguments: Any = (doc["request"], doc.get("continuation"))
        if self.OUTPUT_TYPE == "generate_until":
            settings = self.config.generation_kwargs | generation
            settings["max_gen_toks"] = doc["max_new_tokens"]
            arguments = (doc["request"], settings)
        # Options of the harness name the task and the document; the request has no template.
        named = {name: value for name, value in options.items() if "chat_template" not in name}
        return [
            Instance(self.OUTPUT_TYPE, doc, arguments, index, **named) for index in range(number)
        ]


def task_documents(
    rows: list[dict[str, Any]], unit: str, prompts: TokenIdPrompts
) -> dict[str, Dataset]:
    """Return documents in the form of the harness's ``custom_dataset``, and warn if text prompts
    change token ids.

    At least one row, all with the same keys, ``round_trip`` among them; ``unit`` names them in the
    warning.
    """
    changed = [row for row in rows if not row["round_trip"]]
    if changed:
        logger.warning(
            "%d of %d %s change as text: %s", len(changed), len(rows), unit, prompts.advice
        )
    if prompts.settings["prompts"] != "text" and prompts.settings["bos"] is None:
        measured = ", or use `tfidf-tune eval` without --model, which measures it"
        logger.warning(
            "it is unknown if the model was trained with BOS before each text, and it gets none: "
            "give --metadata bos=true or bos=false%s",
            "" if prompts.is_served else measured,
        )
    shared = {"vocab_size": prompts.tokenizer.vocab_size} | prompts.settings
    return {"test": Dataset.from_list([row | shared for row in rows])}
