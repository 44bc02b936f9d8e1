"""A SentencePiece tokenizer small enough for any test."""

from collections.abc import Iterable
from pathlib import Path


def train_sentencepiece(folder: Path, sentences: Iterable[str], vocab_size: int) -> Path:
    """Write a ``tokenizer.model`` trained as Llama's was, and nothing else."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    return folder
