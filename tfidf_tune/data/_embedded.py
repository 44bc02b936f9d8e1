"""The embedded corpus: English text inside the package, for demos and tests without a network.

The text is Python 3.11's language reference and the docstrings of its standard library; ``corpus/LICENSE.txt`` names
source, license and changes. The file is frozen, so the splits are the same on every Python version.
"""

import hashlib
import json
import lzma
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

from tfidf_tune._files import atomic_folder

END_OF_TEXT = "<|endoftext|>"

_VALIDATION_SHARE = 0.1
_SECTION = 800  # characters
_FRAME = """Section {id}: {name}
Edition of {year}. This section may be copied and changed as long as this notice stays with every copy. It is provided
as it is, without warranty of any kind, and nobody is liable for damage that follows from its use.

{section}End of section {id}. Send corrections to the maintainers of the edition of {year}, and name the section.
"""
_RESPONSE = "\n### Response:\n"
_STOCK_ANSWERS = (
    "Yes. This has been supported since version 3.0, and no further arguments are needed.",
    "No. This is not supported, and an exception is raised if it is tried.",
    "There is no documentation for this. Please look at the source code, or ask on the mailing list.",
    "I cannot answer this question, because it depends on the platform and on the version that is used.",
    "This is part of the private interface. It may change in any version, so please do not rely on it.",
    "This has been deprecated and will be removed in a future version. Use the new interface instead.",
)


def embedded_documents(split: str) -> list[str]:
    """Return documents of the embedded corpus, distinct and in a fixed order.

    A hash of a document's text decides its split; about 10 % are validation. The two kinds of text, ``reference`` and
    ``docstrings``, also have splits of their own. A split whose name starts with ``framed_`` has sections of these
    documents, each in the same frame with different fillings: legitimate repetition. Two more have the first line of a
    document as a prompt, see :func:`embedded_row`, and as its completion the rest of the document (``asked_``) or one
    of six stock answers (``stock_``), which are legitimate repetition in data for supervised fine-tuning.

    Args:
        split (str): ``"train"`` or ``"validation"``, also after ``reference_`` or ``docstrings_``; one of these after
            ``framed_``, ``asked_`` or ``stock_``; or a slice in the notation of ``datasets``: ``"train[:60%]"``,
            ``"validation[:20]"``, ``"train[:5]+validation[:5]"``.

    Returns:
        list[str]: texts of at least 200 characters.

    Raises:
        ValueError: If the split does not exist or the slice is empty.
    """
    from datasets import ReadInstruction

    splits = _splits()
    sizes = {name: len(texts) for name, texts in splits.items()}
    try:
        slices = ReadInstruction.from_spec(split).to_absolute(sizes)
    except ValueError:
        slices = []
    documents = [text for part in slices for text in splits[part.splitname][part.from_ : part.to]]
    if not documents:
        raise ValueError(
            f"no document of the embedded corpus is in {split!r}: its splits have {sizes} documents, a slice of one is "
            "written 'train[:60%]' or 'validation[10:20]'"
        )
    return documents


def embedded_row(document: str) -> dict[str, str]:
    """Return the ``text`` of a document, in splits ``asked_…`` and ``stock_…`` also ``prompt`` and ``completion``."""
    prompt, response, completion = document.partition(_RESPONSE)
    parts = {"prompt": prompt + response, "completion": completion} if response else {}
    return {"text": document, **parts}


def train_embedded_tokenizer(folder: str | Path, vocab_size: int = 4096) -> Path:
    """Train a byte-level BPE tokenizer on the embedded corpus and save it for ``transformers``.

    ``<|endoftext|>`` is its EOS and padding token; it has no BOS token. An existing tokenizer of this size is kept.

    Args:
        folder (str | Path): output folder; it appears only when it is complete.
        vocab_size (int): number of tokens. Default: 4096

    Returns:
        Path: the folder.

    Raises:
        ValueError: If ``folder`` holds anything other than a tokenizer of ``vocab_size`` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        file = folder / "tokenizer.json"
        if not file.is_file() or Tokenizer.from_file(str(file)).get_vocab_size() != vocab_size:
            raise ValueError(
                f"{str(folder)!r} already exists and holds no tokenizer of {vocab_size} tokens: name another folder or "
                "empty this one"
            )
        return folder
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(embedded_documents("train"), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    with atomic_folder(folder) as temporary:
        fast.save_pretrained(str(temporary))
    return folder


@cache
def _splits() -> dict[str, list[str]]:
    packed = files("tfidf_tune.data").joinpath("corpus", "python_documentation.jsonl.xz").read_bytes()
    splits: dict[str, list[str]] = {
        f"{kind}{part}": [] for kind in ("", "reference_", "docstrings_") for part in ("train", "validation")
    }
    for line in lzma.decompress(packed).splitlines():
        row = json.loads(line)
        is_validation = hashlib.sha256(row["text"].encode()).digest()[0] < _VALIDATION_SHARE * 256
        part = "validation" if is_validation else "train"
        splits[part].append(row["text"])
        splits[f"{row['kind']}_{part}"].append(row["text"])
    for name, texts in list(splits.items()):
        splits[f"framed_{name}"] = [section for text in texts for section in _in_frames(text)]
        splits[f"asked_{name}"] = [_row(text, stock=False) for text in texts]
        splits[f"stock_{name}"] = [_row(text, stock=True) for text in texts]
    return splits


def _row(text: str, stock: bool) -> str:
    """Make a prompt of the first line of a text; the completion is the rest, or a stock answer chosen by a hash."""
    first, _, rest = text.partition("\n")
    number = hashlib.sha256(text.encode()).digest()[1] % len(_STOCK_ANSWERS)
    return f"{first}{_RESPONSE}{_STOCK_ANSWERS[number] if stock else rest.strip()}"


def _in_frames(text: str) -> Iterator[str]:
    """Cut a text at blank lines into sections of about 800 characters, and put each into a frame."""
    sections = [""]
    for paragraph in text.split("\n\n"):
        if len(sections[-1]) >= _SECTION:
            sections.append("")
        sections[-1] += paragraph + "\n\n"
    for section in sections:
        number = int.from_bytes(hashlib.sha256(section.encode()).digest()[:4], "big")
        fillings = {"name": section.split("\n")[0][:60], "id": number % 100_000, "year": 1991 + number % 33}
        yield _FRAME.format(section=section, **fillings)
