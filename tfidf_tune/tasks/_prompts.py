"""Token ids as requests of the harness, whose requests and responses are strings.

Either as numbers (``token_ids: 12 45 9``), which our model and the pass-through tokenizer read back exactly, or as text
for any model, and then it is counted what does not survive being tokenized again.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import AutoTokenizer

from tfidf_tune.analysis import longest_prefix_match
from tfidf_tune.data import HFTokenizer, hf_tokenizer
from tfidf_tune.tasks._token_ids import original_tokenizer, parse_token_ids, token_ids_request

PROMPTS = ("token_ids", "text")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """What the model is sent for token ids.

    Attributes:
        request: the string.
        exact: whether the model sees exactly the ids.
    """

    request: str
    exact: bool


@dataclass(frozen=True)
class ScoredText:
    """What the model is sent to score ids after the first.

    Attributes:
        context: the string that is given.
        continuation: the string whose log-likelihood is asked for.
        num_predictions: how many tokens the model predicts for it.
        exact: whether it predicts exactly the ids after the first, given exactly those before.
    """

    context: str
    continuation: str
    num_predictions: int
    exact: bool


class Prompts(Protocol):
    """One way to ask a model."""

    @property
    def tokenizer(self) -> HFTokenizer:
        """The model's."""

    def prompt(self, ids: Sequence[int]) -> Prompt:
        """Ids -> what to send for a continuation."""

    def scored_text(self, ids: Sequence[int]) -> ScoredText:
        """Ids -> what to send for their log-likelihood given the first."""

    def response_ids(self, response: str, prompt_ids: Sequence[int], reference_ids: Sequence[int]) -> list[int]:
        """Response -> ids of the continuation."""

    def response_text(self, response: str) -> str:
        """Response -> text of the continuation."""

    def survives(self, prompt_ids: Sequence[int], reference_ids: Sequence[int]) -> bool:
        """Whether the model sees the prompt's ids and :meth:`response_ids` of saying the reference are its ids."""


@dataclass(frozen=True)
class TokenIdPrompts:
    """Numbers, for our model or the pass-through tokenizer."""

    tokenizer: HFTokenizer

    def prompt(self, ids: Sequence[int]) -> Prompt:
        return Prompt(token_ids_request(ids), exact=True)

    def scored_text(self, ids: Sequence[int]) -> ScoredText:
        continuation = " " + " ".join(map(str, ids[1:]))
        return ScoredText(token_ids_request(ids[:1]), continuation, num_predictions=len(ids) - 1, exact=True)

    def response_ids(self, response: str, prompt_ids: Sequence[int], reference_ids: Sequence[int]) -> list[int]:
        return parse_token_ids(response)

    def response_text(self, response: str) -> str:
        return self.tokenizer.decode(parse_token_ids(response))

    def survives(self, prompt_ids: Sequence[int], reference_ids: Sequence[int]) -> bool:
        return True


