"""The harness's Hugging Face model with prompts of token ids in addition to prompts of text."""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from tfidf_tune.analysis import greedy_continuations, require_known_ids
from tfidf_tune.tasks._adapters import on_base_model
from tfidf_tune.tasks._token_ids import is_token_ids_request, parse_token_ids

_DEFAULT_BATCH_SIZE = 64


class TokenExactHFLM(HFLM):  # type: ignore[misc]
    """``--model tfidf-hf``: takes the arguments of ``--model hf``; ``pretrained`` may also be a PEFT adapter folder.

    A request of token ids is passed to the model unchanged, and is continued as by :func:`tfidf_tune.analysis.probe`:
    greedily, only by the logits, prompts of one length at a time, so that no padding changes a result. The harness
    handles all other requests.

    Two more differences from ``hf``: log-probabilities are in float32 whatever the model's dtype, and the embedding of
    a model with a padded vocabulary is kept when an adapter is loaded.
    """

    _model: Any

    def __init__(self, pretrained: Any, *args: Any, softmax_dtype: str = "float32", **kwargs: Any) -> None:
        arguments = on_base_model({"pretrained": pretrained, **kwargs})
        super().__init__(arguments.pop("pretrained"), *args, softmax_dtype=softmax_dtype, **arguments)

    def _create_model(
        self, pretrained: str, revision: str | None = "main", peft: str | None = None, **kwargs: Any
    ) -> None:
        if peft and kwargs.get("delta"):
            raise ValueError("peft and delta cannot be used together: leave out one of them")
        super()._create_model(pretrained, revision=revision, peft=None, **kwargs)
        if not peft:
            return
        from peft import PeftModel

        if len(self.tokenizer) > self._model.get_input_embeddings().weight.shape[0]:
            self._model.resize_token_embeddings(len(self.tokenizer))
        with warnings.catch_warnings():
            # PEFT 0.18 reads an attribute that transformers 5 has renamed.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            self._model = PeftModel.from_pretrained(self._model, peft, revision=revision)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if is_token_ids_request(context):
            ids = parse_token_ids(context), parse_token_ids(continuation)
            self._check(ids[0] + ids[1], num_new=0)
            return ids
        encoded: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
        return encoded

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts of ids or text; the continuation of a prompt of ids is numbers, without EOS."""
        exact = {index for index, request in enumerate(requests) if is_token_ids_request(request.args[0])}
        texts = [request for index, request in enumerate(requests) if index not in exact]
        text_responses = iter(super().generate_until(texts, disable_tqdm) if texts else ())
        id_responses = iter(self._continue_ids([requests[index] for index in sorted(exact)], disable_tqdm))
        return [next(id_responses if index in exact else text_responses) for index in range(len(requests))]

    def _continue_ids(self, requests: Sequence[Instance], disable_tqdm: bool) -> list[str]:
        by_length: dict[tuple[int, int], list[tuple[int, list[int]]]] = defaultdict(list)
        for index, request in enumerate(requests):
            prompt, arguments = request.args
            kwargs = normalize_gen_kwargs(arguments)
            if kwargs["do_sample"]:
                raise ValueError(
                    f"prompts of token ids are continued greedily, but --gen_kwargs ask for sampling: {arguments}. "
                    "Leave out do_sample and temperature, or use --model hf"
                )
            ids, num_tokens = parse_token_ids(prompt), int(kwargs["max_gen_toks"])
            self._check(ids, num_new=num_tokens)
            by_length[len(ids), num_tokens].append((index, ids))
        batch_size = self.batch_size if isinstance(self.batch_size, int) else _DEFAULT_BATCH_SIZE
        responses = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Continuing token ids") as bar:
            # The longest first, so that too little memory is noticed immediately.
            for (_, num_tokens), prompts in sorted(by_length.items(), reverse=True):
                for first in range(0, len(prompts), batch_size):
                    indices, batch = zip(*prompts[first : first + batch_size], strict=True)
                    continuations = greedy_continuations(self.model, batch, num_tokens, eos_id=self.eot_token_id)
                    for index, ids in zip(indices, continuations, strict=True):
                        responses[index] = " ".join(map(str, ids))
                    bar.update(len(batch))
        return responses

    def _check(self, ids: list[int], num_new: int) -> None:
        require_known_ids(self.model, np.asarray(ids))
        if len(ids) + num_new > self.max_length:
            raise ValueError(
                f"a prompt and its continuation are {len(ids) + num_new} tokens together, more than the model's "
                f"{self.max_length}: shorten the prompts or generate less; see the settings of the task"
            )
