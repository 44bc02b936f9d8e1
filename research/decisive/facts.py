"""Does a model know the facts that stand in a repeated frame?"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def read_questions(file: Path) -> list[dict[str, Any]]:
    """Read the questions that :func:`research.decisive.texts.write_inputs` has written."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@torch.no_grad()
def answers_known(model_folder: Path, questions: Sequence[dict[str, Any]]) -> list[bool]:
    """Return for each question whether the right answer, the first one, is the likeliest.

    An answer has the log-probability of its tokens after the prompt. Of four answers one is right
    by chance in a quarter of the questions.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.eval()
    known = []
    for question in questions:
        num_prompt = len(tokenizer(question["prompt"])["input_ids"])
        rows = tokenizer([question["prompt"] + answer for answer in question["answers"]])
        scores = []
        for ids in rows["input_ids"]:
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            log_probabilities = logits[:-1].log_softmax(-1)
            of_tokens = log_probabilities.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            scores.append(of_tokens[num_prompt - 1 :].sum().item())
        known.append(scores[0] > max(scores[1:]))
    return known
