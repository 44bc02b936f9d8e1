"""A model of the harness behind an OpenAI-compatible server: completions, chats and likelihoods."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from tfidf_tune.analysis import TokenLikelihoods
from tfidf_tune.tasks._model import ScoredTokens
from tfidf_tune.tasks._requests import Request, Server, WrongAnswer
from tfidf_tune.tasks._token_ids import is_token_ids_request, parse_token_ids

_PROMPT = "Once upon a time, there was a"
_ROUNDING = 1e-3  # of log-probabilities that a server rounds or computes in half precision


class ServerLM(LM):  # type: ignore[misc]
    """``--model tfidf-server``: asks ``/completions``, or ``/chat/completions`` for a document with ``messages``.

    Prompts of token ids are sent as ids, which some servers refuse; prompts of text as text. Answers are text.

    Args:
        model (str): its name at the server.
        base_url (str): up to ``/v1``.
        tokenizer (str): folder or hub id of the model's tokenizer, or of another one that the measures are counted in.
        **server (Any): more for :class:`~tfidf_tune.tasks._requests.Server`.
    """

    def __init__(self, model: str, base_url: str, tokenizer: str, **server: Any) -> None:
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):  # of the harness
            server.pop(name, None)
        self.model, self.tokenizer = model, tokenizer
        self.server = Server(base_url, **server)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each continuation; a sample's seed is its number."""
        asked = []
        for request in requests:
            prompt, arguments = request.args
            doc, kwargs = request.doc or {}, normalize_gen_kwargs(arguments)
            payload: dict[str, Any] = {
                "model": self.model,
                "max_tokens": int(kwargs["max_gen_toks"]),
                "temperature": float(kwargs.get("temperature") or 0.0) if kwargs["do_sample"] else 0.0,
            }
            if kwargs["do_sample"]:
                payload["seed"] = int(request.idx)
                payload |= {"top_k": kwargs["top_k"]} if kwargs.get("top_k") else {}
            if doc.get("messages"):
                asked.append(
                    Request("/chat/completions", payload | {"messages": doc["messages"]}, _name(doc), _message)
                )
            else:
                asked.append(Request("/completions", payload | {"prompt": _sent(prompt)}, _name(doc), _text))
        return self.server.answers(asked, "Continuing prompts")

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations from the log-probabilities of an echoed prompt, by token if its tokens are known."""
        asked = []
        for request in requests:
            context, continuation = request.args
            doc = request.doc or {}
            asked.append(_echo(self.model, context, continuation, _name(doc), doc))
        return [_pair(*answer) for answer in self.server.answers(asked, "Scoring passages")]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refuse: no task of ours asks for it."""
        raise ValueError("tfidf-server scores continuations only: use --model local-completions for this task")

    def likelihood_problem(self) -> str | None:
        """Ask twice whether the server gives log-probabilities of a prompt that can be used; say why not.

        Its own greedy continuation must have the highest ones: some servers return those of the next token.
        """
        payload = {"model": self.model, "prompt": _PROMPT, "max_tokens": 8, "temperature": 0.0}
        (own,) = self.server.answers([Request("/completions", payload, "a test", _text)], "Asking for a continuation")
        asked = _echo(self.model, _PROMPT, own or " of", "a test of log-probabilities", {})
        try:
            ((_, greedy, _),) = self.server.answers([asked], "Asking for log-probabilities")
        except ConnectionError as error:
            if isinstance(error.__cause__, WrongAnswer):
                return str(error.__cause__)
            if "status 4" in str(error) and "status 429" not in str(error):
                return str(error)
            raise
        # The last token of a text can be another one than where it went on.
        if own and sum(greedy) < len(greedy) / 2:
            return "its log-probabilities do not fit its own continuation"
        return None


