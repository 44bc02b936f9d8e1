"""Does a model know the facts that stand in a repeated frame?

A model that only knows which answers are frequent is right more often than one time in four. So the
same questions are also asked about strangers: customers that no record in training is about.
"""

import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from research.files import read_json_lines
from tfidf_tune._tokenizer import TextTokenizer, encode_texts

_CUSTOMER = re.compile(r"Customer: (\w+)\.")


def facts_of(model: PreTrainedModel, tokenizer: TextTokenizer, inputs: Path) -> dict[str, float]:
    """Ask a model all questions of a seed, and the same about strangers.

    Args:
        model: Asked.
        tokenizer: Of the model.
        inputs: The folder of a seed, by :func:`research.decisive.texts.write_inputs`.

    Returns:
        ``facts_known``: the share of questions whose right answer, the first one, is the likeliest.
        ``facts_of_strangers``: the same share if the customer is a stranger. ``facts_margin``: by
        how much the log-probability of the right answer, minus the mean of the others, is higher
        than of a stranger (nats, the mean over questions); 0 if no fact was learned.
    """
    questions = read_json_lines(inputs / "facts.jsonl")
    of_strangers = read_json_lines(inputs / "new_records.jsonl")
    names = [_CUSTOMER.findall(record["text"])[0] for record in of_strangers]
    scores = answer_scores(model, tokenizer, questions)
    scores_of_strangers = answer_scores(model, tokenizer, about_strangers(questions, names))
    return {
        "facts_known": _share_known(scores),
        "facts_of_strangers": _share_known(scores_of_strangers),
        "facts_margin": _margin(scores) - _margin(scores_of_strangers),
    }


def about_strangers(
    questions: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the questions with a stranger's name in place of the customer's."""
    asked = []
    for question, name in zip(questions, cycle(names), strict=False):
        prompt = _CUSTOMER.sub(f"Customer: {name}.", question["prompt"])
        asked.append(question | {"prompt": prompt})
    return asked


@torch.no_grad()
def answer_scores(
    model: PreTrainedModel, tokenizer: TextTokenizer, questions: Sequence[dict[str, Any]]
) -> list[list[float]]:
    """Return for each question the log-probability of each answer's tokens after the prompt."""
    model.eval()
    scores = []
    for question in questions:
        (prompt,) = encode_texts(tokenizer, [question["prompt"]])
        texts = [question["prompt"] + answer for answer in question["answers"]]
        of_question = []
        for ids in encode_texts(tokenizer, texts):
            tokens = torch.from_numpy(ids).long()
            logits = model(input_ids=tokens[None, :-1]).logits[0].float()
            of_tokens = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            of_question.append(float(of_tokens[len(prompt) - 1 :].sum()))
        scores.append(of_question)
    return scores


def _share_known(scores: Sequence[Sequence[float]]) -> float:
    return fmean(of_question[0] > max(of_question[1:]) for of_question in scores)


def _margin(scores: Sequence[Sequence[float]]) -> float:
    return fmean(of_question[0] - fmean(of_question[1:]) for of_question in scores)
