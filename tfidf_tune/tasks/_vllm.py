"""vLLM within this process as a model of the harness, with prompts of token ids."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.models.vllm_causallms import VLLM
from vllm import SamplingParams
from vllm.platforms import current_platform

from tfidf_tune.probe import TokenLikelihoods
from tfidf_tune.probe.finite import NonFiniteLogits
from tfidf_tune.probe.loading import on_base_model
from tfidf_tune.tasks._token_ids_lm import Asked, TokenIdRequests

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA, which vLLM allows as the largest


class TokenExactVLLM(TokenIdRequests, VLLM):  # type: ignore[misc]
    """``--model tfidf-vllm``: takes the arguments of ``--model vllm``, and ``peft`` for a LoRA
    adapter.

    ``pretrained`` may also be the folder of an adapter. Requests of token ids are passed to vLLM as
    they are, and answered as by ``tfidf-hf``: until the tokenizer's EOS, by the logits only unless
    samples are asked for. The harness handles all other requests.
    """

    num_new_when_scored = 1

    def __init__(self, pretrained: str, **kwargs: Any) -> None:
        # vLLM loads the base model, with room for an adapter of this rank.
        arguments = on_base_model({"pretrained": pretrained, **kwargs})
        for name in ("device", "max_batch_size"):  # of the harness
            arguments.pop(name, None)
        adapter = arguments.pop("peft", None)
        if adapter:
            file = Path(adapter) / "adapter_config.json"
            rank = int(json.loads(file.read_text(encoding="utf-8")).get("r", 0))
            largest = next((size for size in _RANKS if size >= rank), rank)
            arguments.setdefault("max_lora_rank", largest)
            arguments["lora_local_path"] = str(adapter)
        super().__init__(**arguments)

    def continue_ids(self, asked: Sequence[Asked], disable_tqdm: bool) -> list[list[list[int]]]:
        """Continue all prompts; vLLM makes its own batches."""
        params = [_sampling_params(request) for request in asked]
        answers = self._model_generate(
            [request.ids for request in asked], generate=True, sampling_params=params
        )
        return [[list(output.token_ids) for output in answer.outputs] for answer in answers]

    def score_ids(
        self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool
    ) -> list[TokenLikelihoods]:
        """Score texts, without Min-K%++, which needs all logits."""
        answers = self._model_generate([given + scored for given, scored in pairs])
        scores: list[TokenLikelihoods] = []
        for (given, scored), answer in zip(pairs, answers, strict=True):
            tokens = _scored(len(given), scored, answer)
            if np.isnan(tokens.nll).any():
                raise NonFiniteLogits(len(scores), self.model.llm_engine.model_config.dtype)
            scores.append(tokens)
        return scores


def likelihood_problem(model_args: Mapping[str, Any]) -> str | None:
    """Say why log-probabilities of prompts cannot be had from a model: vLLM 0.32 fails."""
    if "peft" in on_base_model(model_args) and current_platform.is_cpu():
        return "vLLM on a CPU has none under an adapter"
    return None


def _sampling_params(asked: Asked) -> SamplingParams:
    generation = asked.generation
    if generation.get("num_beams"):
        raise ValueError(
            "tfidf-vllm has no beam search: leave out num_beams, or use --model tfidf-hf"
        )
    sampled: dict[str, Any] = {"temperature": 0.0}
    if generation:  # without a seed, with which vLLM 0.32 fails on a CPU; the engine has one
        sampled = {
            "temperature": generation["temperature"],
            "top_k": generation["top_k"],
            "n": asked.number,
        }
    # Not the end tokens of the model's generation_config.
    stop = [] if asked.eos_id is None else [int(asked.eos_id)]
    return SamplingParams(
        max_tokens=asked.num_tokens,
        ignore_eos=True,
        stop_token_ids=stop,
        detokenize=False,
        **sampled,
    )


def _scored(num_given: int, ids: Sequence[int], answer: Any) -> TokenLikelihoods:
    # vLLM returns the likeliest tokens of each position, and the prompt's token with its rank.
    nll = []
    greedy = []
    for token, likeliest in zip(ids, answer.prompt_logprobs[num_given:], strict=True):
        nll.append(-likeliest[token].logprob)
        greedy.append(likeliest[token].rank == 1)
    return TokenLikelihoods(np.array(nll), None, np.array(greedy))
