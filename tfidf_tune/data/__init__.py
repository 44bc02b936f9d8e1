"""How text becomes tensors: sources, tokenizers and data sets."""

from tfidf_tune._tokenizer import (
    HFTokenizer,
    TextTokenizer,
    hf_tokenizer,
    tokenizer_fingerprint,
    tokenizer_name,
)
from tfidf_tune.corpus.sources import (
    TextSource,
    embedded_documents,
    load_documents,
    load_rows,
    source_fingerprint,
    train_embedded_tokenizer,
)
from tfidf_tune.data._injected_corpus import injected_corpus_dataset
from tfidf_tune.data._sft import sft_dataset
from tfidf_tune.data.sequences import (
    CompletionsDataset,
    InjectedCorpusDataset,
    SequenceDataset,
    TextBlocksDataset,
    collate_packed,
    is_packed,
)
from tfidf_tune.data.squad_and_news import cnn_dailymail_dataset, squad_dataset
from tfidf_tune.data.text import text_blocks, text_blocks_dataset, text_dataset

__all__ = [
    "CompletionsDataset",
    "HFTokenizer",
    "InjectedCorpusDataset",
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
    "sft_dataset",
    "source_fingerprint",
    "squad_dataset",
    "text_blocks",
    "text_blocks_dataset",
    "text_dataset",
    "tokenizer_fingerprint",
    "tokenizer_name",
    "train_embedded_tokenizer",
]
