"""Likelihoods, membership scores and extraction, against plain loops and scikit-learn."""

import math
import zlib

import numpy as np
import pytest
import scipy.stats
import torch
from helpers.fakes.probe import VOCAB_SIZE, SuccessorModel, random_ids, tiny_llama
from sklearn.metrics import roc_auc_score, roc_curve

from tfidf_tune.probe import (
    exposure,
    extraction_probability,
    membership_scores,
    passage_scores,
    token_likelihoods,
    true_positive_rate,
)
from tfidf_tune.probe.likelihoods import is_mean_positive
from tfidf_tune.results import membership

TEXTS = [random_ids(length, seed) for seed, length in enumerate((24, 9, 24, 2, 17))]


@torch.no_grad()
def likelihoods_by_loop(model, ids):
    """The formula of the authors of Min-K%++, mean and variance over the vocabulary, in float64."""
    log_probs = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double().log_softmax(dim=-1)
    chosen = log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    probs = log_probs.exp()
    mu = (probs * log_probs).sum(-1)
    variance = (probs * log_probs.square()).sum(-1) - mu.square()
    return (
        -chosen.numpy(),
        ((chosen - mu) / variance.sqrt()).numpy(),
        (chosen == log_probs.amax(-1)).numpy(),
    )


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_likelihoods_of_texts_of_any_length_equal_a_loop_over_single_texts(llama, batch_size):
    counted = []
    scored = token_likelihoods(llama, TEXTS, batch_size=batch_size, progress=counted.append)
    assert sum(counted) == len(scored) == len(TEXTS)
    for ids, one in zip(TEXTS, scored, strict=True):
        nll, standardized, greedy = likelihoods_by_loop(llama, ids)
        assert one.nll == pytest.approx(nll, rel=1e-5, abs=1e-5)
        assert one.standardized == pytest.approx(standardized, rel=1e-4, abs=1e-4)
        assert one.greedy.tolist() == greedy.tolist()


def test_likelihoods_in_bfloat16_are_those_of_the_same_logits_and_of_known_ones():
    model = tiny_llama().to(torch.bfloat16)
    for ids, one in zip(TEXTS, token_likelihoods(model, TEXTS, batch_size=1), strict=True):
        assert one.nll == pytest.approx(likelihoods_by_loop(model, ids)[0], rel=1e-6, abs=1e-6)
    # The successor gets logit 1, every other id 0.
    (one,) = token_likelihoods(SuccessorModel(), [[*range(6)]])
    assert one.nll == pytest.approx([math.log((math.e + VOCAB_SIZE - 1) / math.e)] * 5, rel=1e-6)


def test_what_a_model_recites_is_greedy_and_dropout_is_off(llama, recited):
    texts = [passage.token_ids for passage in recited]
    in_training = tiny_llama(attention_dropout=0.5).train()
    for one, same in zip(
        token_likelihoods(llama, texts), token_likelihoods(in_training, texts), strict=True
    ):
        assert one.greedy[7:].all()
        assert np.array_equal(one.nll, same.nll)


def test_a_uniform_and_a_certain_distribution_and_impossible_tokens_have_finite_scores():
    class Fixed(torch.nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits = logits
            self.embedding = torch.nn.Embedding(4, 1)

        def get_input_embeddings(self):
            return self.embedding

        def forward(self, input_ids, use_cache):
            return type("Output", (), {"logits": self.logits.expand(*input_ids.shape, -1)})

    infinite = -math.inf
    for logits, token, nll, standardized in (
        ([0.0, 0.0, 0.0, 0.0], 1, math.log(4), 0.0),
        ([0.0, infinite, infinite, infinite], 0, 0.0, 0.0),
        # Probabilities 1/4 and 3/4: the mean of -ln 4 and ln(3/4), and deviations of 3/4 ln 3 and
        # 1/4 ln 3.
        ([0.0, math.log(3), infinite, infinite], 1, math.log(4 / 3), 1 / math.sqrt(3)),
    ):
        (one,) = token_likelihoods(Fixed(torch.tensor(logits)), [[2, token]])
        assert one.nll == pytest.approx([nll], abs=1e-6)
        assert one.standardized == pytest.approx([standardized], abs=1e-6)


def test_scores_of_a_passage_by_hand():
    nll = np.array([1.0, 4.0, 2.0, 3.0, 0.5, 0.0, 0.1, 6.0, 0.2, 0.3, 0.4])  # the two lowest of 11
    standardized = np.array([0.0, -1.0, -5.0, 2.0, 1.0, 0.0, -2.0, 1.0, 1.0, 1.0, 1.0])
    text = "a passage, a passage — a passage"
    assert passage_scores(nll, standardized, text) == pytest.approx(
        {
            "nll": 17.5 / 11,
            "min_k": -5.0,
            "min_k_plus_plus": -3.5,
            "zlib": 17.5 / len(zlib.compress(text.encode())),
        }
    )
    assert passage_scores(nll[:3], standardized[:3], text)["min_k"] == -4.0  # at least one token


def test_scores_of_attacks_are_higher_for_what_is_more_likely():
    values = {
        "nll": [1.0, 2.0],
        "zlib": [0.1, 0.2],
        "min_k": [-3.0, -4.0],
        "min_k_plus_plus": [-1.0, -2.0],
    }
    values = {
        name: np.array(both) for name, both in {**values, "reference_nll": [5.0, 5.5]}.items()
    }
    scores = membership_scores(values)
    assert list(scores) == ["Loss", "zlib", "Min-K%", "Min-K%++", "Loss against start"]
    assert all(score[0] > score[1] for score in scores.values())
    assert scores["Loss against start"].tolist() == [4.0, 3.5]
    assert list(membership_scores({"nll": values["nll"]})) == ["Loss"]


@pytest.mark.parametrize("num_others", [40, 100, 250])
def test_auc_and_tpr_are_those_of_scikit_learn(num_others):
    rng = np.random.default_rng(num_others)
    # With ties.
    members = rng.normal(0.7, 1, (1, 60)).round(1)
    others = rng.normal(0, 1, (1, num_others)).round(1)
    made = membership(members, others)
    labels = np.repeat([1, 0], [60, num_others])
    scores = np.concatenate([members[0], others[0]])
    assert made.auc == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)
    false_positives, true_positives, _ = roc_curve(labels, scores, drop_intermediate=False)
    assert made.tpr == true_positives[false_positives <= 0.01].max()
    assert (
        true_positive_rate(members, others, 0.1)[0] == true_positives[false_positives <= 0.1].max()
    )


