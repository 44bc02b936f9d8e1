"""Requests to an OpenAI-compatible server: paced, retried, checked, and kept in a journal from which a run goes on."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from tfidf_tune._checks import check_at_least, require_number

_NUM_ATTEMPTS = 3  # at an answer that is not what was asked for


class WrongAnswer(ValueError):
    """An answer that does not fit the request; the message says how."""


class Request(NamedTuple):
    """What is sent, how it is called in messages, and how the answer is checked.

    ``check`` returns the part of the answer that is kept, or raises :class:`WrongAnswer`.
    """

    path: str
    payload: dict[str, Any]
    name: str
    check: Callable[[dict[str, Any]], Any]


class Server:
    """An OpenAI-compatible server.

    The API key is read from the environment and is in no message and no file. Timeouts, broken connections and the
    statuses 408, 409, 429 and 5xx are tried again with growing pauses, as long as the server asks for by
    ``Retry-After``; an answer that does not fit its request is asked for again twice.

    Args:
        base_url (str): up to ``/v1``.
        journal (str | None): file of the answers, JSON lines; what it has is not asked for again. Default: None
        num_concurrent (int): requests at once. Default: 1
        requests_per_minute (float | None): most requests. Default: None, no limit
        timeout (float): seconds to wait for an answer. Default: 600
        max_retries (int): of a request that fails. Default: 8
        api_key_variable (str): name of the environment variable with the key. Default: "OPENAI_API_KEY"

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        base_url: str,
        *,
        journal: str | None = None,
        num_concurrent: int = 1,
        requests_per_minute: float | None = None,
        timeout: float = 600.0,
        max_retries: int = 8,
        api_key_variable: str = "OPENAI_API_KEY",
    ) -> None:
        from openai import OpenAI

        check_at_least(1, num_concurrent=num_concurrent)
        check_at_least(0, max_retries=max_retries)
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url is {base_url!r}: write it with its scheme, for example http://localhost:8000/v1"
            )
        for name, value in (("timeout", timeout), ("requests_per_minute", requests_per_minute)):
            if value is not None:
                require_number(name, value, 0, 1e6, "of the requests", reason="more is no limit", positive=True)
        self.base_url = base_url
        self._key = os.environ.get(api_key_variable, "")
        self._variable = api_key_variable
        self._client = OpenAI(base_url=base_url, api_key=self._key or "none", timeout=timeout, max_retries=max_retries)
        self._num_concurrent = num_concurrent
        self._pause = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next_start = 0.0
        self._lock = threading.Lock()
        self._journal = Path(journal) if journal else None
        self._known = _read_journal(self._journal)

    def answers(self, requests: Sequence[Request], description: str) -> list[Any]:
        """Return the checked answers in the order of the requests.

        Raises:
            ConnectionError: If a request fails in spite of all retries; what was answered until then is in the journal.
        """
        with tqdm(total=len(requests), desc=description) as bar, ThreadPoolExecutor(self._num_concurrent) as pool:
            failed = threading.Event()

            def ask(request: Request) -> Any:
                if failed.is_set():
                    return None
                try:
                    answer = self._answer(request)
                except BaseException:
                    failed.set()
                    raise
                bar.update()
                return answer

            futures = [pool.submit(ask, request) for request in requests]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
            for future in futures:
                if not future.cancelled() and (error := future.exception()) is not None:
                    raise error
            return [future.result() for future in futures]

    def _answer(self, request: Request) -> Any:
        key = self._key_of(request)
        with self._lock:
            if key in self._known:
                return self._known[key]
        for attempt in range(_NUM_ATTEMPTS):
            self._wait_for_turn()
            try:
                answer = request.check(self._send(request))
            except WrongAnswer as error:
                if attempt == _NUM_ATTEMPTS - 1:
                    raise self._failed(request, f"{error}, {_NUM_ATTEMPTS} times") from error
            else:
                self._keep(key, answer)
                return answer
        raise AssertionError  # unreachable

    def _send(self, request: Request) -> dict[str, Any]:
        import openai

        try:
            answer = self._client.post(request.path, cast_to=object, body=request.payload)
        except openai.APIStatusError as error:
            raise self._failed(request, f"status {error.status_code}: {error.message}", error.status_code) from None
        except ValueError as error:
            raise WrongAnswer("the answer is not JSON") from error
        except openai.APIError as error:
            raise self._failed(request, f"{type(error).__name__}: {error}") from None
        if not isinstance(answer, dict):
            raise WrongAnswer(f"the answer is not a JSON object but {str(answer)[:80]!r}")
        return answer

    def _failed(self, request: Request, reason: str, status: int = 0) -> ConnectionError:
        remedy = {
            401: f"set the environment variable {self._variable} to the API key",
            403: f"set the environment variable {self._variable} to an API key that may use this model",
            404: "check --base-url and the name of the model",
        }.get(status, "see to the server")
        if self._journal is not None:
            remedy += f". The same command goes on from here: {len(self._known):,} answers are in {self._journal}"
        reason = " ".join(reason.split())[:400]
        if self._key:
            reason = reason.replace(self._key, "***")
        return ConnectionError(f"{self.base_url} did not answer the request for {request.name}: {reason}; {remedy}")

    def _wait_for_turn(self) -> None:
        with self._lock:
            start = max(time.monotonic(), self._next_start)
            self._next_start = start + self._pause
        time.sleep(max(0.0, start - time.monotonic()))

    def _key_of(self, request: Request) -> str:
        content = json.dumps([self.base_url, request.path, request.payload], sort_keys=True)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _keep(self, key: str, answer: Any) -> None:
        with self._lock:
            self._known[key] = answer
            if self._journal is not None:
                self._journal.parent.mkdir(parents=True, exist_ok=True)
                with self._journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"request": key, "answer": answer}) + "\n")


def _read_journal(file: Path | None) -> dict[str, Any]:
    """Return the answers of a journal; a line that a crash has cut is left out, and ended."""
    if file is None or not file.is_file():
        return {}
    content = file.read_text(encoding="utf-8")
    if content and not content.endswith("\n"):
        with file.open("a", encoding="utf-8") as end:
            end.write("\n")
    return dict(entry for line in content.splitlines() if (entry := _read_entry(line)) is not None)


def _read_entry(line: str) -> tuple[str, Any] | None:
    try:
        entry = json.loads(line)
        return str(entry["request"]), entry["answer"]
    except (ValueError, KeyError, TypeError):
        return None
