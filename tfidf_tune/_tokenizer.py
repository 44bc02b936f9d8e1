"""Tokenizers: what the data sets need of one, and any Hugging Face tokenizer as a torchtune
tokenizer.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tfidf_tune._checks import check_at_least, require_bool
from tfidf_tune._files import (
    digest,
    is_hub_unreachable,
    looks_like_path,
    not_on_this_machine,
    require_model_folder,
)

if TYPE_CHECKING:
    from torchtune.data import Message
    from transformers import PreTrainedTokenizerBase

TokenArray = npt.NDArray[np.int32]

MAX_TEXT_BYTES = 10_000_000
"""The longest text that is tokenized, in bytes of UTF-8. A tokenizer takes 100 to 350 times as much
memory and ends the process if it does not get it. The ids of a text that is split into pieces can
differ."""

_TOKENIZER_FILES = ("tokenizer", "vocab", "tekken", "spiece", "sentencepiece")  # parts of names

# verbose=False: the warning about long texts is not meant for texts that are cut into blocks.
_ENCODING = {
    "add_special_tokens": False,
    "return_attention_mask": False,
    "truncation": False,
    "verbose": False,
}

_BATCH_SIZE = (
    256  # texts; enough for a fast tokenizer's threads. A batch has at most MAX_TEXT_BYTES bytes.
)

# Words, cases, digits, spaces, line ends, accents (also decomposed), compatibility characters,
# several scripts, and emoji with joiners, to distinguish tokenizers by their ids.
_SAMPLE_TEXT = (
    "The quick brown fox, aged 27, jumped over 3.14 lazy dogs' tails!  (Don't ask why.)\n\n"
    "\tdef f(x):\n        return x ** 2  # naïve café, straße\n"
    "Information-theoretic weighting; дюйм, 東京, مرحبا, 🙂 <unk> </s> @-@ §12\r\n"
    "cafe\u0301 \u1100\u1161 \ufb01ne \u00bd \u2460 \uff26\uff55\uff4c\uff4c \uff76\uff9e "
    "\u0130STANBUL \u1e9e 1234567890 \u00a0\u20ac\u200b\u3000\u0939\u093f\u0928\u094d\u0926\u0940 "
    "\u0e20\u0e32\u0e29\u0e32   \U0001f469\U0001f3fd\u200d\U0001f4bb \r "
)

# The parts of a fast tokenizer that decide on the ids of a text without special tokens. What else
# it has, such as a length to cut to, a decoder and a template of special tokens, changes with its
# use or changes no ids.
_ID_RULES = ("normalizer", "pre_tokenizer", "model", "added_tokens")


class TextTokenizer(Protocol):
    """The part of a torchtune tokenizer that plain text needs."""

    eos_id: int
    vocab_size: int
    max_seq_len: int | None

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Return the token ids of ``text``."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``."""


def encode_texts(tokenizer: TextTokenizer, texts: Iterable[str]) -> Iterator[TokenArray]:
    """Yield the ids of texts in order, int32 of shape ``[num_tokens]``, without BOS and EOS.

    Texts are read lazily, one batch ahead. The tokenizer's ``encode_batch(texts)`` is used for
    speed if it has one.
    """
    encode_batch = getattr(tokenizer, "encode_batch", None)
    for batch in _batches(texts):
        one_by_one = (tokenizer.encode(text, add_bos=False, add_eos=False) for text in batch)
        for ids in encode_batch(batch) if encode_batch else one_by_one:
            yield np.asarray(ids, dtype=np.int32)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    # Limited in texts and in bytes: short texts fill the threads, long ones would fill the memory.
    batch: list[str] = []
    size = 0
    for text in texts:
        num_bytes = count_bytes(text)
        if batch and (len(batch) == _BATCH_SIZE or size + num_bytes > MAX_TEXT_BYTES):
            yield batch
            batch = []
            size = 0
        batch.append(text)
        size += num_bytes
    if batch:
        yield batch


def count_bytes(text: str) -> int:
    """Return the number of bytes of ``text`` in UTF-8."""
    return len(text.encode(errors="replace"))


