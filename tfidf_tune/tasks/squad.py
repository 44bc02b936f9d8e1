"""``tfidf_squad``: answer a question about a paragraph; exact match and F1 over all gold answers.

Section "QA" of the paper on SQuAD v1.1. The scores are those of the official evaluation (Rajpurkar
et al. 2016, https://arxiv.org/abs/1606.05250): in lower case, without punctuation and the articles
a, an and the; the best over the gold answers of a question.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset

from tfidf_tune._checks import check_at_least
from tfidf_tune.data import TextSource, load_rows
from tfidf_tune.data.squad_and_news import SQUAD_COLUMNS, encode_prompts, squad_prompt
from tfidf_tune.tasks._requests import prompts_of
from tfidf_tune.tasks._task import task_documents
from tfidf_tune.tasks.settings import prompts_for

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def documents(
    *,
    squad_source: str = "rajpurkar/squad",
    squad_name: str | None = None,
    squad_split: str = "validation",
    squad_max_seq_len: int = 256,
    squad_max_new_tokens: int = 32,
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make a document of each question; ``docs/evaluation.md`` describes the settings.

    The prompt is that of :func:`tfidf_tune.data.squad_dataset`. Prompt and answer share
    ``squad_max_seq_len`` tokens, as in training. A context that is too long is truncated at its
    end, because an evaluation must not use the position of the answer.
    """
    check_at_least(1, squad_max_new_tokens=squad_max_new_tokens)
    check_at_least(squad_max_new_tokens + 1, squad_max_seq_len=squad_max_seq_len)
    prompts = prompts_for(metadata)
    prompts.check_length(squad_max_seq_len, "squad_max_seq_len")
    # Questions that nobody answered cannot be scored.
    questions = load_rows(TextSource(squad_source, squad_name, squad_split), SQUAD_COLUMNS, ["id"])
    answered = [
        (str(row.get("id") or number), row, answers)
        for number, row in enumerate(question.columns for question in questions)
        if row["context"] and row["question"] and (answers := _answers(row, squad_source))
    ]
    if not answered:
        raise ValueError(f"{squad_source!r} has no answered question: name another squad_source")
    instructions = [partial(squad_prompt, question=row["question"]) for _, row, _ in answered]
    contexts = [row["context"] for _, row, _ in answered]
    all_ids, cut = encode_prompts(
        prompts.tokenizer, instructions, contexts, squad_max_seq_len - squad_max_new_tokens
    )
    # Whether a truncated context still has the answer is recorded, because it bounds the score.
    kept = [prompts.tokenizer.decode(ids).rpartition("\nQuestion:")[0] for ids in all_ids]
    rows = [
        {
            "id": name,
            "question": row["question"],
            "answers": answers,
            **prompts.document(ids, squad_max_new_tokens),
            "context_cut": index in cut,
            "answer_in_prompt": any(answer in kept[index] for answer in answers),
        }
        for index, ((name, row, answers), ids) in enumerate(zip(answered, all_ids, strict=True))
    ]
    return task_documents(rows, "prompts", prompts)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score the first line of a response; add ``prediction`` and the scores × 100 to the document
    for the log.
    """
    doc["prediction"] = prompts_of(doc).response_text(results[0]).partition("\n")[0].strip()
    doc["exact_match"] = 100.0 * max(
        exact_match(doc["prediction"], answer) for answer in doc["answers"]
    )
    doc["f1"] = 100.0 * max(f1(doc["prediction"], answer) for answer in doc["answers"])
    return {
        "exact_match": doc["exact_match"],
        "f1": doc["f1"],
        "answer_in_prompt": float(doc["answer_in_prompt"]),
        "round_trip": float(doc["round_trip"]),
    }


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if the normalized texts are equal, else 0."""
    return float(_words(prediction) == _words(answer))


def f1(prediction: str, answer: str) -> float:
    """Return F1 = 2 · precision · recall / (precision + recall) of the normalized texts' words, as
    multisets.
    """
    predicted, gold = _words(prediction), _words(answer)
    num_shared = (Counter(predicted) & Counter(gold)).total()
    return 2 * num_shared / (len(predicted) + len(gold)) if num_shared else 0.0


def _words(text: str) -> Sequence[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _answers(row: dict[str, Any], source: str) -> list[str]:
    """Return the distinct gold answers."""
    texts = (row["answers"] or {}).get("text") or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        held = str(row["answers"])[:80]
        raise ValueError(
            f"column 'answers' of {source!r} holds {held}: name a source where 'text' is a list"
        )
    return list(dict.fromkeys(text for text in texts if text.strip()))
