"""``bos``: whether BOS is before each prompt, passage and block of token ids that a model gets.

Some models saw BOS at the start of every sequence and predict little without it, Gemma for example.
Others were trained on blocks that have none. Asked in the other way, a model recites less than it
knows.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from tfidf_tune._files import digest
from tfidf_tune.data import load_documents, text_blocks
from tfidf_tune.passages import Passage, read_probe_file
from tfidf_tune.probe.likelihoods import NUM_TEXTS_FOR_BOS, is_mean_positive
from tfidf_tune.tasks._kept import kept
from tfidf_tune.tasks._requests import TokenIdPrompts, token_ids_request
from tfidf_tune.tasks.memorization import PROBE_FILE_VARIABLE
from tfidf_tune.tasks.settings import prompts_for

_MOST_TOKENS = 128

_logger = logging.getLogger(__name__)


def settle_bos(metadata: Mapping[str, Any], load: Callable[[], LM]) -> dict[str, Any]:
    """Return a task's metadata with ``bos`` decided.

    If neither the settings nor the run nor the tokenizer say whether the model was trained with
    BOS, it is measured: texts that the model did not see are scored with and without BOS. Prompts
    of text are left to the tokenizer of the harness or of the server.

    Args:
        metadata (Mapping[str, Any]): of the harness: the model's arguments and the settings of the
            tasks.
        load (Callable[[], LM]): loads the model; called only if BOS has to be measured.
    """
    prompts = prompts_for(metadata)
    bos_id = prompts.tokenizer.bos_id
    is_decided = prompts.settings["bos"] is not None
    if is_decided or prompts.settings["prompts"] == "text" or bos_id is None:
        return dict(metadata)
    texts = _unseen_texts(metadata, prompts)
    return {**metadata, "bos": is_likelier_after_bos(load(), bos_id, texts)}


def is_likelier_after_bos(model: LM, bos_id: int, texts: list[list[int]]) -> bool:
    """Return whether BOS lowers the NLL of texts: the 95 % interval of the mean paired difference
    is above 0.

    The first token of a text is given, and the mean NLL of the others is compared.
    """
    # Each text twice, without BOS and with it.
    requests = []
    for number, ids in enumerate(texts):
        doc = {"passage_id": f"{number} of the texts scored with and without BOS"}
        continuation = " " + " ".join(map(str, ids[1:]))
        for given in ([ids[0]], [bos_id, ids[0]]):
            request = Instance(
                request_type="loglikelihood",
                doc=doc,
                arguments=(token_ids_request(given), continuation),
                idx=0,
            )
            requests.append(request)
    try:
        likelihoods = np.array([answer[0] for answer in model.loglikelihood(requests)])
    except ConnectionRefusedError as error:  # a server that scores nothing
        # What is wrong with its answer, without what to do about requests that have to work.
        reason = error.__cause__ if type(error.__cause__) is ValueError else error
        _logger.warning(
            "it is unknown if the model was trained with BOS, because the server scores no texts "
            "(%s), and it gets none: --bos true of an audit, --metadata bos=true of an evaluation, "
            "adds it",
            reason,
        )
        return False
    without_bos = likelihoods[::2]
    with_bos = likelihoods[1::2]
    num_predicted = np.array([len(ids) - 1 for ids in texts])
    gains = (with_bos - without_bos) / num_predicted
    _logger.info("BOS lowers the NLL of %d texts by %.3f nats a token", len(texts), gains.mean())
    return is_mean_positive(gains)


def _unseen_texts(metadata: Mapping[str, Any], prompts: TokenIdPrompts) -> list[list[int]]:
    """Return texts that training did not see: the controls of the probe file, else the embedded
    text.
    """
    file = metadata.get("probe_file") or os.environ.get(PROBE_FILE_VARIABLE)
    passages: list[Passage] = []
    if file:
        passages = kept(digest(["passages", str(file)]), partial(read_probe_file, file))
    # BOS takes a position too.
    size = _MOST_TOKENS
    if prompts.positions:
        size = min(size, prompts.positions - 1)
    texts = []
    for passage in passages:
        ids = passage.token_ids[:size]
        if passage.kind == "control" and ids[0] != prompts.tokenizer.bos_id and len(ids) > 1:
            texts.append(ids)
    if len(texts) < 2:  # an interval takes two
        texts = text_blocks(
            prompts.tokenizer,
            load_documents("embedded"),
            block_size=size,
            num_blocks=NUM_TEXTS_FOR_BOS,
        ).tolist()
    return texts[:NUM_TEXTS_FOR_BOS]
