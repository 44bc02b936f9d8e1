"""Two ways to send token ids to a model of the harness, whose requests are strings.

As numbers (``token_ids: 12 45 9``), which our models and the pass-through tokenizer read exactly;
as text, for any model, where ids that change when the text is tokenized again are counted; or as
numbers with a response of text.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from tfidf_tune._files import atomic_folder
from tfidf_tune._tokenizer import after_bos
from tfidf_tune.data import HFTokenizer, hf_tokenizer
from tfidf_tune.probe import longest_prefix_match

_OPENING = "token_ids:"
_ORIGINAL = "original_tokenizer"
# The harness cuts a response at the text of EOS, which therefore must not be part of a number.
_EOS = "</s>"


def token_ids_request(ids: Sequence[int]) -> str:
    """Write ids as ``token_ids: 12 45 9``."""
    return " ".join([_OPENING, *map(str, ids)])


def is_token_ids_request(text: str) -> bool:
    """Return whether a request was written by :func:`token_ids_request`."""
    return text.startswith(_OPENING)


def parse_token_ids(text: str) -> list[int]:
    """Read the ids of a request, or of a response, which has no opening word; refuse anything else
    by a ValueError.
    """
    words = text.removeprefix(_OPENING).split()
    if not all(word.isdecimal() for word in words):
        raise ValueError(
            f"expected token ids as numbers, got {text[:80]!r}: use `tfidf-tune eval`, or "
            "`tfidf-tune tasks --token-ids-tokenizer`, without chat template and system"
        )
    return [int(word) for word in words]


def save_token_ids_tokenizer(name: str, folder: str | os.PathLike[str]) -> None:
    """Write a pass-through tokenizer, with which the harness's stock ``hf`` model takes prompts of
    token ids.

    Its vocabulary is the numbers of the model's embedding, so that ``12`` becomes the id 12;
    nothing is added to a text. The original tokenizer is saved in a subfolder, for the tasks.

    Args:
        name (str): folder or hub id of the model or its tokenizer.
        folder (str | os.PathLike[str]): output folder; must not exist or be empty.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: If ``folder`` is not empty, or ``name`` has
            no tokenizer.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{str(folder)!r} already exists and is not empty: name another folder"
        )
    # As many numbers as the embedding has rows, which can be more than the tokenizer has tokens.
    original = hf_tokenizer(name)
    try:
        num_embeddings = int(AutoConfig.from_pretrained(name, trust_remote_code=False).vocab_size)
    except (OSError, ValueError, AttributeError):  # only a tokenizer
        num_embeddings = 0
    size = max(original.vocab_size, num_embeddings)
    # The decimal form of each id, except EOS, which the harness looks for as text.
    vocab = {}
    for token_id in range(size):
        text = _EOS if token_id == original.eos_id else str(token_id)
        vocab[text] = token_id
    # No token for unknown words: everything but numbers is refused.
    tokenizer = Tokenizer(models.WordLevel(vocab))
    eos_as_number = Regex(rf"(?<!\d){original.eos_id}(?!\d)")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(_OPENING, ""), normalizers.Replace(eos_as_number, _EOS)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS)
    with atomic_folder(folder) as temporary:
        fast.save_pretrained(str(temporary))
        original.save_pretrained(temporary / _ORIGINAL)


def original_tokenizer(name: str) -> str | None:
    """Return the folder of the original tokenizer if ``name`` is a pass-through tokenizer, else
    None.
    """
    folder = Path(name).expanduser() / _ORIGINAL
    return str(folder) if folder.is_dir() else None


