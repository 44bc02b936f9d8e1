import math

import numpy as np
import pytest
import torch
from analysis_fakes import VOCAB_SIZE, SuccessorModel, random_ids, tiny_llama

from tfidf_tune.analysis import token_perplexity


@pytest.fixture(scope="module")
def blocks():
    return np.array([random_ids(24, seed) for seed in range(7)], dtype=np.int32)


@torch.no_grad()
def perplexity_by_loops(model, blocks):
    total, count = 0.0, 0
    for block in torch.from_numpy(blocks).long():
        log_probs = model(input_ids=block[None]).logits[0].double().log_softmax(dim=-1)
        for position in range(1, len(block)):
            total -= log_probs[position - 1, block[position]].item()
            count += 1
    return math.exp(total / count)


def test_perplexity_equals_a_plain_loop(llama, blocks):
    assert token_perplexity(llama, blocks) == pytest.approx(perplexity_by_loops(llama, blocks), rel=1e-6)


def test_perplexity_does_not_depend_on_the_batch_size(llama, blocks):
    assert token_perplexity(llama, blocks, batch_size=3) == pytest.approx(token_perplexity(llama, blocks), rel=1e-6)


def test_the_model_of_no_preference_has_the_vocabulary_as_perplexity(blocks):
    model = tiny_llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    assert token_perplexity(model, blocks) == pytest.approx(VOCAB_SIZE, rel=1e-6)


def test_each_id_is_predicted_from_the_ids_before_it():
    # The successor gets logit 1, every other id 0.
    counting = np.arange(12, dtype=np.int32).reshape(2, 6)
    expected = (math.e + VOCAB_SIZE - 1) / math.e
    assert token_perplexity(SuccessorModel(), counting) == pytest.approx(expected, rel=1e-6)


def test_half_precision_logits_are_summed_in_full_precision(blocks):
    model = tiny_llama().to(torch.bfloat16)
    expected = perplexity_by_loops(model, blocks)
    assert token_perplexity(model, blocks, batch_size=1) == pytest.approx(expected, rel=1e-6)


def test_a_model_left_in_training_mode_is_measured_without_dropout(llama, blocks):
    model = tiny_llama(attention_dropout=0.5).train()
    assert token_perplexity(model, blocks) == token_perplexity(llama, blocks)


@pytest.mark.parametrize("unknown", [-1, VOCAB_SIZE])
def test_an_id_outside_the_vocabulary_is_refused(llama, blocks, unknown):
    blocks = blocks.copy()
    blocks[3, 5] = unknown
    with pytest.raises(ValueError, match=rf"Token id {unknown} is outside the model's vocabulary, 0 to 63"):
        token_perplexity(llama, blocks)


@pytest.mark.parametrize("shape", [(0, 256), (4, 1)])
def test_blocks_that_predict_nothing_are_refused(llama, shape):
    with pytest.raises(ValueError, match="predict no token"):
        token_perplexity(llama, np.zeros(shape, dtype=np.int32))
