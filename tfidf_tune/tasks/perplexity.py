"""``tfidf_wikitext2_ppl``: token-level perplexity on blocks of text that training did not see.

Section "Perplexity" of the paper: WikiText-2 validation, tokenized and cut into blocks of 256 that do not overlap, 255
predictions in each::

    PPL = exp( 1/|D| · sum over t in D of -ln P(x_t | x_<t) )

Blocks know nothing of each other and no BOS opens them. The harness's own ``wikitext`` task gives the perplexity of a
word, over whole pages: another quantity.
"""

import math
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from tfidf_tune.data import load_documents, text_blocks
from tfidf_tune.tasks._prompts import prompt_settings, prompts_of, warn_of_losses
from tfidf_tune.tasks._task import check_length, setting, test_split


def documents(
    *,
    wikitext2_source: str = "Salesforce/wikitext",
    wikitext2_name: str | None = "wikitext-2-v1",
    wikitext2_split: str = "validation",
    wikitext2_column: str = "text",
    block_size: int = 256,
    num_blocks: int | None = None,
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make a document of each block.

    Args:
        wikitext2_source (str): a hub id, a local file or ``embedded``, see :func:`load_documents`.
        wikitext2_name (str | None): configuration of a hub data set.
        wikitext2_split (str): split of a hub data set or of ``embedded``.
        wikitext2_column (str): the column that holds the text.
        block_size (int): tokens in a block.
        num_blocks (int | None): the first so many alone. Default: None, all.
        **metadata (Any): the model's arguments and other settings, see :func:`prompt_settings`.

    Returns:
        dict[str, Dataset]: the split ``test``.

    Raises:
        FileNotFoundError: If the source looks like a path and nothing is there.
        ValueError: If the source cannot be read or has not one block, a setting is out of range, or the
            model has too few positions.
    """
    block_size = setting("block_size", block_size, 2)
    if num_blocks is not None:
        setting("num_blocks", num_blocks, 1)
    settings = prompt_settings(metadata)
    check_length(metadata, block_size, "block_size")
    prompts = prompts_of(settings)
    texts = load_documents(wikitext2_source, name=wikitext2_name, split=wikitext2_split, column=wikitext2_column)
    blocks = text_blocks(prompts.tokenizer, texts, block_size=block_size, num_blocks=num_blocks)
    if not len(blocks):
        raise ValueError(
            f"{wikitext2_source!r} has not one block of {block_size} tokens: name more text by wikitext2_source, or "
            "lower block_size"
        )
    rows = []
    for index, ids in enumerate(blocks.tolist()):
        text = prompts.scored_text(ids)
        rows.append(
            {
                "block": index,
                "request": text.context,
                "continuation": text.continuation,
                "num_predictions": text.num_predictions,
                "round_trip": text.exact,
                **settings,
            }
        )
    # As text a block may be more tokens.
    check_length(metadata, max(row["num_predictions"] for row in rows), "block_size")
    warn_of_losses(sum(not row["round_trip"] for row in rows), len(rows), "blocks", settings)
    return test_split(rows)


def doc_to_text(doc: dict[str, Any]) -> str:
    """Give the context."""
    return str(doc["request"])


def doc_to_target(doc: dict[str, Any]) -> str:
    """Give what is predicted."""
    return str(doc["continuation"])


def process_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, Any]:
    """Take the log-likelihood of a block, and keep it in the document for the log.

    Args:
        doc (dict[str, Any]): of :func:`documents`; gets the key ``log_likelihood``.
        results (list[tuple[float, bool]]): natural logarithm of the block's probability; whether greedy.

    Returns:
        dict[str, Any]: the metrics.
    """
    doc["log_likelihood"] = results[0][0]
    return {
        "token_perplexity": (doc["log_likelihood"], doc["num_predictions"]),
        "round_trip": float(doc["round_trip"]),
    }


def perplexity(values: Sequence[tuple[float, int]]) -> float:
    """Pool blocks.

    Args:
        values (Sequence[tuple[float, int]]): log-likelihood and number of predictions of each block.

    Returns:
        float: the perplexity of a token; ``inf`` where it exceeds what a float holds.
    """
    loss = -sum(log_likelihood for log_likelihood, _ in values) / sum(num for _, num in values)
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
