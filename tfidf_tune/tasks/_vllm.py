"""vLLM within this process as a model of the harness, with prompts of token ids."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.models.vllm_causallms import VLLM
from vllm import SamplingParams
from vllm.platforms import current_platform

from tfidf_tune.analysis import TokenLikelihoods
from tfidf_tune.tasks._adapters import on_base_model
from tfidf_tune.tasks._model import ScoredTokens
from tfidf_tune.tasks._token_ids import is_token_ids_request, parse_token_ids

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA, which vLLM allows as the largest


class TokenExactVLLM(VLLM):  # type: ignore[misc]
    """``--model tfidf-vllm``: takes the arguments of ``--model vllm``, and ``peft`` for a LoRA adapter.

    ``pretrained`` may also be the folder of an adapter. Requests of token ids are passed to vLLM as they are, and
    answered as by ``tfidf-hf``: until the tokenizer's EOS, by the logits only unless samples are asked for. The
    harness handles all other requests.
    """

    def __init__(self, pretrained: str, **kwargs: Any) -> None:
        arguments = on_base_model({"pretrained": pretrained, **kwargs})
        for name in ("device", "max_batch_size"):  # of the harness
            arguments.pop(name, None)
        if adapter := arguments.pop("peft", None):
            rank = int(json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8")).get("r", 0))
            largest = next((one for one in _RANKS if one >= rank), rank)
            arguments = {"max_lora_rank": largest} | arguments | {"lora_local_path": str(adapter)}
        super().__init__(**arguments)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts of ids or text; the continuation of a prompt of ids is numbers, without EOS."""
        responses: dict[int, str] = {}
        same: dict[str, list[int]] = defaultdict(list)
        texts = []
        for index, request in enumerate(requests):
            if is_token_ids_request(request.args[0]):
                same[json.dumps(request.args)].append(index)
            else:
                texts.append(index)
        if texts:
            theirs = super().generate_until([requests[index] for index in texts], disable_tqdm)
            responses |= dict(zip(texts, theirs, strict=True))
        prompts = [parse_token_ids(requests[indices[0]].args[0]) for indices in same.values()]
        arguments = [requests[indices[0]].args[1] for indices in same.values()]
        numbers = map(len, same.values())
        params = list(map(_sampling_params, arguments, numbers, repeat(self.eot_token_id)))
        for ids, one in zip(prompts, params, strict=True):
            self._check(ids, int(one.max_tokens or 0))
        answers = self._model_generate(prompts, generate=True, sampling_params=params) if prompts else []
        for indices, answer in zip(same.values(), answers, strict=True):
            rows = [list(output.token_ids) for output in answer.outputs]
            rows *= len(indices) // len(rows)  # greedily, all are the same
            for index, row in zip(indices, rows, strict=True):
                kept = row[: row.index(self.eot_token_id)] if self.eot_token_id in row else row
                responses[index] = " ".join(map(str, kept))
        return [responses[index] for index in range(len(requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations; those of token ids token by token, without Min-K%++, which needs all logits."""
        is_ids = [is_token_ids_request(request.args[0]) for request in requests]
        theirs = [request for request, own in zip(requests, is_ids, strict=True) if not own]
        others = iter(super().loglikelihood(theirs, disable_tqdm) if theirs else ())
        pairs = [
            (parse_token_ids(request.args[0]), parse_token_ids(request.args[1]))
            for request, own in zip(requests, is_ids, strict=True)
            if own
        ]
        for given, continuation in pairs:
            self._check(given + continuation, 1)
        answers = self._model_generate([given + continuation for given, continuation in pairs]) if pairs else []
        scored = iter(_scored(len(given), ids, answer) for (given, ids), answer in zip(pairs, answers, strict=True))
        return [next(scored if own else others) for own in is_ids]

    def _check(self, ids: Sequence[int], num_new: int) -> None:
        if len(ids) + num_new > self.max_length:
            raise ValueError(
                f"a prompt and its continuation are {len(ids) + num_new} tokens together, more than the model's "
                f"{self.max_length}: shorten the prompts, generate less, or raise max_model_len"
            )


def likelihood_problem(model_args: Mapping[str, Any]) -> str | None:
    """Say why log-probabilities of prompts cannot be had from a model: vLLM 0.32 fails."""
    if "peft" in on_base_model(model_args) and current_platform.is_cpu():
        return "vLLM on a CPU has none under an adapter"
    return None


def _sampling_params(arguments: dict[str, Any], number: int, eos: int | None) -> SamplingParams:
    kwargs = normalize_gen_kwargs(arguments)
    if int(kwargs.get("num_beams") or 1) > 1:
        raise ValueError("tfidf-vllm has no beam search: leave out num_beams, or use --model tfidf-hf")
    sampled: dict[str, Any] = {"temperature": 0.0}
    if kwargs["do_sample"]:
        sampled = {"temperature": float(kwargs.get("temperature", 1.0)), "top_k": int(kwargs.get("top_k") or 0)}
        sampled["n"] = number  # without a seed of its own, with which vLLM 0.32 fails on a CPU; the engine has one
    # Not the end tokens of the model's generation_config.
    stop = [] if eos is None else [int(eos)]
    return SamplingParams(
        max_tokens=int(kwargs["max_gen_toks"]), ignore_eos=True, stop_token_ids=stop, detokenize=False, **sampled
    )


def _scored(num_given: int, ids: Sequence[int], answer: Any) -> tuple[float, bool]:
    values = answer.prompt_logprobs[num_given:]
    own = np.array([best[token].logprob for token, best in zip(ids, values, strict=True)])
    greedy = np.array([best[token].rank == 1 for token, best in zip(ids, values, strict=True)])
    return ScoredTokens(TokenLikelihoods(-own, None, greedy))
