"""Text, tokens and the memorization corpus."""

from tfidf_tune.data._cnn_dailymail import cnn_dailymail_dataset, summarization_prompt
from tfidf_tune.data._embedded import embedded_documents, train_embedded_tokenizer
from tfidf_tune.data._encoding import TextTokenizer, tokenizer_fingerprint, tokenizer_name
from tfidf_tune.data._injected_corpus import InjectedCorpusDataset, injected_corpus_dataset
from tfidf_tune.data._injection import (
    Candidate,
    Injection,
    choose_passages,
    inject_aligned,
    inject_concatenated,
)
from tfidf_tune.data._packing import PackedBatch, PackedRow, collate_packed, is_packed, pack
from tfidf_tune.data._passages import Passage, read_probe_file, write_probe_file
from tfidf_tune.data._probe_making import MadeProbe, ProbeSpec, make_probe
from tfidf_tune.data._sft import PromptTargetDataset, encode_prompts
from tfidf_tune.data._sources import load_documents, load_rows, source_fingerprint
from tfidf_tune.data._squad import squad_dataset, squad_prompt
from tfidf_tune.data._text import TextDataset, text_dataset
from tfidf_tune.data._text_blocks import TextBlocksDataset, text_blocks, text_blocks_dataset, without_shared_text
from tfidf_tune.data._tokenizer import HFTokenizer, hf_tokenizer

__all__ = [
    "Candidate",
    "HFTokenizer",
    "InjectedCorpusDataset",
    "Injection",
    "MadeProbe",
    "PackedBatch",
    "PackedRow",
    "Passage",
    "ProbeSpec",
    "PromptTargetDataset",
    "TextBlocksDataset",
    "TextDataset",
    "TextTokenizer",
    "choose_passages",
    "cnn_dailymail_dataset",
    "collate_packed",
    "embedded_documents",
    "encode_prompts",
    "hf_tokenizer",
    "inject_aligned",
    "inject_concatenated",
    "injected_corpus_dataset",
    "is_packed",
    "load_documents",
    "load_rows",
    "make_probe",
    "pack",
    "read_probe_file",
    "source_fingerprint",
    "squad_dataset",
    "squad_prompt",
    "summarization_prompt",
    "text_blocks",
    "text_blocks_dataset",
    "text_dataset",
    "tokenizer_fingerprint",
    "tokenizer_name",
    "train_embedded_tokenizer",
    "without_shared_text",
    "write_probe_file",
]
