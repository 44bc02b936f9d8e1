"""Saving and loading the window at any point, in any order of batches, shapes, dtypes."""

import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
from helpers.fakes.label_batches import (
    CalledWeighting,
    assert_same_state,
    random_stream,
    state_copy,
)
from helpers.references.tfidf import IGNORED
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

from tfidf_tune.weighting import (
    GoldfishWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
)

VOCAB_SIZE = 12
few_examples = settings(max_examples=25, derandomize=True, database=None)

tokens = st.one_of(st.just(IGNORED), st.integers(0, VOCAB_SIZE - 1))
batches = st.tuples(st.integers(1, 3), st.integers(1, 6)).flatmap(
    lambda shape: st.lists(
        st.lists(tokens, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
    )
)


@st.composite
def arguments_of_a_call(draw):
    """Labels, the documents of a row or none, and what is known of the vocabulary, which may be
    more than is there.
    """
    labels = draw(batches.map(torch.tensor))
    document_ids = None
    if draw(st.booleans()):
        ids = st.lists(st.integers(0, 2), min_size=labels.numel(), max_size=labels.numel())
        document_ids = torch.tensor(draw(ids)).view_as(labels)
    vocab_size = draw(st.sampled_from([None, VOCAB_SIZE, 7 * VOCAB_SIZE]))
    return {"labels": labels, "document_ids": document_ids, "vocab_size": vocab_size}


def through_torch(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(state):
    return safetensors.torch.load(safetensors.torch.save(state))


@given(
    through=st.sampled_from([through_torch, through_safetensors]),
    happenings=st.lists(
        st.tuples(st.sampled_from(["train", "train", "save", "evaluate"]), arguments_of_a_call()),
        min_size=6,
        max_size=16,
    ),
    settings_of_weights=st.fixed_dictionaries(
        {
            "num_batches": st.integers(1, 4),
            "tf": st.sampled_from(["count", "log", "binary"]),
            "max_weight": st.sampled_from([None, 1.3]),
        }
    ),
)
@few_examples
def test_saving_loading_and_evaluation_do_not_change_later_weights(
    through, happenings, settings_of_weights
):
    """Any order of batches, shapes, documents and vocabularies, of saves and evaluations, to the
    bit.
    """
    undisturbed, resumed = (CalledWeighting(**settings_of_weights) for _ in range(2))
    for kind, arguments in happenings:
        if kind == "save":
            fresh = CalledWeighting(**settings_of_weights)
            fresh(torch.full((2, 3), VOCAB_SIZE - 1))  # what it has seen is replaced
            fresh.weighting.load_state_dict(through(resumed.weighting.state_dict()))
            resumed = fresh
        elif kind == "evaluate":
            resumed(training=False, **arguments)
        else:
            assert torch.equal(resumed(**arguments), undisturbed(**arguments))
        assert_same_state(resumed.weighting, state_copy(undisturbed.weighting))
    saves = [kind for kind, _ in happenings].count("save")
    evicted = int(undisturbed.window.num_updates) > undisturbed.window.num_batches
    event(
        f"saved {min(saves, 2)} times or more, {'some' if evicted else 'no'} batch has fallen out"
    )


def test_bfloat16_leaves_the_counts_as_they_are():
    stream = random_stream(seed=31, num_batches=24, max_rows=60, max_length=12, vocab_size=9)
    plain = TFIDFWeighting(num_batches=20)
    halved = TFIDFWeighting(num_batches=20)
    for i, labels in enumerate(stream):
        expected = plain(labels)
        if i % 4 == 3:
            halved = halved.to(torch.bfloat16)
        assert torch.equal(halved(labels), expected)
    # bfloat16 holds integers up to 256 exactly: the counts must be beyond that for this test to
    # mean anything.
    assert max(int(tensor.max()) for tensor in plain.state_dict().values()) > 256
    fresh = TFIDFWeighting(num_batches=20).to(torch.bfloat16)
    fresh.load_state_dict(through_torch(halved.to(torch.bfloat16).state_dict()))
    halved = fresh
    assert all(
        torch.equal(halved.state_dict()[name], tensor)
        for name, tensor in plain.state_dict().items()
    )


LAYOUTS = {
    TFIDFWeighting: {
        "window.entries_KT": ((16, 6), torch.int32),
        "window.num_documents_K": ((16,), torch.int32),
        "window.document_frequency_E": ((9 + 2,), torch.int32),
        "window.num_updates": ((1,), torch.int64),
    },
    RepetitionWeighting: {
        "table": ((2**24,), torch.int32),
        "contexts": ((3,), torch.int64),
    },
    GoldfishWeighting: {},
}


@pytest.mark.parametrize("make", LAYOUTS)
def test_the_layout_of_a_saved_state_is_the_one_of_earlier_checkpoints(make):
    weighting = make()
    weighting(torch.tensor([[1, 2, 2, 8, 1, 2]]), vocab_size=9)
    state = weighting.state_dict()
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == LAYOUTS[make]
    if make is TFIDFWeighting:
        assert state["window.num_documents_K"].nonzero().tolist() == [[0]], (
            "the first batch is in the first slot"
        )


def small(make):
    return (
        make(num_buckets=2**10, min_length=1, h=2, k=1, sample=1)
        if make is RepetitionWeighting
        else make()
    )


def trained(make):
    """A small weighting that has seen a few batches."""
    weighting = small(make)
    weighting.set_special_tokens([0, 5])
    for labels in random_stream(7, num_batches=5, max_rows=3, max_length=9, vocab_size=VOCAB_SIZE):
        weighting(labels)
    return weighting


def with_plain_buffers(module):
    """The module as PyTorch's own: all that it holds are ordinary buffers, as in checkpoints of
    versions before.
    """
    plain = nn.Module()
    for name, buffer in module.named_buffers(recurse=False):
        plain.register_buffer(name, buffer, persistent=name in module.state_dict())
    for name, child in module.named_children():
        plain.add_module(name, with_plain_buffers(child))
    return plain


def layout(module):
    return {
        name: (one.device, one.dtype, one.shape, one.is_shared())
        for name, one in module.named_buffers()
    }


MOVES = {
    "half": nn.Module.half,
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "double": nn.Module.double,
    "shared memory": nn.Module.share_memory,
    "meta": lambda module: module.to("meta"),
    "from meta": lambda module: module.to_empty(device="cpu"),
}


@pytest.mark.parametrize("make", LAYOUTS)
def test_what_moves_moves_as_the_buffers_of_pytorch(make):
    weighting = trained(make)
    plain = with_plain_buffers(weighting)
    for move in MOVES.values():
        move(weighting)
        move(plain)
        assert layout(weighting) == layout(plain)
        assert list(weighting.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_checkpoint_of_plain_buffers_is_loaded_and_nothing_else(make):
    weighting = trained(make)
    saved = through_torch(with_plain_buffers(weighting).state_dict())
    assert list(saved) == list(weighting.state_dict())
    for assign in (False, True):
        fresh = small(make)
        fresh.load_state_dict(saved, strict=True, assign=assign)
        assert all(torch.equal(saved[name], tensor) for name, tensor in fresh.state_dict().items())
        assert not list(nn.ModuleList([fresh]).buffers()), (
            "still not among the buffers of another module"
        )
        is_saved_tensor = [
            tensor.data_ptr() == saved[name].data_ptr()
            for name, tensor in fresh.state_dict().items()
        ]
        assert is_saved_tensor == [assign] * len(saved)
        with pytest.raises(RuntimeError, match='Unexpected key.* "more"'):
            fresh.load_state_dict(saved | {"more": torch.zeros(1)})
    for name in saved:
        with pytest.raises(RuntimeError, match=f'Missing key.* "{name}"'):
            small(make).load_state_dict(
                {other: value for other, value in saved.items() if other != name}
            )


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda weighting: pickle.loads(pickle.dumps(weighting))]
)
def test_a_copy_has_a_state_of_its_own(make, copied):
    weighting = trained(make)
    other = copied(weighting)
    before = state_copy(weighting)
    buffers = dict(other.named_buffers())
    assert all(torch.equal(buffers[name], tensor) for name, tensor in weighting.named_buffers())
    more = torch.tensor([[3, 4, 3, 4, 5, 6, 1]])
    other(more)
    assert all(torch.equal(before[name], tensor) for name, tensor in weighting.state_dict().items())
    weighting(more)
    assert all(
        torch.equal(other.state_dict()[name], tensor)
        for name, tensor in weighting.state_dict().items()
    )


def test_a_refused_state_leaves_the_window_unchanged():
    stream = random_stream(3, num_batches=5, max_rows=3, max_length=9, vocab_size=VOCAB_SIZE)
    weighting = TFIDFWeighting(num_batches=4)
    other = TFIDFWeighting(num_batches=3)
    for labels in stream:
        weighting(labels)
        other(labels)
    before = state_copy(weighting)
    with pytest.raises(
        RuntimeError, match="the saved window holds 3 batches, this one 4: set num_batches to 3"
    ):
        weighting.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        TFIDFWeighting().load_state_dict({})
    assert_same_state(weighting, before)
