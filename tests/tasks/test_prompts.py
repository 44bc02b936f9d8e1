"""Token ids as requests: what a model asked by text really sees, and what of a recitation its text
keeps.
"""

import re

import pytest
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import embedded_ids, prompts_seen, run_tasks
from hypothesis import given, settings
from hypothesis import strategies as st

from tfidf_tune.tasks._requests import parse_token_ids, prompts_of
from tfidf_tune.tasks.memorization import documents
from tfidf_tune.tasks.settings import prompts_for

TOKENIZERS = ["plain", "adds_bos", "sentencepiece", "llama"]


def text_prompts(folder, **model_args):
    return prompts_for({"tokenizer": str(folder), **model_args})


def test_an_invalid_prompt_or_response_is_refused_with_the_remedy(tokenizers):
    for text in ("the river", "token_ids: 12 x", "1.5", "-3", "²", "user: token_ids: 1"):
        with pytest.raises(
            ValueError,
            match=r"expected token ids as numbers, got .*`tfidf-tune eval`.*--token-ids-",
        ):
            parse_token_ids(text)
    assert parse_token_ids("") == []
    with pytest.raises(
        ValueError, match="no tokenizer is named: give --model_args pretrained=MODEL"
    ):
        prompts_for({"probe_file": "probe.jsonl"})
    prompts = text_prompts(tokenizers["plain"])
    [space] = prompts.tokenizer.encode_batch([" "])[0]
    with pytest.raises(ValueError, match="it leaves no text to predict"):
        prompts.scored_text([space] * 5)


@pytest.mark.parametrize(
    ("tokenizer", "add_bos_token"),
    [
        ("plain", True),
        ("pythia", None),
        ("pythia", True),
        ("adds_bos", None),
        ("sentencepiece", None),
        ("llama", False),
    ],
)
def test_a_text_prompt_is_exact_only_if_the_model_sees_its_ids(
    tokenizer, add_bos_token, tokenizers, tmp_path
):
    folder = tokenizers[tokenizer]
    model = task_fakes.checkpoint(tmp_path / "model", folder)
    passages = task_fakes.passages_of(folder, num_targets=5, num_controls=0, num_tokens=60)
    file = task_fakes.probe_file(tmp_path / "probe.jsonl", passages)
    model_args = {"pretrained": str(model), "dtype": "float32"}
    if add_bos_token is not None:
        model_args["add_bos_token"] = add_bos_token
    settings = {
        "probe_file": file,
        "prefix_lengths": [*range(9, 30, 4)],
        "max_new_tokens": 1,
        "prompts": "text",
    }
    with embedded_ids() as calls:
        output = run_tasks(
            model_args, "tfidf_memorization_prefixes", tmp_path / "out", **settings, batch_size=1
        )
    docs = output.docs("tfidf_memorization_prefixes")
    prompts = prompts_of(docs[0])
    exact = [prompts.is_exact(doc["prompt_ids"]) for doc in docs]
    seen = prompts_seen(calls)
    assert exact == [doc["prompt_ids"] in seen for doc in docs]
    # From tokenizer.model only, transformers before 5.24 (and so the harness) leaves out the space
    # before a text.
    if tokenizer != "sentencepiece":
        never = add_bos_token is None and tokenizer in ("adds_bos", "llama")
        assert any(exact) != (never or bool(add_bos_token and tokenizer != "plain"))
    assert not all(exact)  # some are cut inside a character or a word
    # A document is exact where, besides, the ids of the reference survive as text.
    assert all(is_exact or not doc["round_trip"] for is_exact, doc in zip(exact, docs, strict=True))
    metrics = output.metrics("tfidf_memorization_prefixes")
    num_exact = sum(doc["round_trip"] for doc in docs)
    assert metrics["num_not_round_trip"] == len(docs) - num_exact
    assert metrics["round_trip"] == pytest.approx(num_exact / len(docs))


