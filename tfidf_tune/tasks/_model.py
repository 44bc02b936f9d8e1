"""The harness's Hugging Face model with prompts of token ids in addition to prompts of text."""

import importlib.util
import json
import warnings
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm
from transformers import GenerationConfig

from tfidf_tune.analysis import TokenLikelihoods, greedy_continuations, require_known_ids, token_likelihoods
from tfidf_tune.tasks._adapters import on_base_model
from tfidf_tune.tasks._token_ids import is_token_ids_request, parse_token_ids

_DEFAULT_BATCH_SIZE = 64


def _nf4() -> Any:
    """Return the settings of 4-bit weights (NF4), or raise a ``ValueError`` without bitsandbytes."""
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("load_in_4bit needs bitsandbytes: pip install 'tfidf-tune[bitsandbytes]'")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


class ScoredTokens(tuple[float, bool]):
    """The harness's pair of log-likelihood and whether greedy decoding gives the same, with those of each token."""

    tokens: TokenLikelihoods

    def __new__(cls, tokens: TokenLikelihoods) -> "ScoredTokens":
        """Make the pair."""
        pair = super().__new__(cls, (-float(tokens.nll.sum()), bool(tokens.greedy.all())))
        pair.tokens = tokens
        return pair


class TokenExactHFLM(HFLM):  # type: ignore[misc]
    """``--model tfidf-hf``: takes the arguments of ``--model hf``; ``pretrained`` may also be a PEFT adapter folder.

    A request of token ids is passed to the model unchanged, and is continued as by :func:`tfidf_tune.analysis.probe`:
    greedily, only by the logits, prompts of one length at a time, so that no padding changes a result. If its document
    has ``generation``, it is continued by ``model.generate``, without the model's ``generation_config``, one prompt at
    a time; samples are seeded by the prompt. The harness handles all other requests.

    More differences from ``hf``: ``load_in_4bit`` loads NF4 weights by bitsandbytes, log-probabilities are in float32
    whatever the model's dtype, and the embedding of a model with a padded vocabulary is kept when an adapter is loaded.
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
        if kwargs.pop("load_in_4bit", False):  # transformers 5 takes it in a config only
            kwargs["quantization_config"] = _nf4()
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

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations; those of token ids whose document asks for ``score_tokens`` token by token."""
        by_token = {
            index
            for index, request in enumerate(requests)
            if is_token_ids_request(request.args[0]) and (request.doc or {}).get("score_tokens")
        }
        sums = [request for index, request in enumerate(requests) if index not in by_token]
        summed = iter(super().loglikelihood(sums, disable_tqdm) if sums else ())
        scored = iter(self._score_tokens([requests[index] for index in sorted(by_token)], disable_tqdm))
        return [next(scored if index in by_token else summed) for index in range(len(requests))]

    def _score_tokens(self, requests: Sequence[Instance], disable_tqdm: bool) -> list[ScoredTokens]:
        pairs = [self._encode_pair(*request.args) for request in requests]
        with tqdm(total=len(pairs), disable=disable_tqdm or self.rank != 0, desc="Scoring token ids") as bar:
            texts = [given + continuation for given, continuation in pairs]
            scored = token_likelihoods(self.model, texts, batch_size=self._num_together, progress=bar.update)
        return [ScoredTokens(tokens.after(len(given) - 1)) for (given, _), tokens in zip(pairs, scored, strict=True)]

    @property
    def _num_together(self) -> int:
        return self.batch_size if isinstance(self.batch_size, int) else _DEFAULT_BATCH_SIZE

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts of ids or text; the continuation of a prompt of ids is numbers, without EOS."""
        handlers = [super().generate_until, self._continue_ids, self._generate_ids]
        kinds = [
            (1 + bool((request.doc or {}).get("generation"))) * is_token_ids_request(request.args[0])
            for request in requests
        ]
        responses = []
        for kind, handle in enumerate(handlers):
            own = [request for request, of in zip(requests, kinds, strict=True) if of == kind]
            responses.append(iter(handle(own, disable_tqdm) if own else ()))
        return [next(responses[kind]) for kind in kinds]

    def _continue_ids(self, requests: Sequence[Instance], disable_tqdm: bool) -> list[str]:
        by_length: dict[tuple[int, int], list[tuple[int, list[int]]]] = defaultdict(list)
        for index, request in enumerate(requests):
            prompt, arguments = request.args
            kwargs = normalize_gen_kwargs(arguments)
            if kwargs["do_sample"]:
                raise ValueError(
                    f"prompts of token ids are continued greedily, but --gen_kwargs ask for sampling: {arguments}. "
                    "Leave out do_sample and temperature, give --metadata num_samples=..., or use --model hf"
                )
            ids, num_tokens = parse_token_ids(prompt), int(kwargs["max_gen_toks"])
            self._check(ids, num_new=num_tokens)
            by_length[len(ids), num_tokens].append((index, ids))
        batch_size = self._num_together
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

    def _generate_ids(self, requests: Sequence[Instance], disable_tqdm: bool) -> list[str]:
        same: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            same[json.dumps(request.args)].append(index)
        responses = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Continuing token ids") as bar:
            for indices in same.values():
                prompt, arguments = requests[indices[0]].args
                for index, ids in zip(indices, self._generated(prompt, arguments, len(indices)), strict=True):
                    responses[index] = " ".join(map(str, ids))
                bar.update(len(indices))
        return responses

    def _generated(self, prompt: str, arguments: dict[str, Any], number: int) -> list[list[int]]:
        """Return samples of one prompt, or the best beam, each without EOS and what follows it."""
        kwargs = normalize_gen_kwargs(arguments)
        ids, num_tokens, eos = parse_token_ids(prompt), int(kwargs["max_gen_toks"]), self.eot_token_id
        self._check(ids, num_new=num_tokens)
        sampled = {"temperature", "top_k"} if kwargs["do_sample"] else set()
        config = GenerationConfig(
            **{name: kwargs[name] for name in {"do_sample", "num_beams"} | sampled if name in kwargs},
            max_new_tokens=num_tokens,
            eos_token_id=eos,
            pad_token_id=0 if eos is None else eos,
        )
        input_ids = torch.tensor([ids], device=self.device)
        rows: list[list[int]] = []
        # generate completes any config that it is given by the model's own.
        # Under an adapter, too, it is that of the model itself.
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        own, model.generation_config = model.generation_config, config
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), torch.no_grad():
                torch.manual_seed(zlib.crc32(prompt.encode()))
                while len(rows) < number:
                    together = min(self._num_together, number - len(rows)) if sampled else 1
                    made = self.model.generate(
                        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), num_return_sequences=together
                    )
                    rows += made[:, len(ids) :].tolist()
        finally:
            model.generation_config = own
        return [row[: row.index(eos)] if eos in row else row for row in rows]

    def _check(self, ids: list[int], num_new: int) -> None:
        require_known_ids(self.model, np.asarray(ids))
        if len(ids) + num_new > self.max_length:
            raise ValueError(
                f"a prompt and its continuation are {len(ids) + num_new} tokens together, more than the model's "
                f"{self.max_length}: shorten the prompts or generate less; see the settings of the task"
            )
