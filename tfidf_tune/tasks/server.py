"""A model of the harness behind an OpenAI-compatible server: completions, chats, and likelihoods of
echoed prompts.

Requests are paced, retried, checked, and kept in a journal from which a run goes on. A server is
trusted in nothing.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import ssl
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx2
import numpy as np
from anyio.from_thread import start_blocking_portal
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from pydantic import BaseModel, Field, ValidationError
from tqdm import tqdm

from tfidf_tune._checks import (
    SetupError,
    check_at_least,
    first_problem,
    require_base_url,
    require_number,
)
from tfidf_tune.probe import TokenLikelihoods
from tfidf_tune.probe.sample_fields import UNREADABLE, Count, Unanswered
from tfidf_tune.tasks._requests import is_token_ids_request, parse_token_ids
from tfidf_tune.tasks._token_ids_lm import ScoredTokens

REQUESTS_PER_PROMPT_TEST = 2
"""Requests of :meth:`ServerLM.prompt_obstacle`."""
REQUESTS_PER_LIKELIHOOD_TEST = 2
"""Requests of :meth:`ServerLM.likelihood_problem`."""
_DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
_NUM_ATTEMPTS = 3  # at an answer that is not what was asked for
_LEAST_SHARE = 0.75  # of the tokens that were asked for, in an answer that ends for its length
_REFUSED_SETTING = re.compile(
    r"(max_tokens|temperature).{0,200}not supported|unsupported.{0,200}(max_tokens|temperature)",
    re.IGNORECASE,
)
_PROMPT = "Once upon a time, there was a"
_ROUNDING = 1e-3  # of log-probabilities that a server rounds or computes in half precision
_MOST_BYTES = 1 << 26  # of an answer
_MOST_BYTES_OF_MODELS = 1 << 20  # of the list of models
_LONGEST_PAUSE = 30.0  # seconds
_LONGEST_RETRY_AFTER = 600.0  # seconds
_SHOWN_BYTES = 1 << 14  # of the body of an error, before its first 400 characters are shown
_LONG_KEY = 16  # characters of an API key that are in no text by chance
_BEARER_TOKEN = re.compile(r"[\w.~+/-]+=*", re.ASCII)  # RFC 6750, section 2.1

_logger = logging.getLogger(__name__)

# Real ones are above -1,000; servers write -9999 for a token that is impossible, and JSON has
# numbers like -1e308.
_LogProbability = Annotated[float, Field(strict=True, ge=-1e4, le=_ROUNDING, allow_inf_nan=False)]


class _Message(BaseModel):
    content: str | None = None


class _Logprobs(BaseModel):
    tokens: list[str] = []
    token_logprobs: list[_LogProbability | None] | None = None
    top_logprobs: list[dict[str, _LogProbability] | None] | None = None


class _Choice(BaseModel):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(BaseModel):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Answer(BaseModel):
    """What is read of an answer of ``/completions``, ``/chat/completions`` or ``/models``, strictly
    typed.
    """

    choices: Annotated[list[_Choice], Field(max_length=1)] = []
    usage: _Usage | None = None
    system_fingerprint: str | None = None
    model: str | None = None
    data: list[dict[str, Any]] = []  # of the list of models


class Request(NamedTuple):
    """The payload of a request, its name in messages, and a function that checks the answer.

    ``check`` returns the part of the answer to keep. It raises a ``ValueError`` if the answer is
    invalid.
    """

    payload: dict[str, Any]
    name: str
    check: Callable[[_Answer], Any]


class _ScoredPrompt(NamedTuple):
    """The scored tokens of an echoed prompt."""

    nll: list[float]
    greedy: list[bool]  # whether no other token is more probable, True where it is not known
    greedy_is_known: bool  # of all of them
    exact: bool  # whether the tokens are those of the document's ids


class ServerLM(LM):  # type: ignore[misc]
    """``--model tfidf-server``: asks ``/completions``, or ``/chat/completions`` for a document with
    ``messages``.

    Prompts of token ids are sent as ids, which some servers refuse; prompts of text as text.
    Answers are text.

    The API key is read from the environment and is in no message and no file. Timeouts, broken
    connections and the statuses 408, 409, 429 and 5xx are tried again with growing pauses, or as
    long as the server asks for by ``Retry-After``; an answer that does not fit its request is asked
    for again twice. Redirects are not followed. An answer that a content filter withheld, or that
    is empty, is an :class:`~tfidf_tune.probe.sample_fields.Unanswered`.

    ``model`` is its name there, ``base_url`` is up to ``/v1``; ``tokenizer`` is that of the model,
    or another one that the measures are counted in; ``timeout`` is in seconds, for a whole answer;
    ``journal`` is a file of the answers of an unfinished run, JSON lines, and what it has is not
    asked for again.
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
        api_key_variable: str = _DEFAULT_KEY_VARIABLE,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ) -> None:
        # The last three are of the harness.
        super().__init__()
        check_at_least(1, num_concurrent=num_concurrent)
        check_at_least(0, max_retries=max_retries)
        require_base_url(base_url)
        _require_limit("timeout", timeout)
        if requests_per_minute is not None:
            _require_limit("requests_per_minute", requests_per_minute)
        self.model = model
        self.base_url = base_url.rstrip("/")
        self.tokenizer = tokenizer
        self._variable = api_key_variable
        self._key = os.environ.get(api_key_variable, "").strip()
        if not self._key and api_key_variable != _DEFAULT_KEY_VARIABLE:
            raise ValueError(
                "api_key_variable does not name an environment variable that has a key (what it is "
                "set to is not shown here, since it can be the key itself): give the name of the "
                "variable, and export the variable"
            )
        if self._key and not _BEARER_TOKEN.fullmatch(self._key):
            raise ValueError(
                f"{api_key_variable} has characters that an API key cannot have: letters, digits, "
                "-._~+/="
            )
        # Nothing is sent but what is named here.
        self._headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "tfidf-tune",
        }
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._num_concurrent = num_concurrent
        self._timeout = timeout
        self._max_retries = max_retries
        # Seconds between the starts of two requests, and the time of the next start.
        self._pause = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next_start = 0.0
        self._journal: Path | None = None
        self.known: dict[str, str] = {}  # answers, by the hashes of the requests
        self.answered_as: str | None = None  # the model that answers name
        # Fingerprints of the system, in the answers of the journal.
        self._recorded: set[str] = set()
        if journal is not None:
            self.open_journal(Path(journal))
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO a line for each request
        # At DEBUG headers, which may have the key.
        logging.getLogger("httpcore2").setLevel(logging.WARNING)

    def open_journal(self, file: Path) -> int:
        """Keep all answers from now on in a file, and use those that it has;
        return their number.
        """
        self._journal = file
        self.known.clear()  # answers to tests are in no journal
        if not file.is_file():
            return 0
        for line in file.read_bytes().splitlines():
            with suppress(*UNREADABLE):  # a line that a crash has cut
                entry = json.loads(line)
                answer = entry["answer"]
                self.known[entry["request"]] = json.dumps(answer)
                fingerprint = answer.get("system_fingerprint")
                if fingerprint:
                    self._recorded.add(fingerprint)
        return len(self.known)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each continuation; a sample's seed is its number."""
        asked = []
        for request in requests:
            prompt, arguments = request.args
            doc = request.doc or {}
            kwargs = normalize_gen_kwargs(arguments)
            num_asked = int(kwargs["max_gen_toks"])
            payload: dict[str, Any] = {
                "model": self.model,
                "max_tokens": num_asked,
                "temperature": 0.0,
            }
            if kwargs["do_sample"]:
                payload["temperature"] = float(kwargs.get("temperature") or 0.0)
                payload["seed"] = int(request.idx)
                if kwargs.get("top_k"):
                    payload["top_k"] = kwargs["top_k"]
            if doc.get("messages"):
                payload["messages"] = doc["messages"]
            else:
                payload["prompt"] = _sent(prompt)
            check = partial(_text, num_asked=num_asked, has_eos=bool(doc.get("has_eos")))
            asked.append(Request(payload, _name(doc), check))
        return self._answers(asked, "Continuing prompts")

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score continuations from the log-probabilities of an echoed prompt, by token if its
        tokens are known.
        """
        asked = []
        for request in requests:
            context, continuation = request.args
            doc = request.doc or {}
            scoring = self._scoring(
                _sent(context),
                _sent(context + continuation),
                _name(doc),
                # Fields of a passage; by text its tokens are counted to find where the scored part
                # starts.
                num_ids=len(doc.get("token_ids") or ()),
                num_given=int(doc.get("num_given") or 0),
            )
            asked.append(scoring)
        pairs: list[tuple[float, bool]] = []
        for scored in self._answers(asked, "Scoring passages"):
            if scored.exact:
                nll = np.array(scored.nll)
                greedy = np.array(scored.greedy) if scored.greedy_is_known else None
                pairs.append(ScoredTokens(TokenLikelihoods(nll, None, greedy)))
            else:
                pairs.append((-sum(scored.nll), all(scored.greedy)))
        return pairs

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Refuse: no task of ours asks for it."""
        raise ValueError(
            "tfidf-server scores continuations only: use --model local-completions for this task"
        )

    def likelihood_problem(self) -> str | None:
        """Ask twice whether the server gives log-probabilities of a prompt that can be used; say
        why not.

        Its own greedy continuation must have the highest ones: some servers return those of the
        next token.
        """
        payload = {"model": self.model, "max_tokens": 8, "temperature": 0.0, "prompt": _PROMPT}
        try:
            continuing = Request(payload, "a test", _text)
            (continuation,) = self._answers([continuing], "Asking for a continuation")
            whole = f"{_PROMPT}{continuation or ' of'}"
            scoring = self._scoring(_PROMPT, whole, "a test of log-probabilities")
            (scored,) = self._answers([scoring], "Asking for log-probabilities")
        except ConnectionRefusedError as error:
            if error.__cause__ is None:
                return str(error)
            return self._hidden(_problem(error.__cause__))
        # The last token of a text can be another one than where it went on.
        if continuation and scored.greedy.count(True) < len(scored.greedy) / 2:
            return "its log-probabilities do not fit its own continuation"
        return None

    def prompt_obstacle(
        self, prompts: Sequence[tuple[str | list[int], int]], *, is_chat: bool = False
    ) -> str | None:
        """Ask for two prompts, a short and a long one, and say what the server does to prompts, by
        its own counts.

        If both have the same surplus over the tokens that were sent, and more than a BOS, something
        stands around them; if the count hardly grows, the longer one was cut. With another
        tokenizer than the model's, or in a chat, which has a template, only the cut can be told.

        Args:
            prompts (Sequence[tuple[str | list[int], int]]): two prompts, each with its number of
                tokens.
            is_chat (bool): whether they are sent as a turn of a chat. Default: False.

        Returns:
            str | None: a clause; "" if nothing was found, None if the server does not count.

        Raises:
            ValueError: If the server refuses ``max_tokens`` or ``temperature``, as reasoning models
                do.
        """
        asked = []
        for prompt, _ in prompts:
            payload: dict[str, Any] = {"model": self.model, "max_tokens": 1, "temperature": 0.0}
            if is_chat:
                payload["messages"] = [{"role": "user", "content": prompt}]
            else:
                payload["prompt"] = prompt
            asked.append(Request(payload, "a test of prompts", _num_prompt_tokens))
        try:
            first, second = self._answers(asked, "Testing prompts")
        except ConnectionRefusedError as error:
            if _REFUSED_SETTING.search(str(error)):
                raise ValueError(
                    f"{self.base_url} refuses max_tokens or temperature, as reasoning models do: "
                    f"such models cannot be audited by prompts of text ({error})"
                ) from error
            raise
        if first is None or second is None:
            return None
        # Prompts of 10 and 90 tokens, that the server counts as 31 and 111: a template of 21 tokens
        # is around each. Counted as 10 and 40, the longer one was cut.
        (_, num_first), (_, num_second) = prompts
        first_surplus = first - num_first
        second_surplus = second - num_second
        surplus = min(first_surplus, second_surplus)
        # A template may join the first or last token of a prompt.
        is_same = abs(first_surplus - second_surplus) <= 1
        if surplus > 1 and is_same and not is_chat:
            return (
                f"the server counts {surplus} tokens more than each prompt has: a chat template is "
                "around it"
            )
        if 2 * (second - first) < num_second - num_first:
            return (
                f"the server counts {second} tokens in a prompt of {num_second}, and {first} of "
                f"{num_first}: it cuts it"
            )
        return ""

    def description(self) -> dict[str, Any]:
        """Return what the server says about the model, without what changes at each request; it may
        say nothing.
        """
        asked = Request({}, "its models", lambda answer: answer.data)
        try:
            (models,) = self._answers([asked], "Asking for the model")
        except ConnectionError:
            return {}
        # A server of a single model may call it by another name.
        description: dict[str, Any] = {}
        for model in models:
            if model.get("id") == self.model or len(models) == 1:
                description = model
                break
        changing = ("created", "permission", "status")
        return {key: value for key, value in description.items() if key not in changing}

    def _scoring(
        self,
        given: str | list[int],
        whole: str | list[int],
        name: str,
        num_ids: int = 0,
        num_given: int = 0,
    ) -> Request:
        """Ask for the NLL and the greedy mark of each token of ``whole`` after ``given``, which it
        starts with.

        Of text, ``num_ids`` are the tokens of the whole and ``num_given`` those of its start, 0 if
        they are not known.
        """
        # At least one token has to be generated, because servers refuse 0.
        payload = {
            "model": self.model,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt": whole,
            "echo": True,
            "logprobs": 1,
        }
        check = partial(_scored, given=given, whole=whole, num_ids=num_ids, num_given=num_given)
        return Request(payload, name, check)

    def _answers(self, requests: Sequence[Request], description: str) -> list[Any]:
        """Return the checked answers in order, or raise a ``ConnectionError`` if one fails in spite
        of all retries.
        """
        # In a thread: a notebook has a loop of its own, and Ctrl-C is raised here and ends those
        # requests at once.
        with start_blocking_portal() as portal:
            return portal.call(self._ask, requests, description)

    async def _ask(self, requests: Sequence[Request], description: str) -> list[Any]:
        limits = httpx2.Limits(max_connections=self._num_concurrent)
        # Nothing is sent that the options do not name.
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        # The client's own timeouts would start anew with each byte.
        client = httpx2.AsyncClient(
            headers=self._headers, cookies=cookies, timeout=None, limits=limits, verify=_tls()
        )
        async with client:
            with tqdm(total=len(requests), desc=description) as bar:
                answer = partial(self._answer, client)
                turns = _Turns(answer, self._num_concurrent, bar)
                answers = await asyncio.gather(*[turns.ask(request) for request in requests])
        if turns.errors:
            raise turns.errors[0]
        return answers

    async def _answer(self, client: httpx2.AsyncClient, request: Request) -> Any:
        """Return the checked answer to a request, from the journal or else from the server."""
        path = _path(request.payload)
        content = json.dumps([self.base_url, path, request.payload], sort_keys=True)
        key = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        # Asking: an answer that does not fit is asked for again, also one of the journal.
        for attempt in range(1, _NUM_ATTEMPTS + 1):
            recorded = self.known.pop(key, "")
            try:
                body = recorded.encode() or await self._send(client, path, request)
                answer = self._read(body)
                checked = request.check(answer)
                break
            except UNREADABLE as error:  # not JSON, or not what the check wants
                if attempt == _NUM_ATTEMPTS:
                    reason = f"{_problem(error)}, {_NUM_ATTEMPTS} times"
                    raise self._failed(request, reason, ConnectionRefusedError) from error
        # Comparing: all answers have to be of one model. The list of models is of none.
        self._require_recorded_fingerprint(answer)
        if request.payload:
            self._require_single_model(answer)
        # Recording: only checked answers, and nothing else that a server sends.
        text = answer.model_dump_json(exclude_defaults=True)
        self.known[key] = text
        if self._journal is not None and not recorded:
            with self._journal.open("a", encoding="utf-8") as file:
                # The line break in front ends a line that a crash has cut.
                file.write(f'\n{{"request": "{key}", "answer": {text}}}')
        return checked

    def _require_recorded_fingerprint(self, answer: _Answer) -> None:
        """Refuse an answer of another system than those in the journal."""
        fingerprint = answer.system_fingerprint
        if not fingerprint or not self._recorded or fingerprint in self._recorded:
            return
        raise SetupError(
            f"{self._journal} is of another model: system_fingerprint was "
            f"{', '.join(sorted(self._recorded))}, is {fingerprint}. Name another output, or "
            "--overwrite"
        )

    def _require_single_model(self, answer: _Answer) -> None:
        """Refuse an answer that names another model than earlier ones: a gateway may send long
        requests elsewhere than short ones.
        """
        if not answer.model:
            return
        if self.answered_as is None:
            self.answered_as = answer.model
        if answer.model != self.answered_as:
            raise SetupError(
                f"{self.base_url} answers for {self.model} as {self.answered_as} and as "
                f"{answer.model}: name a model, or a server, that gives all answers"
            )

    async def _send(self, client: httpx2.AsyncClient, path: str, request: Request) -> bytes:
        """Send a request until it is answered, at most ``max_retries`` times more;
        return the body.
        """
        for attempt in range(self._max_retries + 1):
            # Waiting for the start, which each request reserves, however many wait.
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + self._pause
            await asyncio.sleep(start - now)
            # Sending, and reading all of the answer, within the timeout.
            pause = min(0.5 * 2**attempt, _LONGEST_PAUSE)
            try:
                exchange = _exchange(client, self.base_url + path, request.payload)
                status, headers, body = await asyncio.wait_for(exchange, self._timeout)
            except asyncio.TimeoutError:
                reason = f"no whole answer within {self._timeout:g} seconds"
            except httpx2.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                # Judging the status: only what may pass is tried again.
                if status < 300:
                    return body
                reason = _refusal(status, body)
                is_failure_of_server = status >= 500 and status != 501
                if status not in (408, 409, 429) and not is_failure_of_server:
                    raise self._failed(request, reason, ConnectionRefusedError)
                retry_after = headers.get("retry-after", "")
                if retry_after.isdecimal():
                    pause = min(float(retry_after), _LONGEST_RETRY_AFTER)
            # Waiting before the next attempt.
            if attempt < self._max_retries:
                await asyncio.sleep(pause)
        raise self._failed(request, reason)

    def _read(self, body: bytes) -> _Answer:
        """Validate an answer, and hide the API key in it.

        A text can have a short key by chance, so that such a key is hidden only in what is said of
        the model.
        """
        answer = _Answer.model_validate_json(body)
        # What is said of the model stands in messages.
        answer.system_fingerprint = self._hidden(answer.system_fingerprint or "") or None
        answer.model = self._hidden(answer.model or "") or None
        answer.data = json.loads(self._hidden(json.dumps(answer.data)))
        if len(self._key) >= _LONG_KEY:
            text = self._hidden(answer.model_dump_json(exclude_defaults=True))
            answer = _Answer.model_validate_json(text)
        return answer

    def _hidden(self, text: str) -> str:
        """Hide the API key."""
        return text.replace(self._key, "***") if self._key else text

    def _failed(
        self, request: Request, reason: str, kind: type[ConnectionError] = ConnectionError
    ) -> ConnectionError:
        remedy = (
            f"see to the server, the name of the model there, and the API key in {self._variable}"
        )
        if self._journal is not None:
            remedy += (
                f". Run the same command to continue: {len(self.known):,} answers are saved in "
                f"{self._journal}"
            )
        reason = self._hidden(" ".join(reason[:_SHOWN_BYTES].split()))[:400]
        return kind(
            f"{self.base_url} did not answer the request for {request.name}: {reason}; {remedy}"
        )


