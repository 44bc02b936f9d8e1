"""The tasks with the harness's own command and model."""

import dataclasses
import math

import pytest
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import MEMORIZATION, lm_eval, run_tasks
from helpers.fakes.tiny_llama import teach

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.results import import_results
from tfidf_tune.tasks import save_token_ids_tokenizer

GROUPS = "tfidf_memorization,tfidf_wikitext2_ppl,tfidf_cnn_dailymail,tfidf_squad"
TASKS = [*MEMORIZATION, "tfidf_wikitext2_ppl", "tfidf_cnn_dailymail", "tfidf_squad"]


@pytest.fixture(scope="module")
def settings(probe_file, wiki_file, news_file, squad_file):
    return {
        "probe_file": probe_file,
        "max_new_tokens": 16,
        "wikitext2_source": wiki_file,
        "block_size": 64,
        "cnn_dailymail_source": news_file,
        "cnn_dailymail_max_source_tokens": 120,
        "cnn_dailymail_max_new_tokens": 12,
        "squad_source": squad_file,
        "squad_max_new_tokens": 8,
    }


def check_read_back(output, num_not_round_trip):
    """The comparison reads everything that was measured."""
    results = import_results([output.folder])
    [checkpoint] = results.checkpoints
    docs = []
    for task in MEMORIZATION:
        docs += output.docs(task)
    samples = {
        (one.passage_id, one.offset, one.prefix_length): (one, prompt)
        for one, prompt in checkpoint.samples
    }
    assert len(samples) == len(checkpoint.samples) == len(docs)
    for doc in docs:
        sample, prompt = samples[doc["passage_id"], doc["offset"], doc["prefix_length"]]
        assert dataclasses.asdict(sample) == doc["sample"]
        assert prompt == doc["prompt_text"]
    assert checkpoint.lost_prompts == num_not_round_trip

    def values(metric, kind):
        return results.scores[
            (results.scores["metric"] == metric) & (results.scores["kind"] == kind)
        ]

    nll = values("nll", "block")
    perplexity = math.exp((nll["value"] * nll["count"]).sum() / nll["count"].sum())
    assert perplexity == pytest.approx(output.metrics("tfidf_wikitext2_ppl")["token_perplexity"])
    for found, task, name in (
        (values("lms", "target").query("prefix == 32"), MEMORIZATION[0], "avg_lms"),
        (values("rouge1", "article"), "tfidf_cnn_dailymail", "rouge1"),
        (values("f1", "question"), "tfidf_squad", "f1"),
    ):
        assert found["value"].mean() == pytest.approx(output.metrics(task)[name])
    assert values("bertscore_f1", "article")["value"].isna().all()
    assert checkpoint.bertscore_missing


def test_all_groups_run_with_text_prompts_whose_lms_is_approximate(
    tokenizers, settings, stock_command, tmp_path, caplog
):
    """A model that recites its targets.

    Prompts whose ids change as text are counted. A response is tokenized again, so that its tokens
    can differ from those of the model where it leaves the passage: the LMS differs by at most 1
    token.
    """
    folder = tokenizers["llama"]
    file = task_fakes.probe_file(
        tmp_path / "probe.jsonl", task_fakes.passages_of(folder, num_targets=3)
    )
    untaught = task_fakes.random_model(vocab_size=hf_tokenizer(str(folder)).vocab_size)
    model = task_fakes.checkpoint(tmp_path / "model", folder, teach(untaught, file))
    settings = {**settings, "probe_file": file}
    model_args = f"pretrained={model},dtype=float32,add_bos_token=False"
    output = lm_eval(
        stock_command, tmp_path / "stock", GROUPS, model_args=model_args, metadata=settings
    )
    assert "prompts or references change as text: the model sees different token ids" in caplog.text
    by_ids = run_tasks(model, GROUPS.split(","), tmp_path / "ids", bos=False, **settings)
    num_lost = 0
    differences = []
    for task in MEMORIZATION:
        docs = output.docs(task)
        pairs = [
            pair for pair in zip(docs, by_ids.docs(task), strict=True) if pair[0]["round_trip"]
        ]
        assert output.metrics(task)["num_not_round_trip"] == len(docs) - len(pairs)
        num_lost += len(docs) - len(pairs)
        for doc, by_id in pairs:
            by_text = doc["sample"]
            exact = by_id["sample"]
            assert by_text["generated_text"].lstrip() == exact["generated_text"].lstrip()
            assert by_text["prefix_match"] == exact["prefix_match"]
            assert by_text["verbatim"] == exact["verbatim"] == (doc["kind"] == "target")
            differences.append((by_text["lms"] - exact["lms"], exact["verbatim"]))
    assert {recited for _, recited in differences} == {False, True}
    assert num_lost > 0
    assert max(abs(difference) for difference, _ in differences) <= 1
    for text_doc, doc in zip(output.docs(TASKS[3]), by_ids.docs(TASKS[3]), strict=True):
        if text_doc["round_trip"]:
            assert text_doc["log_likelihood"] == pytest.approx(doc["log_likelihood"], rel=1e-5)
    for task in TASKS[4:]:
        assert output.metrics(task)["round_trip"] == 1.0
        assert [doc["prediction"] for doc in output.docs(task)] == [
            doc["prediction"] for doc in by_ids.docs(task)
        ]
    check_read_back(output, num_lost)


def test_all_groups_run_token_exactly_with_the_pass_through_tokenizer(
    llama, settings, stock_command, tmp_path
):
    save_token_ids_tokenizer(str(llama), tmp_path / "tokenizer")
    model_args = f"pretrained={llama},tokenizer={tmp_path / 'tokenizer'},dtype=float32"
    more = {"model_args": model_args, "metadata": settings}
    output = lm_eval(stock_command, tmp_path / "stock", GROUPS, "--batch_size", "4", **more)
    ours = run_tasks(llama, GROUPS.split(","), tmp_path / "ours", **settings)
    for task in TASKS:
        for stock_doc, doc in zip(output.docs(task), ours.docs(task), strict=True):
            if "log_likelihood" in doc:
                assert stock_doc.pop("log_likelihood") == pytest.approx(
                    doc.pop("log_likelihood"), rel=1e-6
                )
            assert stock_doc == {**doc, "tokenizer": stock_doc["tokenizer"]}
        assert output.metrics(task).keys() == ours.metrics(task).keys()
    assert output.metrics("tfidf_memorization", "groups") == ours.metrics(
        "tfidf_memorization", "groups"
    )
    check_read_back(output, 0)