def _echo(model: str, context: str, continuation: str, name: str, doc: dict[str, Any]) -> Request:
    """Ask for the log-probabilities of a prompt; the one token that is generated, because 0 is refused, is dropped."""
    given, whole = _sent(context), _sent(context + continuation)
    payload = {"model": model, "prompt": whole, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
    ids, num_given = list(doc.get("token_ids") or ()), int(doc.get("num_given") or 0)

    def check(answer: dict[str, Any]) -> list[Any]:
        return _scored(answer, given, whole, len(ids), num_given)

    return Request("/completions", payload, name, check)


def _scored(
    answer: dict[str, Any], given: str | list[int], whole: str | list[int], num_ids: int, num_given: int
) -> list[Any]:
    """Return the NLL and the greedy mark of each scored token, and whether they are those of the document's ids."""
    choice = _choice(answer)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not logprobs.get("token_logprobs"):
        raise WrongAnswer("it gives no log-probabilities of the prompt (echo and logprobs)")
    tokens, values = list(logprobs.get("tokens") or ()), list(logprobs["token_logprobs"])
    top = list(logprobs.get("top_logprobs") or [None] * len(values))
    number = (answer.get("usage") or {}).get("prompt_tokens", len(values) - 1)
    if len(tokens) != len(values) or len(top) != len(values) or not 1 < number <= len(values):
        raise WrongAnswer(f"it gives {len(values)} log-probabilities for {number} tokens of a prompt")
    if isinstance(whole, str):
        _check_text("".join(map(str, tokens[:number])), whole)
    if isinstance(whole, list):
        first, exact = number - len(whole) + len(given), number - len(whole) in (0, 1)
    else:
        exact = number - num_ids in (0, 1)  # 1: the server puts a BOS first
        first = number - num_ids + num_given if exact else _num_tokens_of(str(given), tokens)
    scored = [(value, best) for value, best in zip(values[first:number], top[first:number], strict=True)]
    for value, best in scored:
        _check_probability(value, best)
    if not scored or all(value == 0 for value, _ in scored):
        raise WrongAnswer("it gives log-probabilities that are all 0")
    nll = [-min(0.0, float(value)) for value, _ in scored]
    greedy = [best is None or value >= max(best.values(), default=0) - _ROUNDING for value, best in scored]
    return [nll, greedy, exact]


def _pair(nll: list[float], greedy: list[bool], exact: bool) -> tuple[float, bool]:
    if not exact:
        return -sum(nll), all(greedy)
    return ScoredTokens(TokenLikelihoods(np.array(nll), None, np.array(greedy)))


def _check_text(echoed: str, sent: str) -> None:
    """Compare what was echoed with what was sent, unless a token is a part of a character, which cannot be read."""
    is_readable = "\ufffd" not in echoed and "bytes:" not in echoed
    if is_readable and sent.strip() not in echoed:
        raise WrongAnswer("it echoes another prompt than was sent")


def _num_tokens_of(given: str, tokens: Sequence[str]) -> int:
    """Return how many tokens the beginning of a prompt has."""
    length = 0
    for number, token in enumerate(tokens):
        if length >= len(given):
            return number
        length += len(token)
    return len(tokens)


def _check_probability(value: Any, best: Any) -> None:
    is_number = isinstance(value, (int, float)) and not math.isnan(value)
    if not is_number or value > _ROUNDING:
        raise WrongAnswer(f"it gives {value!r} as a log-probability")
    if best and sum(map(math.exp, best.values())) > 1 + _ROUNDING:
        raise WrongAnswer("it gives probabilities of more than 1 together")


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise WrongAnswer("its answer does not have one choice")
    return choices[0]


def _text(answer: dict[str, Any]) -> str:
    choice = _choice(answer)
    if not isinstance(text := choice.get("text"), str):
        raise WrongAnswer("its answer has no text")
    return _finished(choice, text)


def _message(answer: dict[str, Any]) -> str:
    choice = _choice(answer)
    message = choice.get("message")
    if not isinstance(message, dict) or not isinstance(text := message.get("content") or "", str):
        raise WrongAnswer("its answer has no message")
    return _finished(choice, text)


def _finished(choice: dict[str, Any], text: str) -> str:
    if not choice.get("finish_reason"):
        raise WrongAnswer("its answer ends early, without a finish_reason")
    return text


def _sent(prompt: str) -> str | list[int]:
    return parse_token_ids(prompt) if is_token_ids_request(prompt) else prompt


def _name(doc: dict[str, Any]) -> str:
    attack = f" by {doc['attack']}" if doc.get("attack") else ""
    return f"{doc.get('passage_id', 'a document')}{attack}"
