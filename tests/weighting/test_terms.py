"""The distinct keys of each row, against a counter."""

from collections import Counter

import pytest
import torch
from label_batches import random_labels

from tfidf_tune.weighting import distinct_terms
from tfidf_tune.weighting._tfidf import Terms

TOP, BOTTOM = 2**63 - 1, -(2**63)


def assert_terms_of_each_row(terms, keys):
    """Every position leads to a term of its own row, which has the key found there and its count in the row."""
    assert isinstance(terms, Terms)
    assert terms.keys.dtype == keys.dtype
    assert terms.counts.dtype == terms.positions.dtype == torch.int64
    assert terms.positions.shape == keys.shape
    assert torch.equal(terms.keys[terms.positions], keys)
    of_rows = [set(row) for row in terms.positions.tolist()]
    for row, of_row in zip(keys.tolist(), of_rows, strict=True):
        found = {int(terms.keys[term]): int(terms.counts[term]) for term in of_row}
        assert found == Counter(row)
        assert len(found) == len(of_row), "a key has one term in a row"
    assert len(set().union(*of_rows)) == sum(map(len, of_rows)), "no two rows share a term"


def keys_of_shape(rows, length, num_keys=40):
    return random_labels(torch.Generator().manual_seed(length), rows, length, num_keys)


def cases():
    yield from (keys_of_shape(*shape) for shape in [(1, 1), (3, 1), (1, 17), (4, 50), (2, 4096), (300, 2)])
    for rows in (
        [[1, 5], [5, 5], [5, 9]],  # the last key of a row in sorted order is the first of the next
        [[7, 7, 7], [7, 7, 7]],
        [[-1, -1, 4], [-1, 4, 4], [-1, -1, -1]],
        [[TOP, TOP - 1, TOP, BOTTOM], [BOTTOM, BOTTOM + 1, TOP - 1, BOTTOM]],
    ):
        yield torch.tensor(rows)
    keys = keys_of_shape(4, 50)
    yield from (keys.t(), keys[:, ::3], keys[::2], keys[:1].expand(3, 50))  # not contiguous
    for dtype in (torch.int16, torch.int32):
        narrow = keys.to(dtype)
        narrow[0, :3] = torch.tensor([torch.iinfo(dtype).max, torch.iinfo(dtype).min, torch.iinfo(dtype).max])
        yield narrow


def test_the_terms_of_each_row_equal_a_counter():
    for keys in cases():
        before, num_terms = keys.clone(), sum(len(set(row)) for row in keys.tolist())
        terms = distinct_terms(keys)
        assert_terms_of_each_row(terms, keys)
        assert terms.keys.shape == terms.counts.shape == (keys.numel(),)
        assert int(terms.counts.sum()) == keys.numel()
        assert (terms.counts[num_terms:] == 0).all()
        assert (terms.keys[num_terms:] == -1).all()
        terms.keys.fill_(0)
        assert torch.equal(keys, before)


def test_on_a_device_the_shapes_do_not_depend_on_values():
    """The meta device stands for a GPU: it has shapes and no values."""
    terms = distinct_terms(torch.zeros(3, 5, dtype=torch.int64, device="meta"))
    assert (terms.keys.shape, terms.counts.shape, terms.positions.shape) == ((15,), (15,), (3, 5))
    assert {tensor.device.type for tensor in terms} == {"meta"}


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_without_keys_there_are_no_terms(shape):
    terms = distinct_terms(torch.zeros(shape, dtype=torch.int64))
    assert [tuple(part.shape) for part in terms] == [(0,), (0,), shape]
