"""What models of the harness that take requests of token ids have in common."""

import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from tfidf_tune.probe import TokenLikelihoods
from tfidf_tune.probe.decoding import before_eos, end_of
from tfidf_tune.probe.finite import NonFiniteLogits
from tfidf_tune.tasks._requests import is_token_ids_request, parse_token_ids


class ScoredTokens(tuple[float, bool]):
    """The harness's pair of log-likelihood and whether greedy decoding gives the same, with those
    of each token.
    """

    tokens: TokenLikelihoods

    def __new__(cls, tokens: TokenLikelihoods) -> "ScoredTokens":
        """Make the pair."""
        # Where it is not known, the harness gets True, of which no task here makes use.
        is_greedy = tokens.greedy is None or bool(tokens.greedy.all())
        pair = super().__new__(cls, (-float(tokens.nll.sum()), is_greedy))
        pair.tokens = tokens
        return pair


class Asked(NamedTuple):
    """A prompt of token ids, and how it is continued."""

    ids: list[int]
    num_tokens: int
    # "do_sample", "temperature" and "top_k", or "num_beams"; empty: greedy.
    generation: dict[str, Any]
    number: int  # of continuations, more than 1 of samples only
    eos_id: int | None  # ends a continuation; None: the true continuation has EOS itself


class TokenIdRequests(LM):  # type: ignore[misc]
    """Mixed into a model of the harness: requests of token ids are answered here, all others by the
    harness.

    Ids go to the model unchanged. Each is continued by the logits alone and greedily, unless its
    document has ``generation``; the continuation ends before the tokenizer's EOS and is returned as
    numbers.
    """

    max_length: int
    eot_token_id: int | None
    num_new_when_scored = 0  # tokens that the model generates after a text that it only scores

    @abstractmethod
    def continue_ids(self, asked: Sequence[Asked], disable_tqdm: bool) -> list[list[list[int]]]:
        """Return for each prompt as many continuations as its ``number``; EOS and what follows it
        may be there.
        """

    @abstractmethod
    def score_ids(
        self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool
    ) -> list[TokenLikelihoods]:
        """Return the likelihood of each token of the second part of each pair, given the first."""

    def check_ids(self, ids: Sequence[int], num_new: int) -> None:
        """Raise a ``ValueError`` if the model cannot take a prompt and so many tokens more."""
        if len(ids) + num_new > self.max_length:
            raise ValueError(
                f"a prompt and its continuation are {len(ids) + num_new} tokens together, more "
                f"than the model's {self.max_length}: shorten the prompts or generate less"
            )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts of ids or text; the continuation of a prompt of ids is numbers, without
        EOS.
        """
        return _divided(requests, self._continued, super().generate_until, disable_tqdm)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score continuations; those of token ids token by token."""
        return _divided(requests, self._scored, super().loglikelihood, disable_tqdm)

    def _continued(self, requests: Sequence[Instance], disable_tqdm: bool) -> list[str]:
        # Samples of a prompt are made together.
        same: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            same[json.dumps(request.args)].append(index)
        groups = list(same.values())
        asked = [self._asked(requests[indices[0]], len(indices)) for indices in groups]
        try:
            continued = self.continue_ids(asked, disable_tqdm)
        except NonFiniteLogits as error:
            diverged = requests[groups[error.index][0]]
            raise NonFiniteLogits(error.index, error.dtype, _name(diverged)) from error
        # Numbers are what the tasks read; a single continuation answers all requests for it.
        responses: dict[int, str] = {}
        for indices, prompt, rows in zip(groups, asked, continued, strict=True):
            texts = [" ".join(map(str, before_eos(row, prompt.eos_id))) for row in rows]
            responses |= zip(indices, cycle(texts), strict=False)
        return [responses[index] for index in range(len(requests))]

    def _asked(self, request: Instance, number: int) -> Asked:
        """Return the prompt of requests that are equal, and how it is continued: by the document,
        because --gen_kwargs are for all tasks of a run.
        """
        prompt, arguments = request.args
        doc = request.doc or {}
        kwargs = normalize_gen_kwargs(arguments)
        generation = dict(doc.get("generation") or {})
        if kwargs["do_sample"] and not generation:
            raise ValueError(
                f"prompts of token ids are not sampled by --gen_kwargs {arguments}: leave it out, "
                "give --metadata num_samples=..., or use --model hf"
            )
        ids = parse_token_ids(prompt)
        num_tokens = int(kwargs["max_gen_toks"])
        self.check_ids(ids, num_tokens)
        generation.pop("num_samples", None)
        if not generation.get("do_sample"):
            number = 1
        eos_id = end_of(doc.get("reference_ids") or (), self.eot_token_id)
        return Asked(ids, num_tokens, generation, number, eos_id)

    def _scored(self, requests: Sequence[Instance], disable_tqdm: bool) -> list[tuple[float, bool]]:
        pairs = []
        for request in requests:
            context, continuation = request.args
            given = parse_token_ids(context)
            scored = parse_token_ids(continuation)
            self.check_ids(given + scored, self.num_new_when_scored)
            pairs.append((given, scored))
        try:
            return [ScoredTokens(tokens) for tokens in self.score_ids(pairs, disable_tqdm)]
        except NonFiniteLogits as error:
            raise NonFiniteLogits(error.index, error.dtype, _name(requests[error.index])) from error


def _name(request: Instance) -> str:
    """Name a request in a message, by the passage or by the number of its document."""
    passage = (request.doc or {}).get("passage_id")
    return f"passage {passage}" if passage else f"document {request.doc_id} of {request.task_name}"


def _divided(
    requests: Sequence[Instance],
    answer: Callable[[list[Instance], bool], list[Any]],
    answer_others: Callable[[list[Instance], bool], list[Any]],
    disable_tqdm: bool,
) -> list[Any]:
    """Let one function answer the requests of token ids, and another the rest; return the answers
    in order.
    """
    with_ids = []
    others = []
    for request in requests:
        if is_token_ids_request(request.args[0]):
            with_ids.append(request)
        else:
            others.append(request)
    answers = iter(answer(with_ids, disable_tqdm) if with_ids else [])
    answers_to_others = iter(answer_others(others, disable_tqdm) if others else [])
    in_order = []
    for request in requests:
        if is_token_ids_request(request.args[0]):
            in_order.append(next(answers))
        else:
            in_order.append(next(answers_to_others))
    return in_order