class _Turns:
    """Requests that take turns; after the first failure no further request is sent.

    Answers that are on their way then are still recorded.
    """

    def __init__(
        self, answer: Callable[[Request], Awaitable[Any]], num_concurrent: int, bar: tqdm
    ) -> None:
        self._answer = answer
        self._turn = asyncio.Semaphore(num_concurrent)
        self._bar = bar
        self.errors: list[Exception] = []

    async def ask(self, request: Request) -> Any:
        """Return the answer to a request, or None after a failure."""
        async with self._turn:
            try:
                if not self.errors:
                    return await self._answer(request)
            except Exception as error:
                self.errors.append(error)
            finally:
                self._bar.update()
        return None


@cache
def _tls() -> ssl.SSLContext:
    """Read the certificates that httpx2 trusts, once for all clients."""
    return httpx2.create_ssl_context()


async def _exchange(
    client: httpx2.AsyncClient, url: str, payload: dict[str, Any]
) -> tuple[int, httpx2.Headers, bytes]:
    """Post a payload, or get an address without one; return the status, the headers
    and the body.
    """
    if payload:
        most_bytes = _MOST_BYTES
        stream = client.stream(
            "POST",
            url,
            content=json.dumps(payload).encode(),
            headers={"Content-Type": "application/json"},
        )
    else:
        most_bytes = _MOST_BYTES_OF_MODELS
        stream = client.stream("GET", url)
    body = bytearray()
    async with stream as response:
        async for part in response.aiter_raw():  # not decompressed
            body += part
            if len(body) > most_bytes:
                raise ValueError(f"it sends an answer of more than {most_bytes >> 20} MiB")
        return response.status_code, response.headers, bytes(body)


