"""``tfidf_wikitext2_ppl`` and ``tfidf_other_ppl``: token-level perplexity on blocks of text that is
not trained on.

Section "Perplexity" of the paper: WikiText-2 validation, tokenized and cut into blocks of 256
without overlap, 255 predictions each::

    PPL = exp( 1/|D| · sum over t in D of -ln P(x_t | x_<t) )

Blocks are independent, and have BOS in front only if the model was trained with it, see ``bos``.
The harness's own ``wikitext`` task computes the perplexity of a word, over complete pages, which is
a different quantity.
"""

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset

from tfidf_tune._checks import check_at_least
from tfidf_tune._files import digest
from tfidf_tune._tokenizer import TextTokenizer, TokenArray, tokenizer_identity
from tfidf_tune.data import TextSource, load_documents, text_blocks
from tfidf_tune.data.text import without_shared_text
from tfidf_tune.tasks._kept import kept
from tfidf_tune.tasks._task import task_documents
from tfidf_tune.tasks.settings import prompts_for

logger = logging.getLogger(__name__)


def documents(
    *,
    wikitext2_source: str = "Salesforce/wikitext",
    wikitext2_name: str | None = "wikitext-2-v1",
    wikitext2_split: str = "validation",
    wikitext2_column: str = "text",
    block_size: int = 256,
    num_blocks: int | None = None,
    train_source: str | None = None,
    train_name: str | None = None,
    train_split: str = "train",
    train_column: str = "text",
    shared_tokens: int = 20,
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make a document of each block; ``docs/evaluation.md`` describes the settings.

    Blocks that have ``shared_tokens`` consecutive tokens in common with ``train_source`` are left
    out.
    """
    check_at_least(2, block_size=block_size, shared_tokens=shared_tokens)
    if num_blocks is not None:
        check_at_least(1, num_blocks=num_blocks)
    if train_source is not None and shared_tokens > block_size:
        raise ValueError(
            f"shared_tokens is {shared_tokens}, more than block_size {block_size}: lower it"
        )
    prompts = prompts_for(metadata)
    prompts.check_length(block_size + len(prompts.bos_ids), "block_size")
    source = TextSource(wikitext2_source, wikitext2_name, wikitext2_split, wikitext2_column)
    trained = None
    if train_source is not None:
        trained = TextSource(train_source, train_name, train_split, train_column)
    sizes = (block_size, num_blocks, shared_tokens)
    key = digest(["blocks", tokenizer_identity(prompts.tokenizer), source, trained, sizes])
    blocks = kept(key, partial(_blocks, prompts.tokenizer, source, trained, *sizes))
    rows = []
    for index, ids in enumerate(blocks.tolist()):
        rows.append({"block": index} | prompts.scored_text(ids))
    # As text a block can have more tokens.
    prompts.check_length(max(row["num_predictions"] for row in rows), "block_size")
    return task_documents(rows, "blocks", prompts)


def _blocks(
    tokenizer: TextTokenizer,
    source: TextSource,
    trained: TextSource | None,
    block_size: int,
    num_blocks: int | None,
    shared_tokens: int,
) -> TokenArray:
    """Return the blocks of a text, int32 ``[num_blocks, block_size]``, without those that share
    text with another.
    """
    texts = load_documents(
        source.source, name=source.name, split=source.split, column=source.column
    )
    # Which blocks are left out is not known before all have been read.
    read = num_blocks if trained is None else None
    blocks = text_blocks(tokenizer, texts, block_size=block_size, num_blocks=read)
    if not len(blocks):
        raise ValueError(
            f"{source.source!r} has fewer than {block_size} tokens: name more or lower block_size"
        )
    if trained is None:
        return blocks
    unseen = without_shared_text(tokenizer, blocks, shared_tokens, trained)
    logger.info(
        "%d of %d blocks share text with %r", len(blocks) - len(unseen), len(blocks), trained.source
    )
    if not len(unseen):
        raise ValueError(
            f"every block of {source.source!r} shares {shared_tokens} tokens in a row with "
            f"{trained.source!r}: raise shared_tokens"
        )
    return unseen[:num_blocks]


def other_documents(
    *,
    other_source: str | None = None,
    other_name: str | None = None,
    other_split: str = "validation",
    other_column: str = "text",
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make a document of each block of another text; the further settings are those of
    :func:`documents`.
    """
    if other_source is None:
        raise ValueError(
            "tfidf_other_ppl needs other_source: a hub id, 'embedded' or a file with text that is "
            "unseen"
        )
    shared = {key: value for key, value in metadata.items() if not key.startswith("wikitext2_")}
    return documents(
        wikitext2_source=other_source,
        wikitext2_name=other_name,
        wikitext2_split=other_split,
        wikitext2_column=other_column,
        **shared,
    )


def process_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, Any]:
    """Add a block's ``log_likelihood``, a natural logarithm, to its document for the log, and
    return the metrics.
    """
    doc["log_likelihood"] = results[0][0]
    return {
        "token_perplexity": (doc["log_likelihood"], doc["num_predictions"]),
        "round_trip": float(doc["round_trip"]),
    }


def perplexity(values: Sequence[tuple[float, int]]) -> float:
    """Return the token perplexity of blocks, each a log-likelihood and a number of predictions.

    It is ``inf`` if it is too large for a float, or if a log-likelihood is NaN: the model has
    diverged.
    """
    log_likelihood = sum(log_likelihood for log_likelihood, _ in values)
    num_predictions = sum(number for _, number in values)
    loss = -log_likelihood / num_predictions
    if math.isnan(loss):
        return math.inf
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
