import pytest
from data_fakes import passage
from sentencepiece_model import train_sentencepiece

from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer


@pytest.fixture(scope="session")
def embedded_tokenizer_folder(tmp_path_factory):
    """A folder with a small real tokenizer: byte-level BPE of 512 tokens."""
    return train_embedded_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe-512", vocab_size=512)


@pytest.fixture(scope="session")
def tokenizer(embedded_tokenizer_folder):
    return hf_tokenizer(str(embedded_tokenizer_folder))


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory):
    """A folder with nothing but tokenizer.model and config.json, SentencePiece trained as Llama's was."""
    folder = train_sentencepiece(
        tmp_path_factory.mktemp("sentencepiece"), [passage(seed, 40) for seed in range(50)], vocab_size=400
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    """40 lines: short ones and ones of more than 32 tokens by turns."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    file.write_text("\n".join(passage(i, 60 if i % 2 else 5) for i in range(40)), encoding="utf-8")
    return file