def test_prompts_that_change_as_text_are_reported_with_the_remedies(probe_file, llama, caplog):
    settings = {
        "probe_file": str(probe_file),
        "prefix_lengths": [32, 50, 100],
        "pretrained": str(llama),
    }
    lost = [not doc["round_trip"] for doc in documents(**settings)["test"]]
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "tfidf_tune.tasks._task"]
    assert 0 < sum(lost) < len(lost) == 12
    assert warning.startswith(f"{sum(lost)} of 12 prompts or references change as text")
    assert "without add_bos_token=False" in warning
    assert "`tfidf-tune eval` or a tokenizer of `tfidf-tune tasks --token-ids-tokenizer`" in warning
    caplog.clear()
    documents(**settings, add_bos_token=False)
    assert "change as text" in caplog.text
    assert "without add_bos_token=False" not in caplog.text
    caplog.clear()
    documents(**settings, prompts="token_ids")
    assert "change as text" not in caplog.text


@pytest.mark.parametrize(
    ("metadata", "advice"),
    [
        (
            {"backend": "hf"},
            "without add_bos_token=False in .*; `tfidf-tune eval` without --model sends ids",
        ),
        (
            {"backend": "vllm"},
            "without add_bos_token=False in .*; --model tfidf-vllm of `tfidf-tune eval` sends ids",
        ),
        (
            {"backend": "tfidf-hf", "add_bos_token": False},
            "ids: an evaluation without prompts=text sends ids",
        ),
        (
            {"backend": "tfidf-server", "base_url": "http://x/v1"},
            "the server, perhaps with a BOS, .* --send ids of an",
        ),
        (
            {"base_url": "http://x/v1"},
            "tokenized for the server, .* --metadata prompts=ids_to_text and a tokenizer of",
        ),
        ({"backend": "openai-completions"}, "tokenized for the server, .* --send ids of an audit"),
        (
            {"backend": "tfidf-server", "prompts": "ids_to_text", "bos": False},
            "the model sees the ids of each prompt",
        ),
    ],
)
def test_a_warning_names_what_a_user_of_the_backend_can_do(
    probe_file, llama, caplog, metadata, advice
):
    settings = {
        "probe_file": str(probe_file),
        "prefix_lengths": [32, 50, 100],
        "tokenizer": str(llama),
    }
    settings |= {"prompts": "text"} | metadata
    documents(**settings)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "tfidf_tune.tasks._task"]
    assert re.search(rf" change as text: .*{advice}", warning)
    assert ("add_bos_token" in warning) == advice.startswith("without")


def test_advice_about_bos_is_what_a_user_of_the_backend_can_do(probe_file, tokenizers, caplog):
    settings = {
        "probe_file": str(probe_file),
        "prefix_lengths": [32],
        "tokenizer": str(tokenizers["sentencepiece"]),
    }
    passages = task_fakes.passages_of(tokenizers["sentencepiece"])
    settings["probe_file"] = str(
        task_fakes.probe_file(probe_file.with_name("of_sentencepiece.jsonl"), passages)
    )
    for served in (True, False):
        caplog.clear()
        documents(
            **settings, prompts="ids_to_text", **({"base_url": "http://x/v1"} if served else {})
        )
        assert "give --metadata bos=true or bos=false" in caplog.text
        assert ("`tfidf-tune eval` without --model, which measures it" in caplog.text) != served


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=60)
@given(seed=st.integers(0, 50), cut=st.integers(2, 30), length=st.integers(1, 20))
def test_a_response_equal_to_the_reference_has_its_ids(tokenizer, tokenizers, seed, cut, length):
    """Reference: are the ids the same if the text of prompt and response is tokenized
    in one piece?
    """
    prompts = text_prompts(tokenizers[tokenizer], add_bos_token=False)
    ids = prompts.tokenizer.encode_batch([task_fakes.text(seed, 60)])[0]
    prompt_ids = ids[:cut]
    reference_ids = ids[cut : cut + length]
    response = prompts.tokenizer.decode(reference_ids)
    read = prompts.response_ids(response, prompt_ids, reference_ids)
    whole = prompts.tokenizer.decode(ids[: cut + length])
    joined = prompts.tokenizer.decode(prompt_ids) + response
    if joined == whole and prompts.tokenizer.encode_batch([whole])[0] == ids[: cut + length]:
        assert read == reference_ids
    assert prompts.response_ids("", prompt_ids, reference_ids) == []