@dataclass(frozen=True)
class TextPrompts:
    """Text, for any model.

    Attributes:
        tokenizer: the model's.
        harness_tokenizer: the same as the harness loads it; with ``add_bos_token`` it may be one that adds BOS.
        add_bos_token: of the model's arguments; unless it is False, the model may see a BOS that training did not see.
    """

    tokenizer: HFTokenizer
    harness_tokenizer: Any
    add_bos_token: bool | None

    def prompt(self, ids: Sequence[int]) -> Prompt:
        text = self._text(ids)
        return Prompt(text, exact=self._seen(text) == list(ids))

    def scored_text(self, ids: Sequence[int]) -> ScoredText:
        text = self._text(ids)
        # The harness takes a context without spaces at its end, and none that is empty.
        for num_given in range(1, len(ids)):
            context = self._text(ids[:num_given])
            if context and not context[-1].isspace() and text.startswith(context) and len(context) < len(text):
                break
        else:
            raise ValueError(f"a block of {len(ids)} tokens reads {text[:80]!r}: there is no text to predict")
        given, whole = self._seen(context), self._seen(text)
        return ScoredText(
            context,
            text[len(context) :],
            num_predictions=len(whole) - len(given),
            exact=whole == list(ids) and given == list(ids[:1]),
        )

    def response_ids(self, response: str, prompt_ids: Sequence[int], reference_ids: Sequence[int]) -> list[int]:
        # Seen alone, a continuation may start with another token than seen after its prompt, and SentencePiece drops
        # the space it started with. So it is tokenized in these ways, and the one nearest to the reference counts.
        readings = [self._encode(response), self._encode_continuation(response)]
        joined = self._encode(self._text(prompt_ids) + response)
        if joined[: len(prompt_ids)] == list(prompt_ids):
            readings.append(joined[len(prompt_ids) :])
        return max(readings, key=lambda ids: longest_prefix_match(ids, reference_ids))

    def response_text(self, response: str) -> str:
        return response

    def survives(self, prompt_ids: Sequence[int], reference_ids: Sequence[int]) -> bool:
        said = self.response_ids(self._said(reference_ids), prompt_ids, reference_ids)
        return self.prompt(prompt_ids).exact and said == list(reference_ids)

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _said(self, ids: Sequence[int]) -> str:
        """What HFLM makes of a continuation."""
        text: str = self.harness_tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_batch([text])[0]

    def _encode_continuation(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_bos=False, add_eos=False, trim_leading_whitespace=True)

    def _seen(self, text: str) -> list[int]:
        """What HFLM makes of a text: it adds no BOS where there is one."""
        bos = self.harness_tokenizer.bos_token
        adds = self.add_bos_token is not False and not (bos and text.startswith(bos))
        ids: list[int] = self.harness_tokenizer(text, add_special_tokens=adds, verbose=False)["input_ids"]
        return ids


def prompt_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Decide from the harness's metadata how the model is asked.

    Args:
        metadata (Mapping[str, Any]): the model's arguments and ``--metadata``: ``tokenizer`` or ``pretrained``;
            ``prompts``, "token_ids" or "text"; ``add_bos_token``.

    Returns:
        dict[str, Any]: plain values that a document of a task can carry, for :func:`prompts_of`.

    Raises:
        ValueError: If there is no tokenizer to be known, or ``prompts`` is neither of the two.
    """
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not name:
        raise ValueError(
            "these tasks need the model's tokenizer: give --model_args pretrained=MODEL, or --metadata tokenizer=FOLDER"
        )
    original = original_tokenizer(str(name))
    prompts = metadata.get("prompts") or ("text" if original is None else "token_ids")
    if prompts not in PROMPTS:
        raise ValueError(f"prompts must be one of {', '.join(PROMPTS)}, got {prompts!r}")
    return {
        "tokenizer": str(original or name),
        "prompts": prompts,
        "add_bos_token": metadata.get("add_bos_token"),
    }


def prompts_of(settings: Mapping[str, Any]) -> Prompts:
    """Give the way that :func:`prompt_settings` decided on.

    Args:
        settings (Mapping[str, Any]): its result, or a document that carries it.

    Returns:
        Prompts: the same object for the same settings.
    """
    return _prompts(settings["tokenizer"], settings["prompts"], settings["add_bos_token"])


def warn_of_losses(num_lost: int, num_all: int, what: str, settings: Mapping[str, Any]) -> None:
    """Say how much text prompts lose, if anything, and what would not.

    Args:
        num_lost (int): how many are not exact.
        num_all (int): of how many.
        what (str): what they are.
        settings (Mapping[str, Any]): of :func:`prompt_settings`.
    """
    if not num_lost:
        return
    remedies = ["`tfidf-tune eval` or a tokenizer of `tfidf-tune tasks --token-ids-tokenizer` sends ids instead"]
    if settings["add_bos_token"] is not False:
        remedies.insert(0, "without add_bos_token=False in --model_args the tokenizer may add a BOS to each")
    logger.warning(
        "%d of %d %s do not survive as text, the model sees other token ids: %s",
        num_lost,
        num_all,
        what,
        "; ".join(remedies),
    )


@functools.cache
def _prompts(name: str, prompts: str, add_bos_token: bool | None) -> Prompts:
    tokenizer = hf_tokenizer(name)
    if prompts == "token_ids":
        return TokenIdPrompts(tokenizer)
    arguments = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    return TextPrompts(tokenizer, AutoTokenizer.from_pretrained(name, **arguments), add_bos_token)
