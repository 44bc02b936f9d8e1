"""Any Hugging Face tokenizer as a torchtune tokenizer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtune.data import Message
from torchtune.modules.transforms.tokenizers import tokenize_messages_no_special_tokens
from transformers import AutoTokenizer, LlamaTokenizer

from tfidf_tune._files import looks_like_path
from tfidf_tune.data._encoding import fingerprint_of


class HFTokenizer:
    """A Hugging Face tokenizer behind torchtune's ``ModelTokenizer`` and ``Transform`` protocols.

    Messages are concatenated without a chat template: BOS (where the tokenizer has one) opens a turn
    and EOS closes it.

    Args:
        path (str): a hub id, or a folder with ``tokenizer.json`` or a SentencePiece ``tokenizer.model``.
            A ``tokenizer.model`` without any other tokenizer file is read as Llama's.
        max_seq_len (int | None): where :meth:`tokenize_messages` cuts. Default: None, no cut.

    Attributes:
        name (str): the ``path`` given.
        vocab_size (int): number of tokens, added ones included.
        max_token_id (int): largest id, which is above ``vocab_size - 1`` if ids are left out.
        bos_id (int | None): beginning of sequence.
        eos_id (int): end of sequence.
        pad_id (int): padding; ``eos_id`` where the tokenizer has none.
        stop_tokens (list[int]): EOS, where torchtune's recipes end a generation.
        special_tokens (dict[str, int]): special tokens and their ids.
        max_seq_len (int | None): as given.
        fingerprint (str): hash of the vocabulary and of the ids of a fixed text, by which training
            and evaluation see that they use the same tokenizer.

    Raises:
        FileNotFoundError: If ``path`` looks like a path and there is no such folder.
        ValueError: If no tokenizer can be loaded from ``path``, it has no EOS token, or ``max_seq_len`` is below 1.
    """

    def __init__(self, path: str, max_seq_len: int | None = None) -> None:
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"max_seq_len is {max_seq_len}, it has to be at least 1, or null for no cut")
        self._hf = _load(path)
        if self._hf.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {path!r} has no EOS token, which ends every document: "
                'set "eos_token" in its tokenizer_config.json to a token of its vocabulary'
            )
        self.name = path
        self.max_seq_len = max_seq_len
        self.vocab_size: int = len(self._hf)
        self.bos_id: int | None = self._hf.bos_token_id
        self.eos_id: int = self._hf.eos_token_id
        self.pad_id: int = self.eos_id if self._hf.pad_token_id is None else self._hf.pad_token_id
        self.stop_tokens: list[int] = [self.eos_id]
        self.special_tokens: dict[str, int] = dict(
            zip(self._hf.all_special_tokens, self._hf.all_special_ids, strict=True)
        )
        # SentencePiece puts a space (shown as ▁) before every text it encodes.
        first_token = self._hf.convert_ids_to_tokens(self.encode_batch(["a"])[0])[0]
        self._adds_leading_space = first_token.startswith("▁")
        vocabulary = self._hf.get_vocab()
        self.max_token_id: int = max(vocabulary.values())
        self.fingerprint = fingerprint_of(self, vocabulary)

    def encode(
        self, text: str, add_bos: bool = True, add_eos: bool = True, trim_leading_whitespace: bool = False
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            text (str): the text.
            add_bos (bool): put BOS first, where the tokenizer has one.
            add_eos (bool): put EOS last.
            trim_leading_whitespace (bool): leave out the space that SentencePiece adds before a text,
                for a text that continues another one.

        Returns:
            list[int]: the ids.
        """
        if trim_leading_whitespace and self._adds_leading_space:
            # The space then goes before the line end, which is cut off again.
            line_end, tokens = self.encode_batch(["\n", "\n" + text])
            tokens = tokens[len(line_end) :]
        else:
            tokens = self.encode_batch([text])[0]
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        return bos + tokens + ([self.eos_id] if add_eos else [])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of many texts, faster than one by one, without BOS and EOS.

        Args:
            texts (Sequence[str]): the texts.

        Returns:
            list[list[int]]: the ids of each text.
        """
        # Not verbose: the warning about long texts is meant for those who do not cut them into blocks.
        encoded = self._hf(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            truncation=False,
            verbose=False,
        )
        token_ids: list[list[int]] = encoded["input_ids"]
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Args:
            token_ids (Sequence[int]): the ids.
            skip_special_tokens (bool): leave special tokens out of the text.

        Returns:
            str: the text.
        """
        text: str = self._hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def tokenize_messages(self, messages: list[Message], add_end_tokens: bool = True) -> tuple[list[int], list[bool]]:
        """Tokenize messages one by one and concatenate them.

        Args:
            messages (list[Message]): text messages.
            add_end_tokens (bool): put EOS after every message of the assistant.

        Returns:
            tuple[list[int], list[bool]]: the ids and, for each, whether its message is masked.
        """
        tokens, mask = tokenize_messages_no_special_tokens(
            tokenizer=self,
            messages=list(_carry_spaces(messages)),
            bos_id=self.bos_id,
            eos_id=self.eos_id if add_end_tokens else None,
        )
        return tokens, mask

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace the ``messages`` of a sample by ``tokens`` and ``mask``.

        Args:
            sample (dict[str, Any]): a sample with the key ``messages``.
            inference (bool): leave out the final EOS, so that a model can go on.

        Returns:
            dict[str, Any]: the same sample.
        """
        messages = sample.pop("messages")
        sample["tokens"], sample["mask"] = self.tokenize_messages(messages, add_end_tokens=not inference)
        return sample

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer's files, as a Hugging Face model folder has them.

        Args:
            folder (str | Path): made when missing.
        """
        self._hf.save_pretrained(str(folder))


