"""Repetition weights against exact n-grams in a dictionary: what counts as the same, what the window forgets."""

import pytest
import torch
from code_paths import CODE_PATHS, code_path
from label_batches import random_labels
from peer_reference import ReferenceRepetition
from tfidf_reference import IGNORED

from tfidf_tune.weighting import GoldfishWeighting, ProductWeighting, RepetitionWeighting

VOCAB_SIZE = 6
# The weight is one float32 power of a small whole number.
RTOL = 4 * torch.finfo(torch.float32).eps


def assert_equal(weights, expected):
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=RTOL, atol=0)


def batches(number, rows=3, length=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        labels = random_labels(generator, rows, length, VOCAB_SIZE)
        yield labels


@pytest.mark.parametrize("path", CODE_PATHS)
@pytest.mark.parametrize(
    ("h", "alpha", "num_batches", "documents"),
    [(1, 1.0, 1024, False), (2, 0.5, 3, False), (3, 2.0, 1024, True), (40, 1.0, 2, False)],
)
def test_weights_are_those_of_counted_ngrams(path, h, alpha, num_batches, documents):
    """One row comes again each time; with few batches in the window others leave it."""
    weighting = RepetitionWeighting(h=h, alpha=alpha, num_batches=num_batches, num_buckets=2**20)
    reference = ReferenceRepetition(h, alpha, num_batches)
    document_ids = (torch.arange(30) // 7).expand(3, 30).contiguous() if documents else None
    ids = None if document_ids is None else document_ids.tolist()
    smallest = 1.0
    for i, labels in enumerate(batches(8)):
        labels[1] = next(batches(1, rows=1, seed=9))
        training = i % 4 != 3
        with code_path(path):
            weights = weighting.train(training)(labels, vocab_size=VOCAB_SIZE, document_ids=document_ids)
        assert_equal(weights, reference(labels.tolist(), ids, training))
        smallest = min(smallest, weights[labels != IGNORED].min().item())
    assert smallest < 1 or h == 40


def test_short_answers_after_masked_prompts_keep_their_weight():
    weighting, labels = RepetitionWeighting(h=4), torch.full((8, 12), IGNORED)
    labels[:, 7:9] = torch.tensor([3, 1])  # "yes", and the end
    for _ in range(5):
        assert weighting(labels)[:, 7:9].eq(1).all()
    assert weighting.window.num_updates == 0


@pytest.mark.parametrize(
    ("num_batches", "shape", "size"), [(1024, (8, 256), 2**24), (16, (3, 5), 2**11), (2**20, (64, 2048), 2**30)]
)
def test_the_default_number_of_buckets_follows_from_the_window(num_batches, shape, size):
    weighting = RepetitionWeighting(num_batches=num_batches).to("meta")
    weighting(torch.zeros(shape, dtype=torch.int64, device="meta"), vocab_size=VOCAB_SIZE)
    assert weighting.window.vocab_size == size


def in_a_product(h):
    return ProductWeighting(RepetitionWeighting(h=h), GoldfishWeighting())


def test_a_window_of_n_grams_of_another_length_is_refused():
    saved = RepetitionWeighting(h=3).state_dict()
    RepetitionWeighting(h=3).load_state_dict(saved)
    message = "n-grams of 3 tokens of context, h is 4: set h to 3, or start with a new"
    for make in (RepetitionWeighting, in_a_product):
        saved, other = make(h=3), make(h=4)
        for one in (saved, other):
            one(torch.arange(40).view(2, 20))
        own = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(saved.state_dict())
        torch.testing.assert_close(other.state_dict(), own)
        without = {name: value for name, value in saved.state_dict().items() if not name.endswith("context_length")}
        with pytest.raises(ValueError, match="does not say how many tokens of context .*: start a new one"):
            make(h=3).load_state_dict(without)


def test_a_window_with_another_number_of_buckets_is_refused():
    first, labels = RepetitionWeighting(num_buckets=64), torch.zeros(2, 12, dtype=torch.int64)
    first(labels)
    RepetitionWeighting().load_state_dict(first.state_dict())
    second = RepetitionWeighting(num_buckets=128)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="num_buckets is 128, the window that was loaded has 64"):
        second(labels)


def test_collisions_are_as_probable_as_documented():
    generator = torch.Generator().manual_seed(4)
    weighting = RepetitionWeighting(h=3, num_buckets=4096)
    num_known = 16 * (128 - 3)
    weighting(torch.randint(10**6, (16, 128), generator=generator))
    labels = torch.randint(10**6, (64, 256), generator=generator)

    taken_for_old = (weighting(labels)[:, 3:] < 1).double().mean().item()

    expected = 1 - torch.exp(torch.tensor(-num_known / 4096)).item()
    deviation = (expected * (1 - expected) * (1 / labels.numel() + 1 / 4096)) ** 0.5  # of labels, and of the table
    assert abs(taken_for_old - expected) < 5 * deviation


def test_by_default_the_nth_repetition_of_5_tokens_counts_one_nth():
    weighting, labels = RepetitionWeighting(), torch.arange(20)[None]
    weights = [weighting(labels)[0] for _ in range(5)]
    assert all(row[:4].eq(1).all() for row in weights)
    assert [row[4:].unique().item() for row in weights] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
