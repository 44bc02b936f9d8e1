"""Saving and loading the window at any point, in any order of batches, shapes, dtypes."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from label_batches import random_stream
from tfidf_reference import IGNORED

from tfidf_tune.weighting import TFIDFWeighting

VOCAB_SIZE = 12
few_examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)

tokens = st.one_of(st.just(IGNORED), st.integers(0, VOCAB_SIZE - 1))
batches = st.tuples(st.integers(1, 3), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(st.lists(tokens, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])
)
streams = st.lists(batches.map(torch.tensor), min_size=1, max_size=8)


def saved_and_loaded(weighting, fresh):
    file = io.BytesIO()
    torch.save(weighting.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


@given(streams, st.integers(1, 4), st.data())
@few_examples
def test_a_window_loaded_at_any_point_goes_on_as_if_never_saved(stream, num_batches, data):
    when = data.draw(st.integers(0, len(stream)), label="batches before the save")
    never_saved = TFIDFWeighting(num_batches=num_batches)
    resumed = TFIDFWeighting(num_batches=num_batches)
    for i, labels in enumerate(stream):
        if i == when:
            resumed = saved_and_loaded(resumed, TFIDFWeighting(num_batches=num_batches))
        assert torch.equal(resumed(labels), never_saved(labels))
    final = saved_and_loaded(resumed, TFIDFWeighting(num_batches=num_batches)).state_dict()
    assert final.keys() == never_saved.state_dict().keys()
    assert all(torch.equal(final[name], tensor) for name, tensor in never_saved.state_dict().items())


@given(streams, streams, st.integers(1, 4))
@few_examples
def test_a_loaded_window_replaces_whatever_was_there(stream, other, num_batches):
    saved, used = TFIDFWeighting(num_batches=num_batches), TFIDFWeighting(num_batches=num_batches)
    for labels in stream:
        saved(labels)
    for labels in other:
        used(labels)
    saved_and_loaded(saved, used)
    for labels in [*other, *stream]:
        assert torch.equal(used(labels), saved(labels))


@given(streams, st.integers(1, 4), st.data())
@few_examples
def test_evaluation_at_any_point_does_not_change_what_follows(stream, num_batches, data):
    never_evaluated = TFIDFWeighting(num_batches=num_batches)
    evaluated = TFIDFWeighting(num_batches=num_batches)
    for labels in stream:
        if data.draw(st.booleans(), label="evaluate"):
            evaluated.eval()(data.draw(batches.map(torch.tensor), label="validation batch"))
            evaluated.train()
        assert torch.equal(evaluated(labels), never_evaluated(labels))


def test_bfloat16_leaves_the_counts_as_they_are():
    stream = random_stream(seed=31, num_batches=24, max_rows=60, max_length=12, vocab_size=9)
    plain, halved = TFIDFWeighting(num_batches=20), TFIDFWeighting(num_batches=20)
    for i, labels in enumerate(stream):
        expected = plain(labels)
        if i % 4 == 3:
            halved = halved.to(torch.bfloat16)
        assert torch.equal(halved(labels), expected)
    # bfloat16 holds integers up to 256 exactly: the counts must be beyond that for this test to mean anything.
    assert max(int(tensor.max()) for tensor in plain.state_dict().values()) > 256
    halved = saved_and_loaded(halved.to(torch.bfloat16), TFIDFWeighting(num_batches=20).to(torch.bfloat16))
    assert all(torch.equal(halved.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())


def test_a_window_of_another_number_of_batches_is_an_error():
    saved = TFIDFWeighting(num_batches=3)
    saved(torch.tensor([[1, 2]]))
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)\b3\b.*\b4\b|\b4\b.*\b3\b"):
        TFIDFWeighting(num_batches=4).load_state_dict(saved.state_dict())


def test_the_state_of_another_number_of_batches_is_an_error_before_the_first_batch_too():
    with pytest.raises((RuntimeError, ValueError)):
        TFIDFWeighting(num_batches=4).load_state_dict(TFIDFWeighting(num_batches=3).state_dict())


def test_a_state_without_the_window_is_an_error():
    with pytest.raises(RuntimeError, match="Missing key"):
        TFIDFWeighting().load_state_dict({})


def test_loading_does_not_tie_the_window_to_the_loaded_tensors():
    saved, loaded = TFIDFWeighting(num_batches=2), TFIDFWeighting(num_batches=2)
    saved(torch.tensor([[1, 2, 2]]))
    state = saved.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    loaded.load_state_dict(state)
    loaded(torch.tensor([[1, 1, 2]]))
    assert before
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_the_window_is_saved_under_the_name_of_the_module_that_holds_it():
    holder = torch.nn.ModuleDict({"weighting": TFIDFWeighting(num_batches=2)})
    holder["weighting"](torch.tensor([[1, 2, 2]]))
    fresh = torch.nn.ModuleDict({"weighting": TFIDFWeighting(num_batches=2)})
    fresh.load_state_dict(holder.state_dict())
    labels = torch.tensor([[2, 5, 5]])
    assert torch.equal(fresh["weighting"](labels), holder["weighting"](labels))


def test_a_state_that_is_refused_leaves_the_window_as_it_was():
    stream = random_stream(3, num_batches=5, max_rows=3, max_length=9, vocab_size=VOCAB_SIZE)
    weighting, other = TFIDFWeighting(num_batches=4), TFIDFWeighting(num_batches=3)
    for labels in stream:
        weighting(labels)
        other(labels)
    before = {name: value.clone() for name, value in weighting.state_dict().items()}

    with pytest.raises(RuntimeError, match="the saved window holds 3 batches, this one 4: set num_batches to 3"):
        weighting.load_state_dict(other.state_dict())

    assert all(torch.equal(value, before[name]) for name, value in weighting.state_dict().items())


def test_a_window_of_another_number_of_batches_is_refused_where_missing_keys_are_not():
    with pytest.raises(RuntimeError, match="the saved window holds 3 batches, this one 4"):
        TFIDFWeighting(num_batches=4).load_state_dict(TFIDFWeighting(num_batches=3).state_dict(), strict=False)