def hf_tokenizer(path: str, max_seq_len: int | None = None) -> HFTokenizer:
    """Build a torchtune tokenizer from any Hugging Face tokenizer.

    Args:
        path (str): a hub id, or a folder with ``tokenizer.json`` or a SentencePiece ``tokenizer.model``.
        max_seq_len (int | None): where messages are cut. Default: None, no cut.

    Returns:
        HFTokenizer: the tokenizer.

    Raises:
        FileNotFoundError: If ``path`` looks like a path and there is no such folder.
        ValueError: If no tokenizer can be loaded from ``path``, it has no EOS token, or ``max_seq_len`` is below 1.

    Example:
        >>> tokenizer = hf_tokenizer("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T")
    """
    return HFTokenizer(path, max_seq_len=max_seq_len)


def _load(path: str) -> Any:
    folder = Path(path).expanduser()
    if looks_like_path(path) and not folder.is_dir():
        raise FileNotFoundError(
            f"no such folder: {path!r}. A tokenizer is named by a folder that holds tokenizer.json or "
            "tokenizer.model, or by a hub id such as EleutherAI/pythia-1.4b"
        )
    configured = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    only_sentencepiece = (folder / "tokenizer.model").is_file() and not configured
    # With nothing but tokenizer.model to go by, AutoTokenizer leaves out SentencePiece's leading space.
    loader = LlamaTokenizer if only_sentencepiece else AutoTokenizer
    try:
        return loader.from_pretrained(str(folder) if folder.is_dir() else path)
    except Exception as error:  # each tokenizer library has errors of its own
        raise ValueError(
            f"cannot load a tokenizer from {path!r}: it must be a folder with tokenizer.json or "
            f"tokenizer.model, or a hub id that can be reached. {type(error).__name__}: {error}"
        ) from error


def _carry_spaces(messages: list[Message]) -> Iterator[Message]:
    """Move the spaces that end a message to the start of the next one of its turn.

    torchtune drops them, counting on SentencePiece to put one back. Other tokenizers do not; and
    `"Answer:", " yes"` is how all of them encode `"Answer: yes"` in one piece.
    """
    carried = ""
    for message in messages:
        if message.contains_media:
            yield message  # torchtune refuses it with its own words
            continue
        text = carried + message.text_content
        content = text.rstrip(" ")
        carried = "" if message.role == "assistant" else text[len(content) :]
        yield Message(role=message.role, content=content, masked=message.masked, eot=message.eot)
