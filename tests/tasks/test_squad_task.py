"""``tfidf_squad``: the official scores, and the prompts of training."""

import re

import pytest
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import QUESTIONS, SQUAD_ROWS, embedded_ids, prompts_seen, run_tasks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchmetrics.functional.text.squad import squad

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.tasks._requests import parse_token_ids
from tfidf_tune.tasks.squad import documents, exact_match, f1, process_results

TASK = "tfidf_squad"
PIECES = [
    "the",
    "The",
    "a",
    "an",
    "river",
    "River",
    "1984",
    "café",
    "it's",
    "its",
    ".",
    ",",
    "U.S.",
    "",
    "\t",
]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map(" ".join) | st.text(max_size=12)


def official(predictions, all_answers):
    """EM and F1 × 100 by the evaluation of torchmetrics, which is the official script."""
    ids = [str(number) for number in range(len(predictions))]
    scores = squad(
        [
            {"id": i, "prediction_text": prediction}
            for i, prediction in zip(ids, predictions, strict=True)
        ],
        [
            {"id": i, "answers": {"text": answers}}
            for i, answers in zip(ids, all_answers, strict=True)
        ],
    )
    return float(scores["exact_match"]), float(scores["f1"])


def approx(score):
    """torchmetrics computes in float32."""
    return pytest.approx(score, rel=1e-6, abs=1e-9)


@settings(max_examples=50)
@given(texts, texts)
@example("up-the-hill", "upthehill")  # punctuation goes before articles
def test_scores_are_those_of_the_official_script(prediction, answer):
    em, official_f1 = official([prediction], [[answer]])
    assert 100 * exact_match(prediction, answer) == em
    if em and official([answer], [[""]])[0]:
        # Nothing is left of either: the script of v1.1 finds no shared word, torchmetrics the
        # unanswerable of v2.
        official_f1 = 0.0
    assert 100 * f1(prediction, answer) == approx(official_f1)


def scored(response, answers):
    doc = {"answers": answers, "answer_in_prompt": True, "round_trip": True}
    doc |= {"tokenizer": "unused", "prompts": "text", "add_bos_token": None}
    return process_results(doc, [response]), doc


@pytest.fixture
def as_text(monkeypatch):
    class Said:
        def response_text(self, response):
            return response

    monkeypatch.setattr("tfidf_tune.tasks.squad.prompts_of", lambda doc: Said())


@pytest.mark.usefixtures("as_text")
def test_the_best_gold_answer_counts_as_in_the_official_script():
    found = set()
    for answers in QUESTIONS.values():
        said = [
            f"the {answers[0]}",
            f'"{answers[0].upper()}"!',
            f"it was {answers[0]}",
            "Normandy and France",
            "...",
        ]
        for response in [*answers, *said]:
            metrics, doc = scored(f" {response}\nQuestion: what?", answers)
            assert doc["prediction"] == response
            em, best_f1 = official([response], [answers])
            assert (metrics["exact_match"], metrics["f1"]) == (em, approx(best_f1))
            assert (doc["exact_match"], doc["f1"]) == (metrics["exact_match"], metrics["f1"])
            assert scored(response, answers)[1]["prediction"] == response  # as the harness cuts it
            found.add((em, 0 < best_f1 < 100))
    assert found == {(100.0, False), (0.0, True), (0.0, False)}


def test_the_model_sees_the_prompts_and_is_scored_by_its_answers(llama, squad_file, tmp_path):
    with embedded_ids() as calls:
        output = run_tasks(llama, TASK, tmp_path, squad_source=squad_file, squad_max_new_tokens=5)
    docs = output.docs(TASK)
    assert sorted(prompts_seen(calls)) == sorted(parse_token_ids(doc["request"]) for doc in docs)
    tokenizer = hf_tokenizer(str(llama))
    for doc, sample, row in zip(docs, output.samples(TASK), SQUAD_ROWS, strict=True):
        ids = parse_token_ids(sample["resps"][0][0])
        assert len(ids) <= 5
        assert doc["prediction"] == tokenizer.decode(ids).partition("\n")[0].strip()
        assert (doc["id"], doc["question"]) == (row["id"], row["question"])
        assert doc["answers"] == [*dict.fromkeys(row["answers"]["text"])]
    metrics = output.metrics(TASK)
    for name in ("exact_match", "f1"):
        assert metrics[name] == pytest.approx(sum(doc[name] for doc in docs) / 3)
    assert (metrics["round_trip"], metrics["answer_in_prompt"]) == (1.0, 1.0)


def test_a_long_context_is_cut_at_its_end_whether_or_not_the_answer_is_lost(tokenizers, tmp_path):
    """Neither the answers in the question count, nor ends the context where it has the heading of a
    question.
    """
    context = f"100\nQuestion: {' '.join(str(number) for number in range(101, 300))}"
    rows = [
        {"id": answer, "context": context, "question": "101 or 299?", "answers": {"text": [answer]}}
        for answer in ("101", "299")
    ]
    source = task_fakes.write_rows(tmp_path / "long.jsonl", [*rows, SQUAD_ROWS[0]])
    folder = str(tokenizers["plain"])
    docs = documents(
        tokenizer=folder, squad_source=source, squad_max_new_tokens=20, prompts="token_ids"
    )["test"]
    *docs, short = docs
    assert not short["context_cut"]
    for doc in docs:
        prompt = hf_tokenizer(folder).decode(parse_token_ids(doc["request"]))
        kept = re.fullmatch("Context: (.*)\nQuestion: 101 or 299\\?\nAnswer:", prompt, re.DOTALL)[1]
        assert context.startswith(kept)
        assert doc["context_cut"]
        assert 230 <= doc["num_prompt_tokens"] <= 236
    assert [doc["answer_in_prompt"] for doc in docs] == [True, False]
