"""A small OpenAI-compatible server around a model, with faults on demand: what a real one does, and
does wrong.

A fault is a name, a status, or a function that takes an answer and returns another one, or the
bytes of a body.
"""

import asyncio
import gzip
import json
import math
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.probe import greedy_continuations, load_model, token_likelihoods
from tfidf_tune.tasks import server as _server


class Clock:
    """The client's clock, which only goes on while it sleeps; ``awake`` are the moments at which it
    went on.
    """

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.awake = []
        monkeypatch.setattr(_server, "time", self)
        monkeypatch.setattr(
            _server, "asyncio", SimpleNamespace(**(vars(asyncio) | {"sleep": self.sleep}))
        )

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds
        self.awake.append(self.now)


class Host:
    """A model, what it was asked, and the faults of the next requests, by name."""

    def __init__(self, folder):
        self.model = load_model(folder).eval()
        self.tokenizer = hf_tokenizer(str(folder))
        self.asked = []
        self.faults = []
        self.headers = []
        self.echoes = True
        self.models = None
        self.fingerprint = None
        self.name = None  # of the model, in answers
        self.elsewhere = ""  # where a redirect points
        self.num_taken = 0  # bytes of a large body
        self.lock = threading.Lock()
        self.known = {}

    def once(self, function, ids, *arguments, **options):
        """Ask the model, or find what it said to the same ids before: audits ask
        again and again.
        """
        key = (self.model, function, tuple(ids), arguments)
        if key not in self.known:
            (self.known[key],) = function(self.model, [ids], *arguments, **options)
        return self.known[key]

    def encode(self, text):
        return self.tokenizer.encode(text, add_bos=False, add_eos=False)

    def answer(self, path, payload):
        prompt = payload.get("prompt")
        if path.endswith("/chat/completions"):
            prompt = payload["messages"][-1]["content"]
        if isinstance(prompt, list) and isinstance(prompt[0], list):  # a batch of one
            (prompt,) = prompt
        ids = list(prompt) if isinstance(prompt, list) else self.encode(prompt)
        with self.lock, torch.no_grad():
            if payload["temperature"]:
                torch.manual_seed(payload["seed"])
                options = {
                    "do_sample": True,
                    "temperature": payload["temperature"],
                    "top_k": payload.get("top_k", 0),
                }
                options |= {
                    "max_new_tokens": payload["max_tokens"],
                    "pad_token_id": self.tokenizer.eos_id,
                }
                made = self.model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
            else:
                made = self.once(
                    greedy_continuations, ids, payload["max_tokens"], eos_id=self.tokenizer.eos_id
                )
            choice = {
                "index": 0,
                "finish_reason": "length" if len(made) >= payload["max_tokens"] else "stop",
            }
            if path.endswith("/chat/completions"):
                choice["message"] = {"role": "assistant", "content": self.tokenizer.decode(made)}
                return {"choices": [choice]}
            choice["text"] = self.tokenizer.decode(made)
            if payload.get("echo") and self.echoes:
                scored = self.once(token_likelihoods, ids + made)
                values = [None, *(-scored.nll).tolist()]
                tokens = [self.tokenizer.decode([one]) for one in ids + made]
                top = [None]
                for value, greedy in zip(values[1:], scored.greedy, strict=True):
                    best = value if greedy else value / 2
                    top.append({"best": best})
                choice["text"] = self.tokenizer.decode(ids + made)
                choice["logprobs"] = {
                    "tokens": tokens,
                    "token_logprobs": values,
                    "top_logprobs": top,
                }
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(made)}
        return {
            "choices": [choice],
            "usage": usage,
            "system_fingerprint": self.fingerprint,
            "model": self.name,
        }


class ParrotHost(Host):
    """Copies what it is shown, knows some texts by heart, and else says the same word again and
    again.

    ``treat_prompt`` and ``treat_answer`` change texts, and ``most_tokens`` cuts answers, as servers
    do.
    """

    def __init__(self, folder, texts):
        super().__init__(folder)
        self.texts = texts
        self.treat_prompt = self.treat_answer = lambda text: text
        self.most_tokens = math.inf

    def answer(self, path, payload):
        prompt = self.treat_prompt(payload["prompt"])
        known = [prompt[:-1], *self.texts]
        ends = (prompt[start:] for start in range(len(prompt) - 15))
        end = next((end for end in ends if any(end in text for text in known)), None)
        continued = "and " * payload["max_tokens"]
        if end is not None:
            continued = next(text.partition(end)[2] for text in known if end in text)
        num_made = min(payload["max_tokens"], self.most_tokens)
        made = self.encode(continued)[:num_made]
        choice = {"index": 0, "finish_reason": "length" if len(made) == num_made else "stop"}
        choice["text"] = self.treat_answer(self.tokenizer.decode(made))
        usage = {"prompt_tokens": len(self.encode(prompt)), "completion_tokens": len(made)}
        return {"choices": [choice], "usage": usage}


