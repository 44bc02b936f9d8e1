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
from collections.abc import Callable, Sequence
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
_MOST_BYTES, _MOST_BYTES_OF_MODELS = 1 << 26, 1 << 20  # of an answer
_LONGEST_PAUSE, _LONGEST_RETRY_AFTER = 30.0, 600.0  # seconds
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
        for name, value in (("timeout", timeout), ("requests_per_minute", requests_per_minute)):
            if value is not None:
                require_number(
                    name, value, 0, 1e6, "of the requests", reason="more is no limit", positive=True
                )
        self.model, self.base_url, self.tokenizer = model, base_url.rstrip("/"), tokenizer
        self._variable, self._key = api_key_variable, os.environ.get(api_key_variable, "").strip()
        if not self._key and api_key_variable != _DEFAULT_KEY_VARIABLE:
            raise ValueError(
                "api_key_variable does not name an environment variable that has a key (what it is "
                "set to is not shown "
                "here, since it can be the key itself): give the name of the variable, and export "
                "the variable"
            )
        if self._key and not _BEARER_TOKEN.fullmatch(self._key):
            raise ValueError(
                f"{api_key_variable} has characters that an API key cannot have: letters, digits, "
                f"-._~+/="
            )
        # Nothing is sent but what is named here.
        self._headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": "tfidf-tune",
        }
        self._headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._num_concurrent, self._timeout, self._max_retries = (
            num_concurrent,
            timeout,
            max_retries,
        )
        self._pause, self._next_start = (
            60 / requests_per_minute if requests_per_minute else 0.0,
            0.0,
        )
        self._journal: Path | None = None
        self.known: dict[str, str] = {}  # answers, by the hashes of the requests
        self._answered_as: str | None = None  # the model that answers name
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
                self.known[entry["request"]] = json.dumps(entry["answer"])
                self._recorded |= {entry["answer"].get("system_fingerprint") or ""} - {""}
        return len(self.known)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each continuation; a sample's seed is its number."""
        asked = []
        for request in requests:
            prompt, arguments = request.args
            doc, kwargs = request.doc or {}, normalize_gen_kwargs(arguments)
            num_asked = int(kwargs["max_gen_toks"])
            payload: dict[str, Any] = {
                "model": self.model,
                "max_tokens": num_asked,
                "temperature": 0.0,
            }
            if kwargs["do_sample"]:
                payload |= {
                    "temperature": float(kwargs.get("temperature") or 0.0),
                    "seed": int(request.idx),
                }
                payload |= {"top_k": kwargs["top_k"]} if kwargs.get("top_k") else {}
            messages = doc.get("messages")
            payload |= {"messages": messages} if messages else {"prompt": _sent(prompt)}
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
            (context, continuation), doc = request.args, request.doc or {}
            # Fields of a passage that is scored; by text its tokens are counted to find where it
            # starts.
            known = {
                "num_ids": len(doc.get("token_ids") or ()),
                "num_given": int(doc.get("num_given") or 0),
            }
            asked.append(
                self._scoring(_sent(context), _sent(context + continuation), _name(doc), **known)
            )
        return [
            ScoredTokens(TokenLikelihoods(np.array(nll), None, np.array(greedy)))
            if exact
            else (-sum(nll), all(greedy))
            for nll, greedy, exact in self._answers(asked, "Scoring passages")
        ]

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
            (continuation,) = self._answers(
                [Request(payload, "a test", _text)], "Asking for a continuation"
            )
            asked = self._scoring(
                _PROMPT, _PROMPT + (continuation or " of"), "a test of log-probabilities"
            )
            ((_, greedy, _),) = self._answers([asked], "Asking for log-probabilities")
        except ConnectionRefusedError as error:
            return (
                str(error) if error.__cause__ is None else self._hidden(_problem(error.__cause__))
            )
        # The last token of a text can be another one than where it went on.
        if continuation and sum(greedy) < len(greedy) / 2:
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
            sent = (
                {"messages": [{"role": "user", "content": prompt}]}
                if is_chat
                else {"prompt": prompt}
            )
            payload = {"model": self.model, "max_tokens": 1, "temperature": 0.0, **sent}
            asked.append(Request(payload, "a test of prompts", _num_prompt_tokens))
        try:
            first, second = self._answers(asked, "Testing prompts")
        except ConnectionRefusedError as error:
            if _REFUSED_SETTING.search(str(error)):
                raise ValueError(
                    f"{self.base_url} refuses max_tokens or temperature, as reasoning models do: "
                    f"such models cannot be "
                    f"audited by prompts of text ({error})"
                ) from error
            raise
        if first is None or second is None:
            return None
        (_, num_first), (_, num_second) = prompts
        surplus = (first - num_first, second - num_second)
        # A template may join the first or last token of a prompt.
        if min(surplus) > 1 and abs(surplus[0] - surplus[1]) <= 1 and not is_chat:
            return (
                f"the server counts {min(surplus)} tokens more than each prompt has: a chat "
                f"template is around it"
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
        try:
            (models,) = self._answers(
                [Request({}, "its models", lambda answer: answer.data)], "Asking for the model"
            )
        except ConnectionError:
            return {}
        about: dict[str, Any] = next(
            (one for one in models if one.get("id") == self.model or len(models) == 1), {}
        )
        return {
            key: value
            for key, value in about.items()
            if key not in ("created", "permission", "status")
        }

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
        }
        check = partial(_scored, given=given, whole=whole, num_ids=num_ids, num_given=num_given)
        return Request(payload | {"logprobs": 1}, name, check)

    def _answers(self, requests: Sequence[Request], description: str) -> list[Any]:
        """Return the checked answers in order, or raise a ``ConnectionError`` if one fails in spite
        of all retries.
        """
        # In a thread: a notebook has a loop of its own, and Ctrl-C is raised here and ends those
        # requests at once.
        with start_blocking_portal() as portal:
            return portal.call(self._ask, requests, description)

    async def _ask(self, requests: Sequence[Request], description: str) -> list[Any]:
        errors: list[Exception] = []
        turn, limits = (
            asyncio.Semaphore(self._num_concurrent),
            httpx2.Limits(max_connections=self._num_concurrent),
        )

        async def ask(request: Request) -> Any:
            # After the first failure no further request is sent; answers that are on their way are
            # still recorded.
            async with turn:
                try:
                    return None if errors else await self._answer(client, request)
                except Exception as error:
                    errors.append(error)
                finally:
                    bar.update()

        # Its own timeouts start anew with each byte.
        # Nothing is sent that the options do not name.
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        async with httpx2.AsyncClient(
            headers=self._headers, cookies=cookies, timeout=None, limits=limits, verify=_tls()
        ) as client:
            with tqdm(total=len(requests), desc=description) as bar:
                answers = await asyncio.gather(*map(ask, requests))
        if errors:
            raise errors[0]
        return answers

    async def _answer(self, client: httpx2.AsyncClient, request: Request) -> Any:
        path = "/chat/completions" if "messages" in request.payload else "/completions"
        path = path if request.payload else "/models"
        content = json.dumps([self.base_url, path, request.payload], sort_keys=True)
        key = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        # An answer that does not fit is asked for again, also one of the journal.
        for attempt in range(1, _NUM_ATTEMPTS + 1):
            text = self.known.pop(key, "")
            is_new = not text
            try:
                answer = self._read(text.encode() or await self._send(client, path, request))
                kept = request.check(answer)
                break
            except UNREADABLE as error:  # not JSON, or not what the check wants
                if attempt == _NUM_ATTEMPTS:
                    raise self._failed(
                        request, f"{_problem(error)}, {_NUM_ATTEMPTS} times", ConnectionRefusedError
                    ) from error
        # Nothing else that a server sends is kept.
        text = answer.model_dump_json(exclude_defaults=True)
        if (
            self._recorded
            and (now := answer.system_fingerprint or "")
            and now not in self._recorded
        ):
            raise SetupError(
                f"{self._journal} is of another model: system_fingerprint was "
                f"{', '.join(sorted(self._recorded))}, "
                f"is {now}. Name another output, or --overwrite"
            )
        # A gateway may send long requests to another model than short ones.
        if request.payload and answer.model:
            self._answered_as = self._answered_as or answer.model
            if answer.model != self._answered_as:
                raise SetupError(
                    f"{self.base_url} answers for {self.model} as {self._answered_as} and as "
                    f"{answer.model}: name a "
                    "model, or a server, that gives all answers"
                )
        self.known[key] = text
        # Only checked answers are recorded.
        if self._journal is not None and is_new:
            with self._journal.open("a", encoding="utf-8") as file:
                # Also after a line that a crash has cut.
                file.write(f'\n{{"request": "{key}", "answer": {text}}}')
        return kept

    async def _send(self, client: httpx2.AsyncClient, path: str, request: Request) -> bytes:
        """Send a request until it is answered, at most ``max_retries`` times more;
        return the body.
        """
        for attempt in range(self._max_retries + 1):
            # Each request reserves its start, however many wait.
            now, pause = time.monotonic(), min(0.5 * 2**attempt, _LONGEST_PAUSE)
            start = max(now, self._next_start)
            self._next_start = start + self._pause
            await asyncio.sleep(start - now)
            try:
                exchange = _exchange(client, self.base_url + path, request.payload)
                status, headers, body = await asyncio.wait_for(exchange, self._timeout)
            except asyncio.TimeoutError:
                reason = f"no whole answer within {self._timeout:g} seconds"
            except httpx2.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if status < 300:
                    return body
                reason = f"status {status}, a redirect: name the server that answers as --base-url"
                if status >= 400:
                    reason = f"status {status}"
                    with suppress(*UNREADABLE):  # pages for browsers are not shown
                        reason += (
                            f": {json.dumps(json.loads(body[:_SHOWN_BYTES]), ensure_ascii=False)}"
                        )
                if status not in (408, 409, 429) and (status < 500 or status == 501):
                    raise self._failed(request, reason, ConnectionRefusedError)
                if (after := headers.get("retry-after", "")).isdecimal():
                    pause = min(float(after), _LONGEST_RETRY_AFTER)
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
            answer = _Answer.model_validate_json(
                self._hidden(answer.model_dump_json(exclude_defaults=True))
            )
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
    body, content = bytearray(), json.dumps(payload).encode()
    sent: Any = (
        {"content": content, "headers": {"Content-Type": "application/json"}} if payload else {}
    )
    async with client.stream("POST" if payload else "GET", url, **sent) as response:
        async for part in response.aiter_raw():  # not decompressed
            body += part
            if len(body) > (most := _MOST_BYTES if payload else _MOST_BYTES_OF_MODELS):
                raise ValueError(f"it sends an answer of more than {most >> 20} MiB")
        return response.status_code, response.headers, bytes(body)


