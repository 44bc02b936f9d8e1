"""Text, tokens and the memorization corpus."""

from tfidf_tune.data._injected_passages import InjectedCanaries, injected_corpus_dataset
from tfidf_tune.data._passages import Passage, read_probe_file, write_probe_file
from tfidf_tune.data._probe_making import MadeProbe, ProbeSpec, make_probe
from tfidf_tune.data._sequences import (
    CompletionsDataset,
    InjectedCorpusDataset,
    SequenceDataset,
    TextBlocksDataset,
    collate_packed,
    is_packed,
)
from tfidf_tune.data._sft import sft_dataset
from tfidf_tune.data._sources import (
    TextSource,
    embedded_documents,
    load_documents,
    load_rows,
    source_fingerprint,
    train_embedded_tokenizer,
)
from tfidf_tune.data._squad_and_news import cnn_dailymail_dataset, squad_dataset
from tfidf_tune.data._text import text_blocks, text_blocks_dataset, text_dataset
from tfidf_tune.data._tokenizer import HFTokenizer, TextTokenizer, hf_tokenizer, tokenizer_fingerprint, tokenizer_name

__all__ = [
    "CompletionsDataset",
    "HFTokenizer",
    "InjectedCanaries",
    "InjectedCorpusDataset",
    "MadeProbe",
    "Passage",
    "ProbeSpec",
    "SequenceDataset",
    "TextBlocksDataset",
    "TextSource",
    "TextTokenizer",
    "cnn_dailymail_dataset",
    "collate_packed",
    "embedded_documents",
    "hf_tokenizer",
    "injected_corpus_dataset",
    "is_packed",
    "load_documents",
    "load_rows",
    "make_probe",
    "read_probe_file",
    "sft_dataset",
    "source_fingerprint",
    "squad_dataset",
    "text_blocks",
    "text_blocks_dataset",
    "text_dataset",
    "tokenizer_fingerprint",
    "tokenizer_name",
    "train_embedded_tokenizer",
    "write_probe_file",
]
