"""The weighting in several processes: what they share, what it equals, and
what they communicate.
"""

import re
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.fakes.label_batches import (
    CalledWeighting,
    assert_same_state,
    random_labels,
    state_copy,
)
from helpers.operations import Recorder
from helpers.processes.ranks import on_every_rank
from helpers.references.tfidf import IGNORED
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tfidf_tune import weighting as weightings
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.weighting import (
    GoldfishWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    TokenBatch,
    TokenWeighting,
)

VOCAB_SIZE = 40
NUM_STEPS = 15
WINDOW = 4
REPETITION = {
    "h": 2,
    "k": 1,
    "alpha": 1.0,
    "span": 5,
    "min_length": 1,
    "sample": 2,
    "num_buckets": 2**16,
}
NOBODY_HAS_A_TOKEN = 10


class Case(NamedTuple):
    """How every rank calls its weighting."""

    settings: dict
    documents: bool = False
    vocab_size: int | None = VOCAB_SIZE
    shape_known: bool = False

    def tokens(self, labels):
        """All tokens, if they are counted: others where labels are ignored, but for padding in the
        last third.
        """
        if "counted" not in self.settings:
            return None
        position = torch.arange(labels.shape[1])
        others = torch.where(position < len(position) * 2 // 3, position % VOCAB_SIZE, IGNORED)
        return torch.where(labels == IGNORED, others, labels)

    @property
    def shared(self):
        return self.settings.get("sync", False)

    def weighting(self, **changes):
        """By the mini-batches of one rank, or of all."""
        settings = self.settings | changes
        if "h" in settings:
            return CalledWeighting(RepetitionWeighting, **settings)
        return CalledWeighting(num_batches=WINDOW, **settings)

    def largest_shape(self, batches):
        return shape_of_a_step(batches) if self.shape_known else None


CASES = {
    "sync, documents, capped": Case({"sync": True, "max_weight": 1.2}, documents=True),
    "sync, log, unknown vocabulary": Case({"sync": True, "tf": "log"}, vocab_size=None),
    "sync, all tokens": Case({"sync": True, "counted": "tokens"}),
    "sync, all tokens, shape known": Case(
        {"sync": True, "counted": "tokens", "max_weight": 1.3}, documents=True, shape_known=True
    ),
    "nothing shared": Case({"max_weight": 1.5}, documents=True),
    "repetition": Case(REPETITION | {"sync": True}, documents=True),
    "repetition, shape known": Case(REPETITION | {"sync": True}, shape_known=True),
}


def batches_of_a_step(step, num_ranks):
    """Labels and document ids of each rank, all of different shapes; some with nothing in them,
    some with no rows.
    """
    generator = torch.Generator().manual_seed(1000 * num_ranks + step)
    batches = []
    for rank in range(num_ranks):
        rows, length = (
            int(torch.randint(*bounds, (), generator=generator)) for bounds in ((1, 4), (5, 35))
        )
        labels = random_labels(generator, rows, length, VOCAB_SIZE)
        if step % 3 == 0:
            labels[:, : length // 3] = IGNORED  # a masked prompt
        if step == NOBODY_HAS_A_TOKEN or (step % 4 == 1 and rank == step // 4 % num_ranks):
            labels.fill_(IGNORED)
        if step % 8 == 3 and rank == 0:
            labels = labels[:0]
        batches.append((labels, torch.randint(0, 3, labels.shape, generator=generator)))
    return batches


def shape_of_a_step(batches):
    return tuple(max(labels.shape[dim] for labels, _ in batches) for dim in range(2))


def union_of(batches):
    """One batch of the rows of all ranks, those of rank 0 first, each rank's padded
    to the largest.
    """
    rows, length = shape_of_a_step(batches)
    padded = [
        [
            F.pad(part, (0, length - part.shape[1], 0, rows - part.shape[0]), value=value)
            for part, value in pairs
        ]
        for pairs in ([(labels, IGNORED), (ids, 0)] for labels, ids in batches)
    ]
    return tuple(torch.cat(parts) for parts in zip(*padded, strict=True))


# ---- what runs on a rank


def run_of_a_rank(rank):
    return {
        "cases": {name: run_case(rank, case) for name, case in CASES.items()},
        "collectives": {name: collectives_of(rank, case) for name, case in CASES.items()},
        "refused": refused(rank),
        "in DDP": {name: run_in_ddp(rank, name) for name in WITH_STATE},
        "in FSDP2": {name: run_in_fsdp(rank, name) for name in WITH_STATE},
    }


def run_case(rank, case):
    """Weights in training, and between the steps in evaluation, of more batches on some ranks than
    on others.
    """
    weighting = case.weighting()
    trained = []
    evaluated = []
    every_step = [batches_of_a_step(step, dist.get_world_size()) for step in range(NUM_STEPS)]
    assert sum(len(batches[0][0]) == 0 for batches in every_step) == 2, "some batches have no rows"
    for step, batches in enumerate(every_step):
        labels, document_ids = batches[rank]
        given = {
            "vocab_size": case.vocab_size,
            "document_ids": document_ids if case.documents else None,
        }
        given["all_tokens"] = case.tokens(labels)
        trained.append(weighting(labels, largest_shape=case.largest_shape(batches), **given))
        if step % 5 == 4:
            for _ in range(rank + 1):
                weights = weighting(labels, training=False, **given)
            evaluated.append(weights)
            weighting.weighting.train()
    return {"trained": trained, "evaluated": evaluated, "state": state_copy(weighting.weighting)}


def collectives_of(rank, case):
    """Names of the collectives of a step in training and of one in evaluation."""
    weighting = case.weighting().weighting
    names = []
    batches = batches_of_a_step(0, dist.get_world_size())
    labels, document_ids = batches[rank]
    for training in (True, False):
        with Recorder() as recorder:
            weighting.train(training)(
                labels,
                vocab_size=VOCAB_SIZE,
                document_ids=document_ids if case.documents else None,
                largest_shape=case.largest_shape(batches),
                all_tokens=case.tokens(labels),
            )
        calls = zip(recorder.calls, recorder.operations, strict=True)
        names.append([operation for call, operation in calls if "c10d" in call[0]])
    return names


def refused(rank):
    """The messages of a rank whose labels are in order but for rank 1's, and weights of a batch
    after them all.
    """
    labels = torch.tensor([[3, 4, 4]])
    ids = torch.tensor([[0, 0, 1]])
    weighting = TFIDFWeighting(num_batches=WINDOW, sync=True)
    of_tokens = TFIDFWeighting(num_batches=WINDOW, sync=True, counted="tokens")
    messages = {}
    for name, (called, bad, good) in {
        "a bad id": (weighting, {"batch": torch.tensor([[3, 4, VOCAB_SIZE]])}, {}),
        "an id beyond int32": (weighting, {"batch": torch.tensor([[3, 4, 2**40]])}, {}),
        "a negative document": (weighting, {"document_ids": ids - 1}, {"document_ids": ids}),
        "a document beyond int32": (
            weighting,
            {"document_ids": ids + 2**31},
            {"document_ids": ids},
        ),
        "other tokens": (of_tokens, {"all_tokens": labels + 1}, {"all_tokens": labels}),
    }.items():
        given = {"batch": labels, "vocab_size": VOCAB_SIZE} | (bad if rank == 1 else good)
        with pytest.raises(ValueError, match=".") as error:
            called(**given)
        messages[name] = str(error.value)
    for largest in ((1, 2), (0, 3)):
        with pytest.raises(
            ValueError, match=rf"\(1, 3\), larger than largest_shape, {re.escape(str(largest))}"
        ):
            weighting(labels, largest_shape=largest)
    return messages, weighting(labels, vocab_size=VOCAB_SIZE), state_copy(weighting)


# ---- a loss inside of a module that is trained on several ranks, as in Lightning


class SeenWeighting(TokenWeighting):
    """A user's: tokens that were seen before have weight 0."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(VOCAB_SIZE, dtype=torch.int64))

    def weigh(self, batch):
        valid = batch.labels != IGNORED
        weights = (valid & (self.num_seen[batch.labels.clamp_min(0)] == 0)).float()
        if self.training:
            self.num_seen += batch.labels[valid].bincount(minlength=VOCAB_SIZE)
        return weights


WITH_STATE = {
    "TF-IDF": lambda: TFIDFWeighting(num_batches=WINDOW),
    "TF-IDF of all tokens": lambda: TFIDFWeighting(num_batches=WINDOW, counted="tokens"),
    "repetition": lambda: RepetitionWeighting(**REPETITION),
    "Goldfish": lambda: GoldfishWeighting(h=3),
    "a user's": SeenWeighting,
}


def weighting_of(rank, name):
    weighting = WITH_STATE[name]()
    # A table that differs between ranks, in length too.
    weighting.set_special_tokens(range(rank + 1))
    return weighting


class ModelWithLoss(nn.Module):
    def __init__(self, weighting):
        super().__init__()
        self.logits = nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)
        self.loss = WeightedCrossEntropyLoss(weighting)

    def forward(self, tokens, batch):
        terms = self.loss.terms(self.logits(tokens), batch)
        return terms.loss, terms.weights


def own_batches(rank, num_ranks):
    """What a rank has in each step: rows of its own number and length."""
    for step in range(NUM_STEPS):
        labels, document_ids = batches_of_a_step(step, num_ranks)[rank]
        tokens = labels.clamp_min(0)
        yield (
            tokens,
            TokenBatch(
                labels, document_ids, all_tokens=torch.where(labels == IGNORED, tokens, labels)
            ),
        )


def train_wrapped(rank, model):
    """Return the weights of each step."""
    weights = []
    for tokens, batch in own_batches(rank, dist.get_world_size()):
        loss, weights_of_step = model(tokens, batch)
        loss.backward()
        weights.append(weights_of_step)
    return weights


def buffers_copy(weighting):
    return {name: buffer.clone() for name, buffer in weighting.named_buffers()}


def run_in_ddp(rank, name):
    model = ModelWithLoss(weighting_of(rank, name))
    weights = train_wrapped(rank, DistributedDataParallel(model))
    return {"weights": weights, "buffers": buffers_copy(model.loss.weighting)}


def run_in_fsdp(rank, name):
    """Also what each rank has after it has got the state of rank 0, as from a checkpoint."""
    model = ModelWithLoss(weighting_of(rank, name))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    weights = train_wrapped(rank, model)
    buffers = buffers_copy(model.loss.weighting)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    return {
        "weights": weights,
        "buffers": buffers,
        "state of rank 0": state_copy(model.loss.weighting),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_every_rank(3, tmp_path_factory.mktemp("ranks"), run_of_a_rank)


# ---- against one process, whose weights other tests compare with the slow references


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shared])
def test_with_sync_weights_and_window_are_bit_identical_to_one_process(ranks, name):
    """Also in evaluation: its window is that of the one process, its mean that of the rank's own
    batch.
    """
    case = CASES[name]
    one_process = case.weighting(sync=False)
    compared = 0
    for step in range(NUM_STEPS):
        batches = batches_of_a_step(step, len(ranks))
        labels, ids = union_of(batches)
        given = {"vocab_size": case.vocab_size}
        tokens = None
        if "counted" in case.settings:
            tokens, _ = union_of([(case.tokens(own), ids) for own, ids in batches])
        weights = one_process(
            labels, document_ids=ids if case.documents else None, all_tokens=tokens, **given
        )
        for rank, (own, ids) in enumerate(batches):
            result = ranks[rank]["cases"][name]
            of_rank = weights.chunk(len(ranks))[rank]
            expected = of_rank[: own.shape[0], : own.shape[1]]
            assert torch.equal(result["trained"][step], expected)
            compared += int(((expected > 0) & (expected != 1)).sum())
            if step % 5 == 4:
                own_ids = ids if case.documents else None
                expected = one_process(
                    own, training=False, document_ids=own_ids, all_tokens=case.tokens(own), **given
                )
                assert torch.equal(result["evaluated"][step // 5], expected)
    assert compared > NUM_STEPS
    for result in ranks:
        assert_same_state(one_process.weighting, result["cases"][name]["state"])


def test_a_step_takes_one_collective_at_most_and_evaluation_none(ranks):
    for name, case in CASES.items():
        gather = ["allgather_"] if case.shape_known else ["allreduce_", "allgather_"]
        expected = gather if case.shared else []
        assert [result["collectives"][name] for result in ranks] == [[expected, []]] * len(ranks)


# ---- inside of a wrapped module


def test_every_weighting_with_state_is_wrapped():
    classes = [value for value in vars(weightings).values() if isinstance(value, type)]
    of_tokens = [
        one for one in classes if issubclass(one, TokenWeighting) and one is not TokenWeighting
    ]
    wrapped = {type(make()) for make in WITH_STATE.values()}
    assert {one for one in of_tokens if list(one().buffers())} == wrapped - {SeenWeighting}


@pytest.mark.parametrize("wrapper", ["in DDP", "in FSDP2"])
@pytest.mark.parametrize("name", WITH_STATE)
def test_a_rank_keeps_the_state_of_its_own_rows_in_a_wrapped_module(ranks, name, wrapper):
    """DDP would overwrite buffers by those of rank 0, and crash where their shapes differ."""
    differing = 0
    for rank, result in enumerate(ranks):
        alone = weighting_of(rank, name)
        found = result[wrapper][name]
        for (_, batch), weights in zip(
            own_batches(rank, len(ranks)), found["weights"], strict=True
        ):
            assert torch.equal(alone(batch), weights)
        expected = dict(alone.named_buffers())
        assert found["buffers"].keys() == expected.keys()
        assert all(torch.equal(found["buffers"][key], value) for key, value in expected.items())
        of_first = ranks[0][wrapper][name]["buffers"]
        differing += any(not torch.equal(of_first[key], value) for key, value in expected.items())
    assert differing == len(ranks) - 1, "equal rows on all ranks show nothing"


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_distributed_checkpoint_of_one_rank_is_loaded_on_all(ranks, name):
    results = [result["in FSDP2"][name] for result in ranks]
    for result in results:
        state = result["state of rank 0"]
        assert all(torch.equal(value, results[0]["buffers"][key]) for key, value in state.items())
        assert state or name == "Goldfish"


# ---- bad input


def test_a_bad_number_on_one_rank_is_an_error_on_every_rank_and_leaves_the_window(ranks):
    messages = [result["refused"][0] for result in ranks]
    for name, named in {
        "a bad id": f"the id {VOCAB_SIZE},",
        "an id beyond int32": "outside the vocabulary",
        "a negative document": "the id -1,",
        "a document beyond int32": f"outside 0 to {2**31 - 2}",
        "other tokens": "labels are not the tokens at their positions",
    }.items():
        assert all(named in of_rank[name] for of_rank in messages)

    # After these errors the ranks continue with an unchanged window.
    one_process = TFIDFWeighting(num_batches=WINDOW)
    weights = one_process(torch.tensor([[3, 4, 4]] * len(ranks)), vocab_size=VOCAB_SIZE)
    for rank, result in enumerate(ranks):
        _, after, state = result["refused"]
        assert torch.equal(after, weights[rank : rank + 1])
        assert_same_state(one_process, state)
