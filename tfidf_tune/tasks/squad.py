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
    source = TextSource(squad_source, squad_name, squad_split)
    examples: list[dict[str, Any]] = []
    contexts = []
    instructions = []
    for number, row in enumerate(load_rows(source, SQUAD_COLUMNS, ["id"])):
        question = row.columns["question"]
        if not row.columns["context"] or not question:
            continue
        answers = _answers(row.columns, squad_source)
        if answers:
            name = str(row.columns.get("id") or number)
            examples.append({"id": name, "question": question, "answers": answers})
            contexts.append(row.columns["context"])
            instructions.append(partial(squad_prompt, question=question))
    if not examples:
        raise ValueError(f"{squad_source!r} has no answered question: name another squad_source")
    most_tokens = squad_max_seq_len - squad_max_new_tokens
    all_ids, cut = encode_prompts(prompts.tokenizer, instructions, contexts, most_tokens)
    rows = []
    for index, (example, ids) in enumerate(zip(examples, all_ids, strict=True)):
        document = example | prompts.document(ids, squad_max_new_tokens)
        document["context_cut"] = index in cut
        # Whether a truncated context still has the answer is recorded, because it bounds the score.
        context, _, _ = prompts.tokenizer.decode(ids).rpartition("\nQuestion:")
        document["answer_in_prompt"] = any(answer in context for answer in example["answers"])
        rows.append(document)
    return task_documents(rows, "prompts", prompts)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score the first line of a response; add ``prediction`` and the scores × 100 to the document
    for the log.
    """
    response = prompts_of(doc).response_text(results[0])
    first_line, _, _ = response.partition("\n")
    prediction = first_line.strip()
    doc["prediction"] = prediction
    doc["exact_match"] = 100.0 * max(exact_match(prediction, answer) for answer in doc["answers"])
    doc["f1"] = 100.0 * max(f1(prediction, answer) for answer in doc["answers"])
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

    With ``s`` words shared by ``p`` predicted ones and ``g`` of the answer, this is
    ``2 · s / (p + g)``::

        prediction  "the red, red ship"    red red ship      p = 3
        answer      "A red ship sailed"    red ship sailed   g = 3
        shared                             red ship          s = 2    precision 2/3, recall 2/3
        F1 = 2 · 2 / (3 + 3) = 2/3
    """
    predicted = _words(prediction)
    gold = _words(answer)
    shared = Counter(predicted) & Counter(gold)
    num_shared = shared.total()
    return 2 * num_shared / (len(predicted) + len(gold)) if num_shared else 0.0


def _words(text: str) -> Sequence[str]:
    bare = text.lower().translate(_PUNCTUATION)
    return _ARTICLES.sub(" ", bare).split()


def _answers(row: dict[str, Any], source: str) -> list[str]:
    """Return the distinct gold answers."""
    texts = (row["answers"] or {}).get("text") or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        held = str(row["answers"])[:80]
        raise ValueError(
            f"column 'answers' of {source!r} holds {held}: name a source where 'text' is a list"
        )
    return list(dict.fromkeys(text for text in texts if text.strip()))
