"""Documents of all tasks: prompts of training, data sets of the hub, and what is refused before a
model is loaded.
"""

import re
from dataclasses import replace

import pytest
from datasets import Dataset
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import NEWS_ROWS, SQUAD_ROWS, write_rows

from tfidf_tune.data import cnn_dailymail_dataset, hf_tokenizer, squad_dataset
from tfidf_tune.passages import read_probe_file
from tfidf_tune.tasks import cnn_dailymail, memorization, perplexity, squad
from tfidf_tune.tasks._requests import parse_token_ids

SHORT = {"cnn_dailymail_max_source_tokens": 120, "cnn_dailymail_max_new_tokens": 30}


def with_its_place(row):
    """Training needs the position of the answer."""
    answer = row["answers"]["text"][0]
    return row | {"answers": {"text": [answer], "answer_start": [row["context"].index(answer)]}}


IN_THEIR_PLACES = [with_its_place(row) for row in SQUAD_ROWS if row["answers"]["text"]]


@pytest.mark.parametrize("task", ["squad", "cnn_dailymail"])
def test_prompts_are_those_of_training(task, tokenizers, squad_file, news_file, tmp_path):
    for name, path in tokenizers.items():
        common = {"tokenizer": str(path), "prompts": "token_ids"}
        cached = {"cache_dir": str(tmp_path / name)}
        if task == "squad":
            docs = squad.documents(squad_source=squad_file, **common)["test"]
            source = write_rows(tmp_path / "train.jsonl", IN_THEIR_PLACES)
            trained = squad_dataset(hf_tokenizer(str(path)), source=source, **cached)
            assert {(doc["context_cut"], doc["answer_in_prompt"]) for doc in docs} == {
                (False, True)
            }
        else:
            limits = {"cnn_dailymail_source": news_file, "cnn_dailymail_max_source_tokens": 60}
            docs = cnn_dailymail.documents(**limits, **common)["test"]
            trained = cnn_dailymail_dataset(
                hf_tokenizer(str(path)), source=news_file, max_source_tokens=60, **cached
            )
            assert [doc["article_cut"] for doc in docs] == [False, True]
        for doc, example in zip(docs, trained, strict=True):
            prompt = example["tokens"][: example["labels"].count(-100)]
            assert parse_token_ids(doc["request"]) == prompt, name
            assert doc["num_prompt_tokens"] == len(prompt)


def test_without_local_files_the_hub_is_used(tokenizers, monkeypatch):
    calls = []

    def load_dataset(source, name, *, split, streaming):
        calls.append((source, name, split))
        return Dataset.from_list(
            SQUAD_ROWS if "squad" in source else NEWS_ROWS
        ).to_iterable_dataset()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    tokenizer = str(tokenizers["plain"])
    [doc, *_] = cnn_dailymail.documents(tokenizer=tokenizer)["test"]
    assert (doc["max_new_tokens"], doc["bertscore_model"]) == (128, "roberta-large")  # the paper's
    squad.documents(tokenizer=tokenizer)
    squad.documents(tokenizer=tokenizer, squad_source="a/squad", squad_name="c", squad_split="d")
    assert calls == [
        ("abisee/cnn_dailymail", "3.0.0", "validation"),
        ("rajpurkar/squad", None, "validation"),
        ("a/squad", "c", "d"),
    ]


def test_rows_without_a_text_or_an_answer_are_left_out_and_ids_may_be_missing_or_numbers(
    tokenizers, tmp_path
):
    tokenizer = str(tokenizers["plain"])
    first, second, _ = SQUAD_ROWS
    empty = [{"answers": {"text": []}}, {"answers": {"text": [" "]}}, {"context": None}]
    without_id = {key: value for key, value in second.items() if key != "id"}
    source = write_rows(
        tmp_path / "squad.jsonl", [*(first | one for one in empty), first | {"id": 7}, without_id]
    )
    docs = squad.documents(tokenizer=tokenizer, squad_source=source)["test"]
    assert [(doc["id"], doc["question"]) for doc in docs] == [
        ("7", first["question"]),
        ("4", second["question"]),
    ]
    articles = [("", "a"), ("a", " \n"), (None, None), ("the river", " a stone\n")]
    rows = [{"article": article, "highlights": highlights} for article, highlights in articles]
    source = write_rows(tmp_path / "news.jsonl", rows)
    [doc] = cnn_dailymail.documents(tokenizer=tokenizer, cnn_dailymail_source=source)["test"]
    assert (doc["id"], doc["highlights"]) == ("3", "a stone")


