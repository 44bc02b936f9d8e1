import math

import numpy as np
import pytest
import torch
from probe_fakes import VOCAB_SIZE, SuccessorModel, random_ids, tiny_llama

from tfidf_tune.probe import token_perplexity

BLOCKS = np.array([random_ids(24, seed) for seed in range(7)], dtype=np.int32)


@torch.no_grad()
def perplexity_by_loops(model):
    total, count = 0.0, 0
    for block in torch.from_numpy(BLOCKS).long():
        log_probs = model(input_ids=block[None]).logits[0].double().log_softmax(dim=-1)
        for position in range(1, len(block)):
            total -= log_probs[position - 1, block[position]].item()
            count += 1
    return math.exp(total / count)


def test_perplexity_equals_a_plain_loop(llama):
    expected = pytest.approx(perplexity_by_loops(llama), rel=1e-6)
    assert token_perplexity(llama, BLOCKS) == expected
    assert token_perplexity(llama, BLOCKS, batch_size=3) == expected
    # The successor gets logit 1, every other id 0.
    counting = np.arange(12, dtype=np.int32).reshape(2, 6)
    expected = pytest.approx((math.e + VOCAB_SIZE - 1) / math.e, rel=1e-6)
    assert token_perplexity(SuccessorModel(), counting) == expected
    assert token_perplexity(SuccessorModel(), np.array([[3, 4]])) == expected
    in_half_precision = tiny_llama().to(torch.bfloat16)
    expected = perplexity_by_loops(in_half_precision)
    assert token_perplexity(in_half_precision, BLOCKS, batch_size=1) == pytest.approx(expected, rel=1e-6)


def test_a_model_in_training_mode_is_measured_without_dropout(llama):
    assert token_perplexity(tiny_llama(attention_dropout=0.5).train(), BLOCKS) == token_perplexity(llama, BLOCKS)


def test_ids_outside_the_vocabulary_and_blocks_that_predict_nothing_are_refused(llama):
    for unknown in (-1, VOCAB_SIZE):
        wrong = BLOCKS.copy()
        wrong[3, 5] = unknown
        with pytest.raises(ValueError, match=rf"Token id {unknown} is outside the model's vocabulary, 0 to 63"):
            token_perplexity(llama, wrong)
    for shape in ((0, 256), (4, 1)):
        with pytest.raises(ValueError, match="predict no token"):
            token_perplexity(llama, np.zeros(shape, dtype=np.int32))
