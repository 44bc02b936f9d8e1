"""Relearning, compared with a plain loop that trains a copy and decodes it after each step."""

import copy
import dataclasses

import pytest
import torch
from helpers.fakes.probe import a_passage, greedy_without_cache, random_ids, tiny_llama

from research.relearning import relearning_steps

SETTINGS = {"prefix_length": 8, "max_new_tokens": 6, "learning_rate": 5e-3}


def steps_by_loop(model, passage, max_steps):
    """Decode, then train a copy by the loss of transformers, until the continuation is recited."""
    copied = copy.deepcopy(model)
    num_prompt = 8 if passage.num_prompt is None else passage.num_prompt
    ids = passage.token_ids[: num_prompt + 6]
    labels = (
        torch.tensor([ids])
        if passage.num_prompt is None
        else torch.tensor([[-100] * num_prompt + ids[num_prompt:]])
    )
    optimizer = torch.optim.AdamW(copied.parameters(), lr=5e-3, weight_decay=0)
    for step in range(max_steps + 1):
        if greedy_without_cache(copied, [ids[:num_prompt]], len(ids) - num_prompt) == [
            ids[num_prompt:]
        ]:
            return step
        optimizer.zero_grad()
        copied(input_ids=torch.tensor([ids]), labels=labels).loss.backward()
        optimizer.step()
    return None


def test_steps_are_those_of_a_plain_loop_and_the_model_stays_as_it_was(llama, recited, unseen):
    known = dataclasses.replace(
        recited[0], token_ids=[*recited[0].token_ids[:11], 5, *recited[0].token_ids[12:]]
    )
    passages = [
        recited[0],
        known,
        *unseen,
        a_passage("completion", random_ids(30, 9), num_prompt=4),
    ]
    model = copy.deepcopy(llama).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    done = []
    steps = relearning_steps(model, passages, max_steps=20, progress=done.append, **SETTINGS)
    assert steps == [steps_by_loop(llama, passage, 20) for passage in passages]
    assert steps[0] == 0
    assert len(set(steps)) > 3
    assert done == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.training
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    slowest = max(number for number in steps if number is not None)
    at_most = relearning_steps(model, passages, max_steps=slowest - 1, **SETTINGS)
    expected = []
    for number in steps:
        is_reached = number is not None and number < slowest
        expected.append(number if is_reached else None)
    assert at_most == expected


def test_what_cannot_be_measured_is_refused(unseen):
    for settings, message in (
        ({"prefix_length": 52}, "'control-0' has 52 tokens of prompt and 0 to recite"),
        (
            {"prefix_length": 20, "max_new_tokens": 13},
            "'control-0' has 20 tokens of prompt and 13 to recite, .* the model's 32 positions: "
            "lower",
        ),
        ({"max_steps": -1}, "max_steps must be .* at least 0, got -1"),
        ({"learning_rate": 0.0}, r"learning_rate must be above 0, got 0\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            relearning_steps(tiny_llama(max_position_embeddings=32), unseen, **settings)
