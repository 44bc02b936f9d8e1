"""A model of the harness behind an OpenAI-compatible server."""

from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from tfidf_tune.probe import Server, TokenLikelihoods
from tfidf_tune.tasks._model import ScoredTokens
from tfidf_tune.tasks._prompts import is_token_ids_request, parse_token_ids


class ServerLM(LM):  # type: ignore[misc]
    """``--model tfidf-server``: asks ``/completions``, or ``/chat/completions`` for a document with ``messages``.

    Prompts of token ids are sent as ids, which some servers refuse; prompts of text as text. Answers are text.
    ``tokenizer`` is that of the model, or another one that the measures are counted in; ``server`` is for
    :class:`tfidf_tune.probe.Server`.
    """

    def __init__(self, model: str, base_url: str, tokenizer: str, **server: Any) -> None:
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):  # of the harness
            server.pop(name, None)
        self.tokenizer, self.server = tokenizer, Server(model, base_url, **server)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each continuation; a sample's seed is its number."""
        asked = []
        for request in requests:
            prompt, arguments = request.args
            doc, kwargs, sampling = request.doc or {}, normalize_gen_kwargs(arguments), {}
            if kwargs["do_sample"]:
                sampling = {"temperature": float(kwargs.get("temperature") or 0.0), "seed": int(request.idx)}
                sampling |= {"top_k": kwargs["top_k"]} if kwargs.get("top_k") else {}
            num_tokens = int(kwargs["max_gen_toks"])
            continuation = self.server.continuation(
                _sent(prompt), num_tokens, _name(doc), doc.get("messages"), **sampling
            )
            asked.append(continuation)
        return self.server.answers(asked, "Continuing prompts")

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations from the log-probabilities of an echoed prompt, by token if its tokens are known."""
        asked = []
        for request in requests:
            (context, continuation), doc = request.args, request.doc or {}
            # Fields of a passage that is scored; by text its tokens are counted to find where it starts.
            known = {"num_ids": len(doc.get("token_ids") or ()), "num_given": int(doc.get("num_given") or 0)}
            whole = _sent(context + continuation)
            asked.append(self.server.likelihoods(_sent(context), whole, _name(doc), **known))
        return [
            ScoredTokens(TokenLikelihoods(np.array(nll), None, np.array(greedy))) if exact else (-sum(nll), all(greedy))
            for nll, greedy, exact in self.server.answers(asked, "Scoring passages")
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refuse: no task of ours asks for it."""
        raise ValueError("tfidf-server scores continuations only: use --model local-completions for this task")


def _sent(prompt: str) -> str | list[int]:
    return parse_token_ids(prompt) if is_token_ids_request(prompt) else prompt


def _name(doc: dict[str, Any]) -> str:
    attack = f" by {doc['attack']}" if doc.get("attack") else ""
    return f"{doc.get('passage_id', 'a document')}{attack}"
