"""A model of the harness behind an OpenAI-compatible server: completions, chats, and likelihoods of echoed prompts.

Requests are paced, retried, checked, and kept in a journal from which a run goes on.
"""

import hashlib
import json
import math
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from tfidf_tune._checks import check_at_least, require_number
from tfidf_tune.probe import TokenLikelihoods
from tfidf_tune.probe._documents import UNREADABLE, cause_of
from tfidf_tune.tasks._model import ScoredTokens
from tfidf_tune.tasks._prompts import is_token_ids_request, parse_token_ids

_NUM_ATTEMPTS = 3  # at an answer that is not what was asked for
_PROMPT = "Once upon a time, there was a"
_ROUNDING = 1e-3  # of log-probabilities that a server rounds or computes in half precision


class Request(NamedTuple):
    """The payload of a request, its name in messages, and a function that checks the answer.

    ``check`` returns the part of the answer to keep. It raises a ``ValueError`` if the answer is invalid.
    """

    payload: dict[str, Any]
    name: str
    check: Callable[[Any], Any]


class ServerLM(LM):  # type: ignore[misc]
    """``--model tfidf-server``: asks ``/completions``, or ``/chat/completions`` for a document with ``messages``.

    Prompts of token ids are sent as ids, which some servers refuse; prompts of text as text. Answers are text.

    The API key is read from the environment and is in no message and no file. Timeouts, broken connections and the
    statuses 408, 409, 429 and 5xx are tried again with growing pauses, as long as the server asks for by
    ``Retry-After``; an answer that does not fit its request is asked for again twice.

    ``model`` is its name there, ``base_url`` is up to ``/v1``; ``tokenizer`` is that of the model, or another one that
    the measures are counted in; ``timeout`` is in seconds; ``journal`` is a file of the answers, JSON lines, and what
    it has is not asked for again.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        tokenizer: str,
        *,
        journal: str | None = None,
        num_concurrent: int = 1,
        requests_per_minute: float | None = None,
        timeout: float = 600.0,
        max_retries: int = 8,
        api_key_variable: str = "OPENAI_API_KEY",
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ) -> None:
        # The last three are of the harness.
        super().__init__()
        check_at_least(1, num_concurrent=num_concurrent)
        check_at_least(0, max_retries=max_retries)
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}: write it with its scheme, like http://localhost:8000/v1")
        for name, value in (("timeout", timeout), ("requests_per_minute", requests_per_minute)):
            if value is not None:
                require_number(name, value, 0, 1e6, "of the requests", reason="more is no limit", positive=True)
        self.model, self.base_url, self.tokenizer = model, base_url, tokenizer
        self._variable, self._key = api_key_variable, os.environ.get(api_key_variable, "")
        key = self._key or "none"
        self._client = openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=max_retries)
        self._num_concurrent = num_concurrent
        self._pause = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next_start = 0.0
        self._lock = threading.Lock()
        self._journal = Path(journal) if journal else None
        self._known = _read_journal(self._journal)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each continuation; a sample's seed is its number."""
        asked = []
        for request in requests:
            prompt, arguments = request.args
            doc, kwargs = request.doc or {}, normalize_gen_kwargs(arguments)
            payload = {"model": self.model, "max_tokens": int(kwargs["max_gen_toks"]), "temperature": 0.0}
            if kwargs["do_sample"]:
                payload |= {"temperature": float(kwargs.get("temperature") or 0.0), "seed": int(request.idx)}
                payload |= {"top_k": kwargs["top_k"]} if kwargs.get("top_k") else {}
            messages = doc.get("messages")
            payload |= {"messages": messages} if messages else {"prompt": _sent(prompt)}
            asked.append(Request(payload, _name(doc), _text))
        return self._answers(asked, "Continuing prompts")

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations from the log-probabilities of an echoed prompt, by token if its tokens are known."""
        asked = []
        for request in requests:
            (context, continuation), doc = request.args, request.doc or {}
            # Fields of a passage that is scored; by text its tokens are counted to find where it starts.
            known = {"num_ids": len(doc.get("token_ids") or ()), "num_given": int(doc.get("num_given") or 0)}
            asked.append(self._scoring(_sent(context), _sent(context + continuation), _name(doc), **known))
        return [
            ScoredTokens(TokenLikelihoods(np.array(nll), None, np.array(greedy))) if exact else (-sum(nll), all(greedy))
            for nll, greedy, exact in self._answers(asked, "Scoring passages")
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refuse: no task of ours asks for it."""
        raise ValueError("tfidf-server scores continuations only: use --model local-completions for this task")

    def likelihood_problem(self) -> str | None:
        """Ask twice whether the server gives log-probabilities of a prompt that can be used; say why not.

        Its own greedy continuation must have the highest ones: some servers return those of the next token.
        """
        payload = {"model": self.model, "max_tokens": 8, "temperature": 0.0, "prompt": _PROMPT}
        (continuation,) = self._answers([Request(payload, "a test", _text)], "Asking for a continuation")
        asked = self._scoring(_PROMPT, _PROMPT + (continuation or " of"), "a test of log-probabilities")
        try:
            ((_, greedy, _),) = self._answers([asked], "Asking for log-probabilities")
        except ConnectionError as error:
            if isinstance(error.__cause__, UNREADABLE):  # an answer without them, or with wrong ones
                return _problem(error.__cause__)
            if "status 4" in str(error) and "status 429" not in str(error):  # a request that the server refuses
                return str(error)
            raise
        # The last token of a text can be another one than where it went on.
        if continuation and sum(greedy) < len(greedy) / 2:
            return "its log-probabilities do not fit its own continuation"
        return None

    def _scoring(
        self, given: str | list[int], whole: str | list[int], name: str, num_ids: int = 0, num_given: int = 0
    ) -> Request:
        """Ask for the NLL and the greedy mark of each token of ``whole`` after ``given``, which it starts with.

        Of text, ``num_ids`` are the tokens of the whole and ``num_given`` those of its start, 0 if they are not known.
        """
        # At least one token has to be generated, because servers refuse 0.
        payload = {"model": self.model, "max_tokens": 1, "temperature": 0.0, "prompt": whole, "echo": True}
        check = partial(_scored, given=given, whole=whole, num_ids=num_ids, num_given=num_given)
        return Request(payload | {"logprobs": 1}, name, check)

    def _answers(self, requests: Sequence[Request], description: str) -> list[Any]:
        """Return the checked answers in order, or raise a ``ConnectionError`` if one fails in spite of all retries."""
        errors: list[Exception] = []

        def ask(request: Request) -> Any:
            # After the first failure no further request is sent; answers that are on their way are still recorded.
            try:
                return None if errors else self._answer(request)
            except Exception as error:
                errors.append(error)

        with ThreadPoolExecutor(self._num_concurrent) as pool:
            answers = list(tqdm(pool.map(ask, requests), total=len(requests), desc=description))
        if errors:
            raise errors[0]
        return answers

    def _answer(self, request: Request) -> Any:
        path = "/chat/completions" if "messages" in request.payload else "/completions"
        content = json.dumps([self.base_url, path, request.payload], sort_keys=True)
        # The journal holds no prompts, only what identifies a request.
        key = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        with self._lock:
            if key in self._known:
                return self._known[key]
        # The client repeats what fails on the way; here an answer that does not fit is asked for again.
        for attempt in range(1, _NUM_ATTEMPTS + 1):
            try:
                answer = request.check(self._send(path, request))
                break
            except UNREADABLE as error:  # not JSON, or not what the check wants
                if attempt == _NUM_ATTEMPTS:
                    raise self._failed(request, f"{_problem(error)}, {_NUM_ATTEMPTS} times") from error
        # Only checked answers are recorded, each as a complete line.
        with self._lock:
            self._known[key] = answer
            if self._journal is not None:
                self._journal.parent.mkdir(parents=True, exist_ok=True)
                with self._journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"request": key, "answer": answer}) + "\n")
        return answer

    def _send(self, path: str, request: Request) -> Any:
        # Each request reserves its start, however many threads wait.
        with self._lock:
            start = max(time.monotonic(), self._next_start)
            self._next_start = start + self._pause
        time.sleep(max(0.0, start - time.monotonic()))
        try:
            return self._client.post(path, cast_to=object, body=request.payload)
        except openai.APIStatusError as error:
            raise self._failed(request, f"status {error.status_code}: {error.message}") from None
        except openai.APIError as error:
            raise self._failed(request, f"{type(error).__name__}: {error}") from None

    def _failed(self, request: Request, reason: str) -> ConnectionError:
        remedy = f"see to the server, the name of the model there, and the API key in {self._variable}"
        if self._journal is not None:
            remedy += f". Run the same command to continue: {len(self._known):,} answers are saved in {self._journal}"
        # Some servers repeat the key in their messages.
        reason = " ".join(reason.split())[:400]
        if self._key:
            reason = reason.replace(self._key, "***")
        return ConnectionError(f"{self.base_url} did not answer the request for {request.name}: {reason}; {remedy}")


