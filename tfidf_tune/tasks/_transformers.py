"""The Hugging Face model of the harness, with requests of token ids."""

import zlib
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import BitsAndBytesConfig

from tfidf_tune.probe import TokenLikelihoods, greedy_continuations, token_likelihoods
from tfidf_tune.probe.decoding import continue_prompts, generated_continuations
from tfidf_tune.probe.finite import NonFiniteLogits
from tfidf_tune.probe.loading import (
    complete_model,
    on_base_model,
    readable,
    require_known_ids,
    with_adapter,
)
from tfidf_tune.tasks._requests import token_ids_request
from tfidf_tune.tasks._token_ids_lm import Asked, TokenIdRequests


def _advance(bar: tqdm, num_before: int, num_done: int, _: int) -> None:
    """Move a bar on to what was done before and what was done since."""
    bar.update(num_before + num_done - bar.n)


class TokenExactHFLM(TokenIdRequests, HFLM):  # type: ignore[misc]
    """``--model tfidf-hf``: takes the arguments of ``--model hf``; ``pretrained`` may also be a
    PEFT adapter folder.

    A request of token ids is passed to the model unchanged, and is continued greedily, only by the
    logits, prompts of one length at a time, so that no padding changes a result. If its document
    has ``generation``, it is continued by ``model.generate``, without the model's
    ``generation_config``, one prompt at a time; samples are seeded by the prompt. The harness
    handles all other requests.

    More differences from ``hf``: ``load_in_4bit`` loads NF4 weights by bitsandbytes,
    log-probabilities are in float32 whatever the model's dtype, and the embedding of a model with a
    padded vocabulary is kept when an adapter is loaded.
    """

    _model: Any
    AUTO_MODEL_CLASS: Any

    def __init__(
        self, pretrained: Any, *args: Any, softmax_dtype: str = "float32", **kwargs: Any
    ) -> None:
        arguments = on_base_model({"pretrained": pretrained, **kwargs})
        adapter = arguments.pop("peft", None)
        if adapter and arguments.get("delta"):
            raise ValueError("peft and delta cannot be used together: leave out one of them")
        super().__init__(
            arguments.pop("pretrained"), *args, softmax_dtype=softmax_dtype, **arguments
        )
        if adapter:
            # Only now: the harness ties the head to the embedding again, which would undo an
            # adapter's own embedding, and it shrinks a padded embedding to the tokenizer's size.
            self._model = with_adapter(
                self._model, adapter, least_rows=len(self.tokenizer), revision=self.revision
            )
            self.peft = adapter

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        if kwargs.pop("load_in_4bit", False):  # transformers 5 takes it in a config only
            if find_spec("bitsandbytes") is None:
                raise ValueError(
                    "load_in_4bit needs bitsandbytes: pip install 'tfidf-tune[bitsandbytes]'"
                )
            kwargs["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        # The harness only loads by this attribute; otherwise it compares it with classes of
        # transformers.
        auto_class = self.AUTO_MODEL_CLASS
        self.AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=partial(complete_model, auto_class))
        try:
            with readable(pretrained):
                super()._create_model(pretrained, **kwargs)
        finally:
            self.AUTO_MODEL_CLASS = auto_class

    def check_ids(self, ids: Sequence[int], num_new: int) -> None:
        """Refuse prompts that are too long, and ids that the embedding does not have."""
        require_known_ids(self.model, ids)
        super().check_ids(ids, num_new)

    @property
    def _num_together(self) -> int:
        return self.batch_size if isinstance(self.batch_size, int) else 64  # "auto"

    def score_ids(
        self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool
    ) -> list[TokenLikelihoods]:
        """Score complete texts, and leave out what was given."""
        is_silent = disable_tqdm or self.rank != 0
        texts = [given + scored for given, scored in pairs]
        with tqdm(total=len(pairs), disable=is_silent, desc="Scoring token ids") as bar:
            likelihoods = token_likelihoods(
                self.model, texts, batch_size=self._num_together, progress=bar.update
            )
        scores = []
        for (given, _), tokens in zip(pairs, likelihoods, strict=True):
            start = len(given) - 1  # the first token of a text has no likelihood
            standardized = tokens.standardized
            if standardized is not None:
                standardized = standardized[start:]
            greedy = tokens.greedy
            if greedy is not None:
                greedy = greedy[start:]
            scores.append(TokenLikelihoods(tokens.nll[start:], standardized, greedy))
        return scores

    def continue_ids(self, asked: Sequence[Asked], disable_tqdm: bool) -> list[list[list[int]]]:
        """Continue prompts greedily in batches; sample, and search with beams, one prompt at a
        time.
        """
        is_silent = disable_tqdm or self.rank != 0
        total = sum(request.number for request in asked)
        # Prompts that end by the same id are continued together.
        greedy: dict[int | None, list[int]] = {}
        for i, request in enumerate(asked):
            indices = greedy.setdefault(request.eos_id, [])
            if not request.generation:
                indices.append(i)
        rows: dict[int, list[list[int]]] = {}
        with tqdm(total=total, disable=is_silent, desc="Continuing token ids") as bar:
            for eos_id, indices in greedy.items():
                try:
                    made = continue_prompts(
                        partial(greedy_continuations, self.model, eos_id=eos_id),
                        [asked[i].ids for i in indices],
                        [asked[i].num_tokens for i in indices],
                        batch_size=self._num_together,
                        # Batches of one length each, so that a result does not depend on the other
                        # prompts.
                        most_apart=0,
                        progress=partial(_advance, bar, bar.n),
                    )
                except NonFiniteLogits as error:
                    raise NonFiniteLogits(indices[error.index], error.dtype) from error
                for i, ids in zip(indices, made, strict=True):
                    rows[i] = [ids]
            for i, request in enumerate(asked):
                if not request.generation:
                    continue
                try:
                    rows[i] = generated_continuations(
                        self.model,
                        request.ids,
                        request.num_tokens,
                        request.generation,
                        request.number,
                        batch_size=self._num_together,
                        eos_id=request.eos_id,
                        seed=zlib.crc32(token_ids_request(request.ids).encode()),
                    )
                except NonFiniteLogits as error:
                    raise NonFiniteLogits(i, error.dtype) from error
                bar.update(request.number)
        return [rows[i] for i in range(len(asked))]