@contextmanager
def serving(folder, host=None):
    """Serve a model, or another host; yield the host and the base URL."""
    host = host or Host(folder)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            if host.models is None:
                return self.reply(500, b"", {})
            return self.reply(200, json.dumps({"data": host.models}).encode(), {})

        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with host.lock:
                host.asked.append((self.path, payload))
                host.headers.append(dict(self.headers))
                fault = host.faults.pop(0) if host.faults else ""
            if isinstance(fault, str) and fault.isdigit():
                # A part of the key, and the key where a message of 400 characters ends.
                sent = self.headers.get("Authorization", "")
                message = json.dumps(
                    {"error": {"message": f"{sent[:-4]}... {'no ' * 110}{sent}"}}
                ).encode()
                return self.reply(
                    int(fault), message, {"Retry-After": "0", "Location": host.elsewhere}
                )
            if fault == "reasoning":  # as OpenAI answers
                message = "Unsupported parameter: 'max_tokens' is not supported with this model."
                error = {"message": message, "param": "max_tokens", "code": "unsupported_parameter"}
                return self.reply(400, json.dumps({"error": error}).encode(), {})
            if fault == "broken header":
                self.wfile.write(
                    f"HTTP/1.1 200 OK\r\nrefused {self.headers['Authorization']}\r\n\r\n".encode()
                )
                return self.connection.close()
            if fault in ("dripping", "dripping headers", "large", "silent"):
                with suppress(OSError):  # until the client goes
                    self.go_on(fault)
                return self.connection.close()
            answer = host.answer(self.path, payload)
            (choice,) = answer["choices"]
            logprobs = choice.get("logprobs", {})
            if callable(fault):
                answer = fault(answer)
            elif fault in ("positive", "nan"):
                logprobs["token_logprobs"][5] = {"positive": 0.5, "nan": float("nan")}[fault]
            elif (
                fault == "shifted"
            ):  # of the next token, as by a server that counts from the wrong one
                values = [*logprobs["top_logprobs"][2:], {"best": -1.0}]
                logprobs["top_logprobs"][1:] = [{"best": max(one.values()) / 2} for one in values]
                logprobs["token_logprobs"][1:] = [-9.0] * len(values)
            elif fault == "zeros":
                logprobs["token_logprobs"] = [0.0] * len(logprobs["tokens"])
            elif fault == "too many":
                logprobs["token_logprobs"].append(-1.0)
            elif fault == "another prompt":
                logprobs["tokens"] = ["x"] * len(logprobs["tokens"])
            elif fault == "no text":
                choice["text"] = None
            elif fault == "two":
                answer["choices"] = [choice, choice]
            if fault == "html":
                body = b"<html>"
            elif isinstance(answer, bytes):
                body = answer
            else:
                body = json.dumps(answer).encode()
            if fault == "bomb":
                return self.reply(200, gzip.compress(bytes(1 << 28)), {"Content-Encoding": "gzip"})
            if fault == "cut":
                self.reply(200, body[: len(body) // 2], {"Content-Length": str(len(body))})
                return self.connection.close()
            return self.reply(200, body, {})

        def go_on(self, fault):
            """Send without end, or, if the client waits for an answer, nothing."""
            if fault == "silent":
                self.connection.settimeout(None)
                self.rfile.read(1)
            if fault == "large":
                self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    host.num_taken += self.connection.send(bytes(1 << 20))
            self.wfile.write(b"HTTP/1.0 200 OK\r\n" + (b"X: " if "headers" in fault else b"\r\n"))
            while True:
                self.wfile.write(b" ")
                time.sleep(0.05)

        def reply(self, status, body, headers):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Set-Cookie", "seen=yes")  # must not come back
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield host, f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