def _problem(error: BaseException) -> str:
    if not isinstance(error, ValidationError):
        return (
            str(error)
            if type(error) is ValueError
            else f"it sends a wrong answer ({type(error).__name__}: {error})"
        )
    name, problem = first_problem(error, include_input=False)  # which can be large
    return f"it sends a wrong answer ({f'{name}: ' if name else ''}{problem['msg']})"


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
    num_made = answer.usage.completion_tokens if answer.usage else None
    if (
        choice.finish_reason == "length" and num_asked is not None and num_made
    ):  # some write 0 instead of none
        is_withheld |= num_made < _LEAST_SHARE * num_asked
    is_withheld |= has_eos and choice.finish_reason == "stop"
    return text if text and text.strip() and not is_withheld else Unanswered(text or "")


def _scored(
    answer: _Answer, given: str | list[int], whole: str | list[int], num_ids: int, num_given: int
) -> tuple[list[float], list[bool], bool]:
    """Return the NLL and the greedy mark of each scored token, and whether they are those of the
    document's ids.
    """
    logprobs = (answer.choices[0].logprobs if answer.choices else None) or _Logprobs()
    if not (values := logprobs.token_logprobs):
        raise ValueError("it gives no log-probabilities of the prompt (echo and logprobs)")
    # The echoed prompt comes first, then the token that had to be generated.
    tokens, top = logprobs.tokens, logprobs.top_logprobs or [None] * len(values)
    number = (answer.usage and answer.usage.prompt_tokens) or len(values) - 1
    if len(tokens) != len(values) or len(top) != len(values) or not 1 < number <= len(values):
        raise ValueError(
            f"it gives {len(values)} log-probabilities for {number} tokens of a prompt"
        )
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
        # More characters are echoed if a BOS is written out ("<s>the river"), fewer if a space in
        # front was stripped.
        text = whole.strip()
        num_added = echoed.index(text) - whole.index(text) if text in echoed else 0
        first = bisect_left([*accumulate(map(len, tokens), initial=0)], num_added + len(given))
    # Each value must be possible, so that a wrong count of the server is noticed.
    nll, greedy = [], []
    for value, best in zip(values[first:number], top[first:number], strict=True):
        if value is None:
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