def test_intervals_agree_with_a_loop_that_resamples_members_and_others_separately():
    rng = np.random.default_rng(0)
    # two models
    members = rng.normal(0.5, 1, (2, 30))
    others = rng.normal(0, 1, (2, 45))
    made = membership(members, others)
    both = [
        roc_auc_score([1] * 30 + [0] * 45, [*a, *b]) for a, b in zip(members, others, strict=True)
    ]
    assert made.auc == pytest.approx(np.mean(both))
    aucs = []
    tprs = []
    for _ in range(4000):
        ours = members[:, rng.integers(30, size=30)]
        theirs = others[:, rng.integers(45, size=45)]
        aucs.append(
            np.mean(ours[:, :, None] > theirs[:, None, :])
            + np.mean(ours[:, :, None] == theirs[:, None]) / 2
        )
        tprs.append(np.mean(ours > theirs.max(axis=1, keepdims=True)))
    # Each share has a standard deviation of sqrt(0.025 * 0.975 / n), of 4,000 and of 10,000
    # resamples.
    tolerance = 4 * math.sqrt(0.025 * 0.975 * (1 / 4000 + 1 / 10_000))
    assert np.mean(np.array(aucs) < made.auc_interval.low) == pytest.approx(0.025, abs=tolerance)
    assert np.mean(np.array(aucs) > made.auc_interval.high) == pytest.approx(0.025, abs=tolerance)
    # Multiples of 1/60: not exactly.
    assert np.mean(np.array(tprs) < made.tpr_interval.low) <= 0.025 + tolerance
    assert np.mean(np.array(tprs) > made.tpr_interval.high) <= 0.025 + tolerance
    assert made.tpr_interval.low < made.tpr < made.tpr_interval.high
    assert made.auc_interval.num_units == 30


def test_what_is_apart_has_an_auc_of_one_and_what_diverged_has_none():
    noise = np.random.default_rng(0).normal(size=(1, 40))
    apart = membership(noise + 100, noise)
    assert (apart.auc, apart.auc_interval[:2], apart.tpr) == (1.0, (1.0, 1.0), 1.0)
    for scores in (np.full((1, 40), math.nan), np.full((1, 40), -math.inf), np.zeros((1, 0))):
        assert math.isnan(membership(scores, noise).auc)


def test_exposure_is_that_of_a_loop_and_of_the_published_implementation():
    # TensorFlow Privacy, exposures_test.py: 16 references, |R| without the canary itself.
    theirs = np.log2(16) - np.log2([1, 1, 17, 4])
    canaries = np.array([0, 0.1, 20.0, 3.5])
    references = np.arange(1.0, 17.0)
    assert exposure(canaries, references) == pytest.approx(theirs + np.log2(17 / 16))
    rng = np.random.default_rng(0)
    nll = rng.normal(size=30).round(1)
    controls = rng.normal(0.5, 1, size=50).round(1)
    expected = []
    for value in nll:
        rank = [other <= value for other in controls].count(True) + 1  # ties are no evidence
        expected.append(math.log2(51) - math.log2(rank))
    assert exposure(nll, controls) == pytest.approx(expected)
    assert len({*nll} & {*controls}) > 3
    assert exposure(controls[:0], controls).shape == (0,)


def test_extraction_probability_is_that_of_repeated_sampling(llama):
    # Sampling the next two tokens: the share of samples that are the reference.
    (scored,) = token_likelihoods(llama, [TEXTS[0][:6]])
    nll = scored.nll[3:].sum()
    q = math.exp(-nll)
    assert extraction_probability(nll, 1) == pytest.approx(q, rel=1e-9)
    assert extraction_probability(nll, 50) == pytest.approx(1 - (1 - q) ** 50, rel=1e-9)
    assert extraction_probability(np.array([0.0, nll, 2000.0]), 7) == pytest.approx(
        [1.0, 1 - (1 - q) ** 7, 0.0]
    )
    assert extraction_probability(np.array([0.0, nll, 2000.0]), 0).tolist() == [0, 0, 0]
    # 1 - q rounds to 1.
    assert extraction_probability(40.0, 1000) == pytest.approx(1000 * math.exp(-40), rel=1e-9)


def test_a_mean_is_positive_if_the_interval_of_students_t_is():
    rng = np.random.default_rng(0)
    found = []
    for shift in (-1.0, 0.0, 0.3, 0.6, 2.0):
        values = rng.normal(shift, 1.0, 12)
        expected = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95).low > 0
        assert is_mean_positive(values) == expected
        found.append(expected)
    assert {*found} == {False, True}
    assert is_mean_positive(np.full(5, 0.25))  # no spread
    assert not is_mean_positive(np.array([1.0]))