def decode_whole(tokenizer: TextTokenizer, ids: list[int]) -> str:
    """Decode ids with the special tokens among them: a corpus can spell them out, as WikiText has
    "<unk>".
    """
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.decode(ids, skip_special_tokens=False)
    # Not all of torchtune's tokenizers have that option.
    return tokenizer.decode(ids)


def bos_ids(tokenizer: TextTokenizer) -> list[int]:
    """Return BOS as a list, empty if the tokenizer has none."""
    return tokenizer.encode("", add_bos=True, add_eos=False)


def known_bos(tokenizer: TextTokenizer, recorded: bool | None = None) -> bool | None:
    """Return whether a model was trained with BOS: as its run ``recorded``, or else as its
    tokenizer adds it.

    None if neither says it; False if the tokenizer has no BOS.
    """
    if not bos_ids(tokenizer):
        return False
    if recorded is not None:
        return recorded
    return True if getattr(tokenizer, "adds_bos", False) else None


def after_bos(ids: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return ids after ``before``, BOS or nothing, unless they start with it."""
    return list(ids) if list(ids[: len(before)]) == list(before) else [*before, *ids]


def check_fits_model(tokenizer: TextTokenizer, *, lower: str, **lengths: int) -> None:
    """Refuse lengths in tokens that are together above the tokenizer's ``max_seq_len``; ``lower``
    is the remedy.
    """
    num_tokens = sum(lengths.values())
    if tokenizer.max_seq_len is not None and num_tokens > tokenizer.max_seq_len:
        raise ValueError(
            f"{' + '.join(lengths)} is {num_tokens}, above max_seq_len {tokenizer.max_seq_len}, "
            f"the tokenizer's own or the model's limit: lower {lower}"
        )


def tokenizer_name(tokenizer: TextTokenizer) -> str:
    """Return the display name of a tokenizer: its ``name``, or that of its class."""
    return str(getattr(tokenizer, "name", type(tokenizer).__name__))


def tokenizer_fingerprint(tokenizer: TextTokenizer) -> str:
    """Return 16 hexadecimal digits by which training and evaluation check that they use the same
    tokenizer.

    They are the tokenizer's ``fingerprint``, or a hash of its ``vocab_size`` and of the ids of a
    fixed sample text.
    """
    return str(
        getattr(tokenizer, "fingerprint", None) or _fingerprint(tokenizer, tokenizer.vocab_size)
    )


def tokenizer_identity(tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return all of a tokenizer that ids and passages can depend on, JSON data.

    The fingerprint alone is not enough: BOS and EOS are put around documents, and special tokens
    are left out of decoded text and of measured answers, whatever the vocabulary is.
    """
    return {
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "bos_ids": bos_ids(tokenizer),
        "eos_id": tokenizer.eos_id,
        "special_ids": sorted(getattr(tokenizer, "special_tokens", {}).values()),
    }


def _fingerprint(tokenizer: TextTokenizer, rules: Any) -> str:
    return digest([rules, tokenizer.encode(_SAMPLE_TEXT, add_bos=False, add_eos=False)])


def _rules(tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Return what decides on the ids of texts, JSON data: all rules of a fast tokenizer, the
    vocabulary of another.

    No sample text shows all of the rules: a normalizer may replace one word, and merges may differ
    in one pair.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.get_vocab()
    serialized = json.loads(backend.to_str(), object_hook=_without_defaults)
    rules = {name: serialized.get(name) for name in _ID_RULES}
    for token in rules["added_tokens"] or ():
        token.pop("special", None)  # it decides on decoding alone
    return rules


def _without_defaults(setting: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is None or false: newer versions of ``tokenizers`` write further settings with
    these values.
    """
    return {
        name: value for name, value in setting.items() if value is not None and value is not False
    }


class HFTokenizer:
    """A Hugging Face tokenizer with torchtune's ``ModelTokenizer`` and ``Transform`` protocols.

    Messages are concatenated without a chat template: BOS (if the tokenizer has one) starts a turn
    and EOS ends it. In configs it is the component ``tfidf_tune.data.hf_tokenizer``.

    Args:
        path (str | PreTrainedTokenizerBase): a hub id, a folder with ``tokenizer.json`` or a
            SentencePiece ``tokenizer.model`` (read as Llama's if it is alone), or a tokenizer that
            ``transformers`` has loaded.
        max_seq_len (int | None): where :meth:`tokenize_messages` truncates. Default: None, no
            truncation.
        trust_remote_code (bool): run the Python files of a tokenizer that transformers lacks.
            Default: False.

    Attributes:
        name (str): the given ``path``, or the ``name_or_path`` of the given tokenizer.
        vocab_size (int): number of tokens, including added ones.
        max_token_id (int): largest id; above ``vocab_size - 1`` if the ids have gaps.
        bos_id (int | None): beginning of sequence.
        eos_id (int): end of sequence.
        pad_id (int): padding; ``eos_id`` if the tokenizer has none.
        stop_tokens (list[int]): EOS, where torchtune's recipes end a generation.
        special_tokens (dict[str, int]): special tokens and their ids.
        max_seq_len (int | None): as given.
        fingerprint (str): hash of what decides on the ids of a text: normalizer, pre-tokenizer,
            model with vocabulary and merges, and added tokens; of a tokenizer of ``transformers``
            without these parts, of the vocabulary and the ids of a fixed text, see
            :func:`tokenizer_fingerprint`.

    Raises:
        FileNotFoundError: If ``path`` looks like a path and the folder does not exist.
        ValueError: If no tokenizer can be loaded, it has no EOS token, or ``max_seq_len`` is below
            1.

    Example:
        >>> tokenizer = hf_tokenizer("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T")
    """

    def __init__(
        self,
        path: "str | PreTrainedTokenizerBase",
        max_seq_len: int | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        require_bool("trust_remote_code", trust_remote_code)
        if max_seq_len is not None:
            check_at_least(1, max_seq_len=max_seq_len)
        self._hf, self.name = _load(path, trust_remote_code=trust_remote_code)
        if self._hf.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {self.name!r} has no EOS token: set it in its tokenizer_config.json"
            )
        self.max_seq_len = max_seq_len
        self.vocab_size: int = len(self._hf)
        self.bos_id: int | None = self._hf.bos_token_id
        self.eos_id: int = self._hf.eos_token_id
        self.pad_id: int = self.eos_id if self._hf.pad_token_id is None else self._hf.pad_token_id
        self.stop_tokens: list[int] = [self.eos_id]
        self.special_tokens = dict[str, int](
            zip(self._hf.all_special_tokens, self._hf.all_special_ids, strict=True)
        )
        # SentencePiece puts a space (shown as ▁) before every text that it encodes.
        self._adds_leading_space = self._hf.convert_ids_to_tokens(self.encode_batch(["a"])[0])[
            0
        ].startswith("▁")
        self.max_token_id: int = max(self._hf.get_vocab().values())
        self.fingerprint = _fingerprint(self, _rules(self._hf))

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        add_eos: bool = True,
        trim_leading_whitespace: bool = False,
    ) -> list[int]:
        """Return the token ids of a text, between BOS, if the tokenizer has one, and EOS.

        ``trim_leading_whitespace`` leaves out the space that SentencePiece adds before a text.
        """
        if trim_leading_whitespace and self._adds_leading_space:
            # The space is then added before the line end, which is removed again.
            line_end, tokens = self.encode_batch(["\n", "\n" + text])
            tokens = tokens[len(line_end) :]
        else:
            tokens = self.encode_batch([text])[0]
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        return bos + tokens + ([self.eos_id] if add_eos else [])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text without BOS and EOS, faster than one by one."""
        token_ids: list[list[int]] = self._hf(list(texts), **_ENCODING)["input_ids"]
        return token_ids

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer itself starts each text with BOS."""
        return self.bos_id is not None and self._hf("a")["input_ids"][:1] == [self.bos_id]

    def encode_with_offsets(self, text: str) -> tuple[TokenArray, TokenArray]:
        """Return the ids of a text without BOS and EOS, and the characters where each starts and
        ends in the text.

        Both are int32, ``[num_tokens]`` and ``[num_tokens, 2]``. The tokenizer has to be a fast
        one.
        """
        encoded = self._hf(text, return_offsets_mapping=True, **_ENCODING)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int32).reshape(-1, 2)
        return np.array(encoded["input_ids"], dtype=np.int32), offsets

    def get_chat_template(self) -> str | None:
        """Return the Jinja source of the tokenizer's own chat template, None if it has none."""
        template: str | None = self._hf.get_chat_template() if self._hf.chat_template else None
        return template

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        """Call ``apply_chat_template`` of the Hugging Face tokenizer."""
        return self._hf.apply_chat_template(messages, **options)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, by default without special tokens."""
        return str(
            self._hf.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def tokenize_messages(
        self, messages: list["Message"], add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of messages, EOS after those of the assistant, and whether the message of
        each is masked.
        """
        import tfidf_tune._torchao

        from torchtune.modules.transforms.tokenizers import tokenize_messages_no_special_tokens

        eos_id = self.eos_id if add_end_tokens else None
        messages = list(_carry_spaces(messages))
        tokens, mask = tokenize_messages_no_special_tokens(
            self, messages, bos_id=self.bos_id, eos_id=eos_id
        )
        return tokens, mask

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace the ``messages`` of a sample by ``tokens`` and ``mask``; for inference without
        the final EOS.
        """
        sample["tokens"], sample["mask"] = self.tokenize_messages(
            sample.pop("messages"), not inference
        )
        return sample

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer's files in the format of a Hugging Face model folder."""
        self._hf.save_pretrained(str(folder))


hf_tokenizer = HFTokenizer
"""The name of :class:`HFTokenizer` as a component of configs."""


def _load(path: "str | PreTrainedTokenizerBase", *, trust_remote_code: bool) -> tuple[Any, str]:
    """Return a tokenizer and its name."""
    if not isinstance(path, str):
        return path, path.name_or_path
    from transformers import AutoTokenizer, LlamaTokenizer

    folder = Path(path).expanduser()
    needed = (
        "name a folder with tokenizer.json or tokenizer.model, or a hub id such as "
        "EleutherAI/pythia-1.4b"
    )
    if looks_like_path(path) and not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {path!r}: {needed}")
    files = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    has_tokenizer = any(part in " ".join(files) for part in _TOKENIZER_FILES)
    if folder.is_dir() and not has_tokenizer:
        require_model_folder(folder)
        # transformers would make an empty tokenizer from config.json
        raise ValueError(f"the folder {path!r} has no tokenizer files: {needed}")
    try:
        if "tokenizer.model" in files and not files & {"tokenizer.json", "tokenizer_config.json"}:
            # AutoTokenizer leaves out SentencePiece's leading space.
            return LlamaTokenizer.from_pretrained(str(folder)), path
        name = str(folder) if folder.is_dir() else path
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code), path
    except Exception as error:  # each tokenizer library has its own errors
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the tokenizer {path!r} has Python files of its own, which were not run: in a "
                "training config set trust_remote_code=True of the tokenizer if you have read and "
                "trust them, or save it as tokenizer.json"
            ) from error
        if is_hub_unreachable(error):
            raise ValueError(
                not_on_this_machine(
                    path, "the folder of a model, or one with tokenizer.json or tokenizer.model"
                )
            ) from error
        raise ValueError(
            f"cannot load a tokenizer from {path!r}: {needed}. {type(error).__name__}: {error}"
        ) from error


def _carry_spaces(messages: list["Message"]) -> Iterator["Message"]:
    """Move the spaces at the end of a message to the start of the next one of its turn.

    torchtune drops them and relies on SentencePiece to add one again. Other tokenizers do not; and
    all of them encode `"Answer: yes"` in one piece as `"Answer:", " yes"`.
    """
    import tfidf_tune._torchao

    from torchtune.data import Message

    carried = ""
    for message in messages:
        if message.contains_media:
            yield message  # torchtune refuses it with its own message
            continue
        text = carried + message.text_content
        content = text.rstrip(" ")
        carried = "" if message.role == "assistant" else text[len(content) :]
        yield Message(role=message.role, content=content, masked=message.masked, eot=message.eot)