def _path(payload: dict[str, Any]) -> str:
    """Return what a payload is sent to; without a payload the list of models is asked for."""
    if not payload:
        return "/models"
    return "/chat/completions" if "messages" in payload else "/completions"


def _refusal(status: int, body: bytes) -> str:
    """Say with which status a server refuses, and what it says in JSON; pages for browsers are not
    shown.
    """
    if status < 400:
        return f"status {status}, a redirect: name the server that answers as --base-url"
    try:
        shown = json.dumps(json.loads(body[:_SHOWN_BYTES]), ensure_ascii=False)
    except UNREADABLE:
        return f"status {status}"
    return f"status {status}: {shown}"


def _problem(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        key, problem = first_problem(error, include_input=False)  # which can be large
        key_before = f"{key}: " if key else ""
        return f"it sends a wrong answer ({key_before}{problem['msg']})"
    if type(error) is ValueError:  # of a check here, with a sentence
        return str(error)
    return f"it sends a wrong answer ({type(error).__name__}: {error})"


def _require_limit(name: str, value: float) -> None:
    require_number(name, value, 0, 1e6, "of the requests", reason="more is no limit", positive=True)


def _num_prompt_tokens(answer: _Answer) -> int | None:
    """Return the server's count; some servers write 0 instead of none."""
    return (answer.usage and answer.usage.prompt_tokens) or None


def _text(answer: _Answer, num_asked: int | None = None, *, has_eos: bool = False) -> str:
    """Return the text of a completion or of a chat's next turn.

    An answer that ended for its length with clearly fewer tokens than ``num_asked`` was cut by the
    server. So was each answer that ended by itself, if the passage has EOS inside: the rest of it
    could not be recited.
    """
    choice = answer.choices[0] if answer.choices else _Choice()
    text = choice.text if choice.message is None else choice.message.content or ""
    is_withheld = choice.finish_reason == "content_filter"
    if not choice.finish_reason or (text is None and not is_withheld):
        raise ValueError("its answer has no text, or ends early, without a finish_reason")
    # Some servers write 0 tokens instead of none.
    num_made = answer.usage.completion_tokens if answer.usage else None
    if choice.finish_reason == "length" and num_asked is not None and num_made:
        is_cut = num_made < _LEAST_SHARE * num_asked
    else:
        is_cut = has_eos and choice.finish_reason == "stop"
    if is_withheld or is_cut or text is None or not text.strip():
        return Unanswered(text or "")
    return text


def _scored(
    answer: _Answer, given: str | list[int], whole: str | list[int], num_ids: int, num_given: int
) -> _ScoredPrompt:
    """Return the NLL and the greedy mark of each token of ``whole`` after ``given``.

    ``num_ids`` and ``num_given`` are as in :meth:`ServerLM._scoring`. If they are known, the scored
    part is found by counting, here of 4 ids, of which 2 are given::

        echoed tokens           number of them     the first scored token
        A  B  C  D              4                  4 - 4 + 2 = 2, C
        <s>  A  B  C  D         5, with a BOS      5 - 4 + 2 = 3, C
        A1  A2  A3  B  C  D     6, by others       unknown: it is found by characters
    """
    # Reading: the echoed prompt comes first, then the token that had to be generated.
    logprobs = (answer.choices[0].logprobs if answer.choices else None) or _Logprobs()
    values = logprobs.token_logprobs
    if not values:
        raise ValueError("it gives no log-probabilities of the prompt (echo and logprobs)")
    tokens = logprobs.tokens
    top = logprobs.top_logprobs or [None] * len(values)
    number = (answer.usage and answer.usage.prompt_tokens) or len(values) - 1
    if len(tokens) != len(values) or len(top) != len(values) or not 1 < number <= len(values):
        raise ValueError(
            f"it gives {len(values)} log-probabilities for {number} tokens of a prompt"
        )
    # Comparing: a token that is a part of a character cannot be read.
    echoed = "".join(tokens[:number])
    if isinstance(whole, list):
        num_ids = len(whole)
        num_given = len(given)
    elif whole.strip() not in echoed and "\ufffd" not in echoed and "bytes:" not in echoed:
        raise ValueError("it echoes another prompt than was sent")
    # Finding the scored part: counted from the end if ids are known, else by characters.
    exact = number - num_ids in (0, 1)  # 1: the server puts a BOS first
    if isinstance(whole, str) and not exact:
        first = _first_after(len(given), whole, echoed, tokens)
    else:
        first = number - num_ids + num_given
    # Scoring: each value must be possible, so that a wrong count of the server is noticed.
    nll = []
    greedy = []
    greedy_is_known = True
    for value, best in zip(values[first:number], top[first:number], strict=True):
        if value is None:
            raise ValueError(f"it gives {value!r} as a log-probability")
        log_probabilities = [] if best is None else list(best.values())
        if sum(math.exp(other) for other in log_probabilities) > 1 + _ROUNDING:
            raise ValueError("it gives probabilities of more than 1 together")
        if not log_probabilities:
            greedy_is_known = False
        highest = max(log_probabilities, default=0)
        nll.append(-min(0.0, value))
        greedy.append(best is None or value >= highest - _ROUNDING)
    if not any(nll):
        raise ValueError("it gives log-probabilities that are all 0")
    return _ScoredPrompt(nll, greedy, greedy_is_known, exact)


def _first_after(num_characters: int, whole: str, echoed: str, tokens: Sequence[str]) -> int:
    """Return the first token that starts after so many characters of the text that was sent.

    More characters are echoed if a BOS is written out, fewer if a space in front was stripped::

        sent       "the river bends", of which 9 are given
        echoed     "<s>the river bends": 3 more, so that the first 12 are given
        tokens     "<s>" "the" " river" " bends"
        starts      0     3     6        12          the first token is number 3, " bends"
    """
    text = whole.strip()
    num_added = echoed.index(text) - whole.index(text) if text in echoed else 0
    starts = list(accumulate((len(token) for token in tokens), initial=0))
    return bisect_left(starts, num_added + num_characters)


def _sent(prompt: str) -> str | list[int]:
    return parse_token_ids(prompt) if is_token_ids_request(prompt) else prompt


def _name(doc: dict[str, Any]) -> str:
    passage = doc.get("passage_id", "a document")
    return f"{passage} by {doc['attack']}" if doc.get("attack") else str(passage)