def _read_journal(file: Path | None) -> dict[str, Any]:
    """Return the answers of a journal; a line that a crash has cut is left out, and ended."""
    if file is None or not file.is_file():
        return {}
    content = file.read_text(encoding="utf-8")
    if content and not content.endswith("\n"):
        with file.open("a", encoding="utf-8") as end:
            end.write("\n")
    answers = {}
    for line in content.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            answers[str(entry["request"])] = entry["answer"]
    return answers


def _problem(error: BaseException) -> str:
    return str(error) if isinstance(error, ValueError) else f"its answer is of another form ({cause_of(error)})"


def _text(answer: Any) -> str:
    """Return the text of a completion or of a chat's next turn."""
    (choice,) = answer["choices"]
    text = (choice["message"].get("content") or "") if choice.get("message") else choice.get("text")
    if not isinstance(text, str) or not choice.get("finish_reason"):
        raise ValueError("its answer has no text, or ends early, without a finish_reason")
    return text


def _scored(
    answer: Any, given: str | list[int], whole: str | list[int], num_ids: int, num_given: int
) -> tuple[list[float], list[bool], bool]:
    """Return the NLL and the greedy mark of each scored token, and whether they are those of the document's ids."""
    (choice,) = answer["choices"]
    logprobs = choice.get("logprobs") or {}
    if not (values := logprobs.get("token_logprobs")):
        raise ValueError("it gives no log-probabilities of the prompt (echo and logprobs)")
    # The echoed prompt comes first, then the token that had to be generated.
    tokens, top = logprobs.get("tokens") or [], logprobs.get("top_logprobs") or [None] * len(values)
    number = (answer.get("usage") or {}).get("prompt_tokens") or len(values) - 1
    if len(tokens) != len(values) or len(top) != len(values) or not 1 < number <= len(values):
        raise ValueError(f"it gives {len(values)} log-probabilities for {number} tokens of a prompt")
    # A token that is a part of a character cannot be read.
    echoed = "".join(tokens[:number])
    if isinstance(whole, list):
        num_ids, num_given = len(whole), len(given)
    elif whole.strip() not in echoed and "\ufffd" not in echoed and "bytes:" not in echoed:
        raise ValueError("it echoes another prompt than was sent")
    # Where the scored part starts: counted from the end if ids are known, else by characters.
    exact = number - num_ids in (0, 1)  # 1: the server puts a BOS first
    first = number - num_ids + num_given
    if isinstance(whole, str) and not exact:
        first = bisect_left([*accumulate(map(len, tokens), initial=0)], len(given))
    # Each value must be possible, so that a wrong count of the server is noticed.
    nll, greedy = [], []
    for value, best in zip(values[first:number], top[first:number], strict=True):
        if value is None or not value <= _ROUNDING:  # or not a number
            raise ValueError(f"it gives {value!r} as a log-probability")
        if best and sum(map(math.exp, best.values())) > 1 + _ROUNDING:
            raise ValueError("it gives probabilities of more than 1 together")
        nll.append(-min(0.0, value))
        greedy.append(best is None or value >= max(best.values(), default=0) - _ROUNDING)
    if not any(nll):
        raise ValueError("it gives log-probabilities that are all 0")
    return nll, greedy, exact


def _sent(prompt: str) -> str | list[int]:
    return parse_token_ids(prompt) if is_token_ids_request(prompt) else prompt


def _name(doc: dict[str, Any]) -> str:
    attack = f" by {doc['attack']}" if doc.get("attack") else ""
    return f"{doc.get('passage_id', 'a document')}{attack}"