@dataclass(frozen=True)
class TokenIdPrompts:
    """Numbers, for our model or the pass-through tokenizer; each document of a task carries the
    settings.
    """

    settings: dict[str, Any]
    tokenizer: HFTokenizer
    harness_tokenizer: Any = None
    positions: int | None = None  # of the model, if they are known
    backend: str = ""  # the harness's name for what answers; "" if it is not known
    is_served: bool = False  # whether that is a server

    def check_length(self, num_tokens: int, shorten: str) -> None:
        """Raise a ``ValueError`` if the model has fewer positions than the longest sequence has
        tokens.

        The harness would truncate prompts at their start. ``shorten`` names the settings to lower.
        """
        if self.positions is not None and num_tokens > self.positions:
            raise ValueError(
                f"sequences of {num_tokens} tokens exceed the model's limit of {self.positions}: "
                f"lower {shorten} by {num_tokens - self.positions} or more"
            )

    @property
    def bos_ids(self) -> list[int]:
        """BOS, if the model gets it before ids; else no ids."""
        bos_id = self.tokenizer.bos_id
        if self.settings["bos"] and bos_id is not None:
            return [bos_id]
        return []

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """Return ids as the model gets them: after BOS, unless they have it or the
        model gets none.
        """
        return after_bos(ids, self.bos_ids)

    def request(self, ids: Sequence[int]) -> str:
        """Return the request for a continuation of ids, of which none is added or removed."""
        return token_ids_request(ids)

    def is_exact(self, ids: Sequence[int], reference_ids: Sequence[int] = ()) -> bool:
        """Return whether the model sees exactly the ids of a request, and an answer of the
        reference has its ids.
        """
        return True

    def document(self, ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Return the fields of a document that asks for a continuation of ids."""
        return {
            "request": self.request(ids),
            "round_trip": self.is_exact(ids),
            "num_prompt_tokens": len(ids),
            "max_new_tokens": max_new_tokens,
        }

    @property
    def advice(self) -> str:
        """Say what it means that ids change as text, and what a user of this backend can do about
        it.
        """
        return ""  # they do not

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of turns in the tokenizer's chat template, up to where
        the model answers.
        """
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids

    def scored_text(self, ids: Sequence[int], num_given: int = 1) -> dict[str, Any]:
        """Return the request for the log-likelihood of ids given the first ones, as fields of a
        task's document.

        ``num_predictions`` are the scored tokens as the model sees them; ``round_trip`` is whether
        it sees these ids.
        """
        return {
            "request": token_ids_request(self.with_bos(ids[:num_given])),
            "continuation": " " + " ".join(map(str, ids[num_given:])),
            "num_predictions": len(ids) - num_given,
            "round_trip": True,
        }

    def response_ids(
        self, response: str, prompt_ids: Sequence[int], reference_ids: Sequence[int]
    ) -> list[int]:
        """Return the ids of a continuation."""
        return parse_token_ids(response)

    def response_text(self, response: str) -> str:
        """Return the text of a continuation."""
        return self.tokenizer.decode(parse_token_ids(response))


class TextPrompts(TokenIdPrompts):
    """Text, for any model.

    ``harness_tokenizer`` is the model's as the harness loads it. It adds BOS, unless
    ``add_bos_token`` is False.
    """

    bos_ids: Any = ()

    @property
    def advice(self) -> str:
        if self.is_served:
            return (
                "the model sees different token ids: the text is tokenized for the server, perhaps "
                "with a BOS, which no setting here changes; if it takes token ids, as vLLM, "
                "SGLang and llama.cpp do, send these: --send ids of an audit, or --metadata "
                "prompts=ids_to_text and a tokenizer of `tfidf-tune tasks "
                "--token-ids-tokenizer` in an evaluation"
            )
        # How the same model gets ids, by the harness's name for what loads it.
        if self.backend == "hf":
            sends_ids = "`tfidf-tune eval` without --model"
        elif self.backend == "vllm":
            sends_ids = "--model tfidf-vllm of `tfidf-tune eval`"
        elif self.backend in ("tfidf-hf", "tfidf-vllm"):
            sends_ids = "an evaluation without prompts=text"
        else:
            sends_ids = (
                "`tfidf-tune eval` or a tokenizer of `tfidf-tune tasks --token-ids-tokenizer`"
            )
        may_add_bos = ""
        if self.settings["bos"] is not False:
            may_add_bos = (
                "without add_bos_token=False in --model_args the tokenizer may add a BOS to each; "
            )
        return f"the model sees different token ids: {may_add_bos}{sends_ids} sends ids instead"

    def request(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def is_exact(self, ids: Sequence[int], reference_ids: Sequence[int] = ()) -> bool:
        return self._seen(self._text(ids)) == list(ids) and self._reads_back(ids, reference_ids)

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        # The server renders the turns; a model without one gets the words.
        return self.tokenizer.encode(messages[-1]["content"], add_bos=False, add_eos=False)

    def scored_text(self, ids: Sequence[int], num_given: int = 1) -> dict[str, Any]:
        text = self._text(ids)
        # The harness needs a context that is not empty and does not end in a space.
        for number in range(num_given, len(ids)):
            context = self._text(ids[:number])
            is_shorter = text.startswith(context) and len(context) < len(text)
            if is_shorter and context and not context[-1].isspace():
                break
        else:
            raise ValueError(
                f"a block of {len(ids)} tokens reads {text[:80]!r}: it leaves no text to predict"
            )
        # The harness tokenizes both, and scores what the second has more.
        given = self._seen(context)
        scored = self._seen(text)
        return {
            "request": context,
            "continuation": text[len(context) :],
            "num_predictions": len(scored) - len(given),
            "round_trip": scored == list(ids) and given == list(ids[:num_given]),
        }

    def response_ids(
        self, response: str, prompt_ids: Sequence[int], reference_ids: Sequence[int]
    ) -> list[int]:
        # A continuation tokenized by itself can start with another token than after its prompt, and
        # SentencePiece drops the space it started with. So it is tokenized in these ways, and the
        # one nearest to the reference counts.
        encode = functools.partial(self.tokenizer.encode, add_bos=False, add_eos=False)
        readings = [encode(response), encode(response, trim_leading_whitespace=True)]
        given = self._text(prompt_ids)
        joined = encode(given + response)
        if joined[: len(prompt_ids)] == list(prompt_ids):
            readings.append(joined[len(prompt_ids) :])
        # A server may strip the white space that an answer begins with: one more reading, with that
        # of the reference.
        whole = self._text([*prompt_ids, *reference_ids])
        truth = whole[len(given) :] if whole.startswith(given) else self._text(reference_ids)
        space = truth[: len(truth) - len(truth.lstrip())]
        if space and response and not response.startswith(space):
            readings.append(encode(space + response))
        return max(readings, key=lambda ids: longest_prefix_match(ids, reference_ids))

    def response_text(self, response: str) -> str:
        return response

    def _reads_back(self, ids: Sequence[int], reference_ids: Sequence[int] = ()) -> bool:
        # As HFLM decodes it.
        response = self.harness_tokenizer.decode(list(reference_ids), skip_special_tokens=True)
        return self.response_ids(response, ids, reference_ids) == list(reference_ids)

    _text = request

    def _seen(self, text: str) -> list[int]:
        """Return the ids of a text as HFLM encodes it: it adds no BOS if there is one."""
        bos = self.harness_tokenizer.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        adds = self.settings["bos"] is not False and not has_bos
        encoded = self.harness_tokenizer(text, add_special_tokens=adds, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids


class IdsToTextPrompts(TextPrompts):
    """Numbers, for a model that answers with text: ``local-completions`` with the pass-through
    tokenizer.
    """

    @property
    def advice(self) -> str:
        return (
            "the model sees the ids of each prompt, but an answer with the ids of the passage is "
            "read as others: measures can differ by about a token"
        )

    bos_ids = TokenIdPrompts.bos_ids
    request = TokenIdPrompts.request
    is_exact = TextPrompts._reads_back
    scored_text = TokenIdPrompts.scored_text


def prompts_of(doc: Mapping[str, Any]) -> TokenIdPrompts:
    """Return how the ids of a task's document were sent."""
    return cached_prompts(doc["tokenizer"], doc["prompts"], doc["bos"])


@functools.cache
def cached_prompts(name: str, prompts: str, bos: bool | None) -> TokenIdPrompts:
    """Load a tokenizer; empty this cache if another one may be in a folder of the same name."""
    settings = {"tokenizer": name, "prompts": prompts, "bos": bos}
    tokenizer = hf_tokenizer(name)
    if prompts == "token_ids":
        return TokenIdPrompts(settings, tokenizer)
    # None lets transformers ask on the terminal whether to run code of the model.
    arguments: dict[str, Any] = {"trust_remote_code": False}
    if bos is not None and prompts == "text":
        arguments["add_bos_token"] = bos
    harness_tokenizer = AutoTokenizer.from_pretrained(name, **arguments)
    if prompts == "ids_to_text":
        return IdsToTextPrompts(settings, tokenizer, harness_tokenizer)
    return TextPrompts(settings, tokenizer, harness_tokenizer)