def test_bad_settings_and_sources_are_refused_by_name(
    llama, probe_file, squad_file, news_file, wiki_file, tmp_path
):
    alike = [replace(one, token_ids=[5] * 240) for one in read_probe_file(probe_file)]
    alike_file = task_fakes.probe_file(tmp_path / "alike.jsonl", alike)

    def questions(**changes):
        return {"squad_source": write_rows(tmp_path / "squad.jsonl", [SQUAD_ROWS[0] | changes])}

    def news(**row):
        return {"cnn_dailymail_source": write_rows(tmp_path / "news.jsonl", [row])}

    valid = {
        memorization: {"probe_file": str(probe_file), "offset": 1, "prompts": "token_ids"},
        perplexity: {"wikitext2_source": wiki_file},
        squad: {"squad_source": squad_file, "squad_max_seq_len": 128},
        cnn_dailymail: {"cnn_dailymail_source": news_file, **SHORT},
    }
    all_seen = {"block_size": 32, "train_source": wiki_file, "shared_tokens": 8}
    for task, changes, message in (
        (memorization, lambda: {"prefix_lengths": "none"}, "prefix_lengths names no length"),
        (memorization, lambda: {"prefix_lengths": [0]}, "prefix_lengths must be .* got 0"),
        (
            memorization,
            lambda: {"prefix_lengths": [239]},
            "'target-0000' has 240 tokens, no more than .*240",
        ),
        (memorization, lambda: {"prompts": "ids"}, "prompts is 'ids'"),
        (memorization, lambda: {"prompt_noise": 1.5}, "prompt_noise is 1.5"),
        (
            memorization,
            lambda: {"probe_file": str(alike_file), "prompt_noise": 0.1},
            "prompt_noise draws tokens",
        ),
        (memorization, lambda: {"num_beams": 1}, "num_beams must be .* got 1"),
        (memorization, lambda: {"top_k": 5}, "give num_samples too"),
        (memorization, lambda: {"temperature": 0.0, "num_samples": 2}, "temperature is 0.0"),
        (
            memorization,
            lambda: {"num_samples": 2, "num_beams": 2},
            "num_samples is 2 and num_beams is 2",
        ),
        (
            perplexity,
            lambda: {"block_size": 257},
            "sequences of 257 tokens exceed .* limit of 256: lower block_size",
        ),
        (perplexity, lambda: {"block_size": 8, "train_source": "embedded"}, "shared_tokens is 20"),
        (perplexity, lambda: all_seen, "every block of .* shares 8 tokens"),
        (squad, lambda: {"squad_max_seq_len": 32}, "squad_max_seq_len must be .* got 32"),
        (
            squad,
            lambda: {"squad_max_seq_len": 40},
            "8 tokens are too few for the prompt 'Context: ",
        ),
        (squad, lambda: questions(answers=["France"]), "column 'answers' holds list"),
        (squad, lambda: questions(answers={"text": []}), "has no answered question"),
        (
            cnn_dailymail,
            lambda: {"cnn_dailymail_max_source_tokens": 1024},
            "sequences of 1054 tokens exceed",
        ),
        (cnn_dailymail, lambda: {"bertscore_num_layers": 0}, "bertscore_num_layers must be"),
        (cnn_dailymail, lambda: news(article="a"), "has no column 'highlights'"),
        (cnn_dailymail, lambda: news(article="a", highlights=""), "has no article with highlights"),
    ):
        with pytest.raises((ValueError, FileNotFoundError)) as refused:
            task.documents(**{"pretrained": str(llama), **valid[task], **changes()})
        assert re.search(message, str(refused.value)), message