def test_a_response_is_read_after_a_prompt_that_changes_as_text_or_is_not_recited(tokenizers):
    prompts = text_prompts(tokenizers["llama"], add_bos_token=False)
    half_a_character = prompts.tokenizer.encode_batch(["🙃"])[0][:-2]
    reference_ids = prompts.tokenizer.encode(
        "iver of stone", add_bos=False, add_eos=False, trim_leading_whitespace=True
    )
    response = prompts.tokenizer.decode(reference_ids)
    assert prompts.response_ids(response, half_a_character, reference_ids) == reference_ids
    assert prompts.tokenizer.encode_batch([response])[0] != reference_ids
    assert not prompts.is_exact(half_a_character, reference_ids)

    prompts = text_prompts(tokenizers["plain"])
    the, house, of_house, of = prompts.tokenizer.encode_batch(
        ["the", " house", " house of", "house of"]
    )
    assert prompts.response_ids(" house", the, [5, 6]) == house
    # The space that a server stripped.
    assert prompts.response_ids("house of", the, of_house) == of_house
    # None is added where the passage has none.
    assert prompts.response_ids("house of", the, of) == of
    assert prompts.response_ids(" house of", the, of_house) == of_house != of
    half_a_character = prompts.tokenizer.encode_batch(["🙃"])[0][:1]
    joined = prompts.tokenizer.encode_batch(
        [prompts.tokenizer.decode(half_a_character) + " house"]
    )[0]
    # A replacement character, which is no part of the response, and the house.
    assert len(joined) > 3
    assert prompts.response_ids(" house", half_a_character, joined[1:]) == house


def test_of_readings_that_are_equally_near_the_first_counts(tokenizers):
    """The text by itself, with the space that SentencePiece adds."""
    prompts = text_prompts(tokenizers["llama"], add_bos_token=False)
    encode = prompts.tokenizer.encode
    response = "house of stone"
    first = encode(response, add_bos=False, add_eos=False)
    without_space = encode(response, add_bos=False, add_eos=False, trim_leading_whitespace=True)
    prompt_ids = encode("the green", add_bos=False, add_eos=False)
    assert without_space != first
    for reference_ids in ([5, 6], [first[-1], without_space[0]]):
        assert prompts.response_ids(response, prompt_ids, reference_ids) == first


@pytest.mark.parametrize("name", ["plain", "adds_bos", "sentencepiece", "llama"])
def test_an_answer_whose_leading_space_was_stripped_is_read_with_it(tokenizers, name):
    prompts = prompts_for({"tokenizer": str(tokenizers[name]), "prompts": "text"})
    ids = prompts.tokenizer.encode(
        "the river under the green house walks and sings", add_bos=False, add_eos=False
    )
    for number in range(2, len(ids) - 2):
        whole, given = (prompts.tokenizer.decode(part) for part in (ids, ids[:number]))
        if whole.startswith(given):
            response = whole[len(given) :].strip()
            found = prompts.response_ids(response, ids[:number], ids[number:])
            assert found == ids[number:], (number, response)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({}, 256), ({"max_length": 64}, 64), ({"max_length": 64, "max_model_len": 32}, 32)],
)
def test_arguments_of_the_model_lower_its_positions(llama, limits, expected):
    assert prompts_for({"pretrained": str(llama), **limits}).positions == expected
