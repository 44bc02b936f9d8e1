"""``tfidf_cnn_dailymail``: prompts of training, ROUGE of ``rouge_score``, BERTScore of
``bert_score``.
"""

import json
import sys

import bert_score
import pytest
import torch
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import NEWS_ROWS, embedded_ids, prompts_seen, run_tasks
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, RobertaConfig, RobertaModel, RobertaTokenizer

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.tasks._requests import parse_token_ids

TASK = "tfidf_cnn_dailymail"
SHORT = {"cnn_dailymail_max_source_tokens": 120, "cnn_dailymail_max_new_tokens": 30}
REFERENCES = [row["highlights"] for row in NEWS_ROWS]


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """An encoder of random weights, with a byte-level BPE as RoBERTa's."""
    folder = tmp_path_factory.mktemp("roberta")
    bpe = ByteLevelBPETokenizer()
    corpus = [task_fakes.text(seed, 40, task_fakes.WORDS) for seed in range(30)]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe.train_from_iterator(corpus, vocab_size=330, special_tokens=special, show_progress=False)
    bpe.save_model(str(folder))
    merges = [tuple(line.split()) for line in (folder / "merges.txt").read_text().splitlines()[1:]]
    vocab = json.loads((folder / "vocab.json").read_text())
    RobertaTokenizer(vocab=vocab, merges=merges, model_max_length=64).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    config = RobertaConfig(
        vocab_size=330, max_position_embeddings=70, initializer_range=0.5, **sizes
    )
    RobertaModel(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture
def say(monkeypatch, llama):
    """Make the model return given summaries, in the order of the articles."""
    tokenizer = hf_tokenizer(str(llama))

    def install(*summaries):
        by_opening = dict(zip([row["article"][:8] for row in NEWS_ROWS], summaries, strict=True))

        def continue_ids(model, asked, disable_tqdm):
            openings = [tokenizer.decode(one.ids)[len("summarize: ") :][:8] for one in asked]
            return [tokenizer.encode_batch([by_opening[opening]]) for opening in openings]

        monkeypatch.setattr(
            "tfidf_tune.tasks._transformers.TokenExactHFLM.continue_ids", continue_ids
        )

    return install


def bert_scores(roberta, predictions, references):
    """``bert_score`` with a tokenizer that puts a space before each text, as
    in RoBERTa's training.
    """
    scorer = bert_score.BERTScorer(model_type=str(roberta), num_layers=2)
    scorer._tokenizer = AutoTokenizer.from_pretrained(roberta, add_prefix_space=True)
    return (100 * scorer.score(predictions, references)[2]).tolist()


def test_scores_are_those_of_rouge_score_and_bert_score(say, roberta, llama, news_file, tmp_path):
    summaries = ["the rivers sang of a stone", "letters\nin the green houses, seven"]
    say(*(f" {summary}\n" for summary in summaries))
    bertscore = {"bertscore_model": roberta, "bertscore_num_layers": 2}
    output = run_tasks(llama, TASK, tmp_path, cnn_dailymail_source=news_file, **SHORT, **bertscore)
    docs = output.docs(TASK)
    metrics = output.metrics(TASK)
    assert [doc["prediction"] for doc in docs] == summaries
    assert [doc["highlights"] for doc in docs] == REFERENCES
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for doc, summary, reference in zip(docs, summaries, REFERENCES, strict=True):
        expected = scorer.score(target=reference, prediction=summary)
        assert doc["rouge1"] == 100 * expected["rouge1"].fmeasure > 0
        assert doc["rouge2"] == 100 * expected["rouge2"].fmeasure
        assert doc["rouge_l"] == 100 * expected["rougeL"].fmeasure
    expected = bert_scores(roberta, summaries, REFERENCES)
    assert [doc["bertscore_f1"] for doc in docs] == pytest.approx(expected, abs=1e-4)
    without_space = bert_score.BERTScorer(model_type=str(roberta), num_layers=2).score(
        summaries, REFERENCES
    )
    assert expected != pytest.approx((100 * without_space[2]).tolist(), abs=1e-2)
    assert [doc["bertscore_missing"] for doc in docs] == [None, None]
    for metric in ("rouge1", "rouge2", "rougeL", "bertscore_f1"):
        key = {"rougeL": "rouge_l"}.get(metric, metric)
        assert metrics[metric] == pytest.approx(sum(doc[key] for doc in docs) / 2)
    assert metrics["round_trip"] == 1.0


def test_an_empty_summary_scores_0_and_the_others_are_scored(
    say, roberta, llama, news_file, tmp_path
):
    bertscore = {"bertscore_model": roberta, "bertscore_num_layers": 2}
    say(" \n", "letters")
    docs = run_tasks(
        llama, TASK, tmp_path / "a", cnn_dailymail_source=news_file, **SHORT, **bertscore
    ).docs(TASK)
    assert (docs[0]["prediction"], docs[0]["bertscore_f1"], docs[0]["rouge_l"]) == ("", 0.0, 0.0)
    assert docs[1]["bertscore_f1"] == pytest.approx(
        bert_scores(roberta, ["letters"], REFERENCES[1:])[0], abs=1e-4
    )
    say("", "")
    output = run_tasks(
        llama, TASK, tmp_path / "b", cnn_dailymail_source=news_file, **SHORT, **bertscore
    )
    assert output.metrics(TASK)["bertscore_f1"] == 0.0


def test_without_its_model_or_package_bertscore_is_missing_with_the_reason(
    roberta, say, llama, news_file, tmp_path, caplog, monkeypatch
):
    say("the river", "")
    for number, (settings, reason) in enumerate(
        (
            ({}, "roberta-large cannot be loaded (OSError)"),
            (
                {"bertscore_model": "/nowhere/encoder"},
                "bert-score has no default layer for /nowhere/encoder: set bert",
            ),
            (
                {"bertscore_model": roberta, "bertscore_num_layers": 9},
                "cannot be loaded (AssertionError)",
            ),
            ({}, "bert-score is not installed: pip install 'tfidf-tune[bertscore]'"),
        )
    ):
        if "not installed" in reason:
            monkeypatch.setitem(sys.modules, "bert_score", None)
        caplog.clear()
        output = run_tasks(
            llama, TASK, tmp_path / str(number), cnn_dailymail_source=news_file, **SHORT, **settings
        )
        for doc in output.docs(TASK):
            assert doc["bertscore_f1"] is None
            assert reason in doc["bertscore_missing"]
            assert "\n" not in doc["bertscore_missing"]
        metrics = output.metrics(TASK)
        assert metrics["bertscore_f1"] == f"missing: {output.docs(TASK)[0]['bertscore_missing']}"
        assert metrics["rouge1"] > 0
        assert "BERTScore is missing: " in caplog.text


def test_the_model_sees_the_prompts_and_generates_as_much_as_asked(llama, news_file, tmp_path):
    with embedded_ids() as calls:
        output = run_tasks(llama, TASK, tmp_path, cnn_dailymail_source=news_file, **SHORT)
    docs = output.docs(TASK)
    assert sorted(prompts_seen(calls)) == sorted(parse_token_ids(doc["request"]) for doc in docs)
    tokenizer = hf_tokenizer(str(llama))
    for doc, sample in zip(docs, output.samples(TASK), strict=True):
        ids = parse_token_ids(sample["resps"][0][0])
        assert len(ids) <= 30
        assert doc["prediction"] == tokenizer.decode(ids).strip()
