"""The pass-through tokenizer: the harness's own model is asked by ids."""

import pytest
from helpers.fakes import tasks as task_fakes
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.tasks import save_token_ids_tokenizer
from tfidf_tune.tasks._requests import original_tokenizer, parse_token_ids, token_ids_request
from tfidf_tune.tasks.settings import prompts_for


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids") / "tokenizer"
    save_token_ids_tokenizer(str(llama), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@given(st.lists(st.integers(0, 319), min_size=1, max_size=30))
def test_every_number_is_its_id(tokenizer, ids):
    assert tokenizer(token_ids_request(ids))["input_ids"] == ids
    assert tokenizer(" " + " ".join(map(str, ids)))["input_ids"] == ids
    without_eos = [i for i in ids if i != 0]
    assert parse_token_ids(tokenizer.decode(ids, skip_special_tokens=True)) == without_eos


def test_it_has_a_number_for_every_row_and_nothing_else(
    tokenizer, folder, tokenizers, llama, tmp_path
):
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 0)
    assert tokenizer.decode([5, 0, 10]) == "5 </s> 10"
    assert tokenizer("10 0 100 </s>")["input_ids"] == [10, 0, 100, 0]
    for text in ("the river", "12 x", "320", "-1"):
        # Other tasks in the same run would be asked in a language that the model does not know.
        with pytest.raises(Exception, match="UNK"):
            tokenizer(text)
    padded = task_fakes.checkpoint(
        tmp_path / "model", tokenizers["plain"], task_fakes.random_model(vocab_size=384)
    )
    for source, size in ((padded, 384), (llama, 320), (tokenizers["adds_bos"], 321)):
        save_token_ids_tokenizer(str(source), tmp_path / str(size))
        assert len(AutoTokenizer.from_pretrained(tmp_path / str(size))) == size
    assert (
        hf_tokenizer(original_tokenizer(str(folder))).fingerprint
        == hf_tokenizer(str(llama)).fingerprint
    )
    assert original_tokenizer(str(llama)) is None
    with_ids = prompts_for({"pretrained": str(llama), "tokenizer": str(folder)})
    assert with_ids.settings["prompts"] == "token_ids"
    assert with_ids.tokenizer.fingerprint == hf_tokenizer(str(llama)).fingerprint
    assert prompts_for({"pretrained": str(llama)}).settings["prompts"] == "text"
