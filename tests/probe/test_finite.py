"""NaN and infinite logits end every measurement with an error; -inf masks the rest of a padded
vocabulary.
"""

import math

import pytest
import torch
from helpers.fakes.probe import WordTokenizer, a_passage, random_ids, tiny_llama
from helpers.references.probe import probe

from tfidf_tune.probe import MemorizationProbe, token_likelihoods
from tfidf_tune.probe.decoding import continue_prompts, decode_greedily, generated_continuations
from tfidf_tune.probe.finite import NonFiniteLogits

CPU = torch.device("cpu")
REFUSED = (
    r"passage target-0001 are NaN or infinite in float32: the model has diverged.*dtype=float32"
)


def logits(ids, row=1, **values):
    """Logits ``[b, n, 8]`` whose likeliest token is 2, but of one row for whatever is given."""
    made = torch.zeros(*ids.shape, 8)
    made[..., 2] = 1.0
    for token, value in values.items():
        made[row, ..., int(token[1:])] = value
    return made


@pytest.mark.parametrize(
    "values", [{"t5": math.nan}, {"t5": math.inf}, {f"t{i}": -math.inf for i in range(8)}]
)
def test_decoding_refuses_them_and_names_the_prompt(values):
    def continue_batch(prompts, numbers):
        return decode_greedily(
            lambda ids: logits(ids, row=len(prompts) - 1, **values),
            prompts,
            numbers,
            device=CPU,
            eos_id=2,
        )

    with pytest.raises(NonFiniteLogits) as refused:
        continue_prompts(continue_batch, [[1], [1, 1, 1]], [4, 4], batch_size=2)
    # The longest prompt comes first in a batch, the shortest is its last row.
    assert refused.value.index == 0


def test_negative_infinity_masks_tokens():
    masked = {"t6": -math.inf, "t7": -math.inf}
    made = decode_greedily(lambda ids: logits(ids, **masked), [[1], [1]], [3, 3], device=CPU)
    assert made == [[2, 2, 2]] * 2


@pytest.fixture
def diverged():
    """A Llama that has no number for the token 7 of any position."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[7] = math.nan
    return model


def test_scores_samples_and_beams_refuse_them(diverged):
    with pytest.raises(NonFiniteLogits, match="text 0 are NaN"):
        token_likelihoods(diverged, [random_ids(9, 1)])
    for generation in ({"do_sample": True, "temperature": 1.0, "top_k": 0}, {"num_beams": 2}):
        with pytest.raises(NonFiniteLogits):
            generated_continuations(diverged, random_ids(4, 1), 4, generation)


def test_the_monitor_refuses_them_and_names_the_passage(diverged):
    passages = [a_passage("target-0001", random_ids(40, 1))]
    monitor = MemorizationProbe(passages, WordTokenizer(), prefix_length=8, max_new_tokens=8)

    def last_logits(ids, number):
        return diverged(input_ids=ids).logits[:, -number:]

    with pytest.raises(NonFiniteLogits, match=REFUSED):
        monitor.measure(
            last_logits, lambda prompts, numbers: pytest.fail("nothing has to be decoded")
        )


def test_the_probe_refuses_them(diverged):
    with pytest.raises(NonFiniteLogits):
        probe(
            diverged,
            WordTokenizer(),
            [a_passage("target-0001", random_ids(40, 1))],
            prefix_lengths=(8,),
        )
