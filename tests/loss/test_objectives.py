"""Every objective that a config names: built as a recipe does, refused where it cannot be, and alike in the rest."""

import inspect
import io
from pathlib import Path

import pytest
import torch
from head_reference import random_head
from label_batches import EPS
from loss_reference import loss_and_gradient, random_batch, reference_loss
from tfidf_reference import IGNORED
from tiny_run import run_config

from tfidf_tune import loss as objectives
from tfidf_tune.loss import HeadInput, ProductCrossEntropyLoss, TokenDropCrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.training import FinetuneConfig, SetupError, build_loss, check_config
from tfidf_tune.weighting import GoldfishWeighting, TFIDFWeighting

GOLDFISH = {"_component_": "tfidf_tune.weighting.GoldfishWeighting", "k": 2, "h": 1}
TFIDF = {"_component_": "tfidf_tune.weighting.TFIDFWeighting", "num_batches": 2}
PRODUCT = {"_component_": "tfidf_tune.weighting.ProductWeighting", "first": GOLDFISH, "second": TFIDF}

# Name of the class and arguments, none of them the default: what its weighting has to hold.
OBJECTIVES = {
    "CrossEntropyLoss": {},
    "TFIDFCrossEntropyLoss": {"tf": "log", "max_weight": 2.5},
    "GoldfishCrossEntropyLoss": {"strategy": "static", "k": 3, "h": 5, "seed": 7},
    "TokenDropCrossEntropyLoss": {"p": 0.5, "seed": 7},
    "MiLeCrossEntropyLoss": {"gamma": 0.5},
    "FocalCrossEntropyLoss": {"gamma": 3.0},
    "PowerLawCrossEntropyLoss": {"alpha": 0.25, "epsilon": 2.0},
    "ProductCrossEntropyLoss": {"first": GOLDFISH, "second": TFIDF},
    "RepetitionCrossEntropyLoss": {"h": 1, "alpha": 2.0, "num_buckets": 1000},
}
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def built(name, **arguments):
    """The loss of a recipe's config."""
    section = {"_component_": f"tfidf_tune.loss.{name}", **arguments}
    nowhere = Path("nowhere")
    return build_loss(check_config(run_config(nowhere, nowhere, nowhere, loss=section), FinetuneConfig))


def test_every_objective_is_listed_here():
    public = {name for name in objectives.__all__ if inspect.isclass(getattr(objectives, name))}
    found = {name for name in public if issubclass(getattr(objectives, name), WeightedCrossEntropyLoss)}
    assert found - {"WeightedCrossEntropyLoss"} == OBJECTIVES.keys()


# ---- built from a config


@every_objective
def test_a_config_builds_it_with_its_arguments(name):
    loss = built(name, **OBJECTIVES[name])
    assert type(loss) is getattr(objectives, name)
    for argument, value in OBJECTIVES[name].items():
        if isinstance(value, dict):
            factor = getattr(loss.weighting, argument)
            assert f"tfidf_tune.weighting.{type(factor).__name__}" == value["_component_"]
        else:
            assert getattr(loss.weighting, argument) == value


def test_the_arguments_of_factors_reach_them():
    weighting = built("ProductCrossEntropyLoss", first=GOLDFISH, second=TFIDF).weighting
    assert (weighting.first.k, weighting.first.h) == (2, 1)
    assert weighting.second.window.num_batches == 2


def test_factors_may_be_of_one_kind_and_stand_in_any_order():
    weighting = built("ProductCrossEntropyLoss", first=PRODUCT, second=TFIDF).weighting
    assert (weighting.first.first.k, type(weighting.first.second)) == (2, TFIDFWeighting)
    weighting = built("ProductCrossEntropyLoss", second=GOLDFISH, first=GOLDFISH | {"seed": 1}).weighting
    assert (weighting.first.seed, weighting.second.seed) == (1, 0)


@every_objective
def test_a_config_sets_how_the_loss_is_computed(name):
    loss = built(name, **OBJECTIVES[name], num_output_chunks=3, head="fused", accumulate_in_fp32=True)
    assert (loss.num_output_chunks, loss.head, loss.accumulate_in_fp32) == (3, "fused", True)
    assert built(name, **OBJECTIVES[name], head="torch").head == "torch"
    plain = built(name, **OBJECTIVES[name])
    assert (plain.num_output_chunks, plain.head, plain.accumulate_in_fp32) == (8, "fused", False)


@every_objective
def test_its_signature_tells_its_own_arguments_and_those_of_the_loss(name):
    parameters = inspect.signature(getattr(objectives, name)).parameters
    shared = ["num_output_chunks", "head", "accumulate_in_fp32"]
    assert list(parameters)[-3:] == shared
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert {*OBJECTIVES[name], "ignore_index"} <= parameters.keys()
    of_the_loss = inspect.signature(WeightedCrossEntropyLoss).parameters
    assert all(parameters[option] == of_the_loss[option] for option in shared)


def ignoring(index, arguments):
    """The arguments, and those of factors, with another ignored label."""
    arguments = {
        name: value | {"ignore_index": index} if isinstance(value, dict) else value for name, value in arguments.items()
    }
    return arguments | {"ignore_index": index}


@every_objective
def test_a_data_set_marks_ignored_labels_otherwise_so_that_a_config_is_refused(name):
    with pytest.raises(SetupError, match="^config: loss: ignore_index is 7; data sets mark ignored labels by -100$"):
        built(name, **ignoring(7, OBJECTIVES[name]))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "ProductCrossEntropyLoss"])
def test_from_python_another_label_may_be_ignored(name):
    loss = getattr(objectives, name)(**ignoring(7, OBJECTIVES[name]))
    logits, labels = random_batch(0)
    labels[labels == 7] = 8
    expected = getattr(objectives, name)(**OBJECTIVES[name])(logits, labels)
    assert torch.equal(loss(logits, labels.masked_fill(labels == IGNORED, 7)), expected)


def test_from_python_a_product_takes_factors_that_ignore_another_label():
    factors = {"first": GoldfishWeighting(ignore_index=7), "second": TFIDFWeighting(ignore_index=7)}
    loss = ProductCrossEntropyLoss(**factors, ignore_index=7)
    assert loss.ignore_index == loss.weighting.ignore_index == 7


# ---- refused


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("TFIDFCrossEntropyLoss", {"tf": "sublinear"}, "tf is 'sublinear': possible are count, log, binary$"),
        (
            "GoldfishCrossEntropyLoss",
            {"k": 1},
            "k is 1: one token in k is left out of the loss, set it to 2 to 2147483648$",
        ),
        ("GoldfishCrossEntropyLoss", {"h": 0}, "h is 0: .* set it to 1 to 1024$"),
        ("GoldfishCrossEntropyLoss", {"strategy": "hash-table"}, "strategy is 'hash-table': possible are hash, static"),
        ("TokenDropCrossEntropyLoss", {"p": 1.0}, "p is 1.0: .* set it to a number from 0 to 0.99 .*$"),
        ("TokenDropCrossEntropyLoss", {"p": 1}, "p is 1: .* set it to a number from 0 to 0.99 .*$"),
        ("TokenDropCrossEntropyLoss", {"p": -0.5}, "p is -0.5: "),
        ("MiLeCrossEntropyLoss", {"gamma": -1.0}, "gamma is -1.0: .* set it to a number from 0 to 20 "),
        ("FocalCrossEntropyLoss", {"gamma": -1.0}, "gamma is -1.0: .* set it to a number from 0 to 20 "),
        ("PowerLawCrossEntropyLoss", {"alpha": -0.5}, "alpha is -0.5: .* set it to a number from 0 to 4 "),
        ("PowerLawCrossEntropyLoss", {"epsilon": 0.0}, "epsilon is 0.0: .* set it to a number from 1e-08 to "),
        ("MiLeCrossEntropyLoss", {"head": "triton"}, "head is 'triton': possible are fused, torch, chunked$"),
        # of another type
        ("GoldfishCrossEntropyLoss", {"k": "four"}, "k is 'four', it has to be a whole number$"),
        ("GoldfishCrossEntropyLoss", {"k": 2.5}, "k is 2.5, it has to be a whole number$"),
        ("GoldfishCrossEntropyLoss", {"h": None}, "h is None, it has to be a whole number$"),
        ("GoldfishCrossEntropyLoss", {"seed": True}, "seed is True, it has to be a whole number$"),
        ("GoldfishCrossEntropyLoss", {"strategy": 3}, "strategy is 3, it has to be a text$"),
        ("TokenDropCrossEntropyLoss", {"p": "many"}, "p is 'many', it has to be a number$"),
        ("MiLeCrossEntropyLoss", {"gamma": "1"}, "gamma is '1', it has to be a number$"),
        ("FocalCrossEntropyLoss", {"gamma": float("nan")}, "gamma is nan, it has to be a finite number$"),
        ("PowerLawCrossEntropyLoss", {"alpha": float("inf")}, "alpha is inf, it has to be a finite number$"),
        ("PowerLawCrossEntropyLoss", {"epsilon": [1.0]}, r"epsilon is \[1.0\], it has to be a number$"),
        ("PowerLawCrossEntropyLoss", {"num_output_chunks": "8"}, "num_output_chunks is '8', it has to be a whole num"),
        # no such argument
        ("GoldfishCrossEntropyLoss", {"sed": 1}, "has no argument 'sed'; did you mean 'seed'[?]$"),
        ("GoldfishCrossEntropyLoss", {"gamma": 1.0}, "has no argument 'gamma'; possible are accumulate_in_fp32, h, h"),
        ("TokenDropCrossEntropyLoss", {"sead": 1}, "has no argument 'sead'; did you mean 'seed'[?]$"),
        ("MiLeCrossEntropyLoss", {"gama": 1.0}, "has no argument 'gama'; did you mean 'gamma'[?]$"),
        ("FocalCrossEntropyLoss", {"heads": "fused"}, "has no argument 'heads'; did you mean 'head'[?]$"),
        ("PowerLawCrossEntropyLoss", {"num_chunks": 8}, "has no argument 'num_chunks'; did you mean 'num_output_chun"),
        ("CrossEntropyLoss", {"options": {}}, "has no argument 'options'; possible are accumulate_in_fp32, head, "),
    ],
)
def test_what_cannot_be_is_refused_in_one_message(name, arguments, message):
    with pytest.raises(SetupError, match=f"^config: loss: .*{message}") as error:
        built(name, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first": GOLDFISH}, "^config: loss: .*ProductCrossEntropyLoss needs second$"),
        ({"first": GOLDFISH, "third": TFIDF, "second": TFIDF}, "^config: loss: .* has no argument 'third'; "),
        ({"first": GOLDFISH | {"k": 1}, "second": TFIDF}, "^config: loss.first: k is 1: .* set it to 2 to 2147483648$"),
        ({"first": TFIDF, "second": GOLDFISH | {"h": "x"}}, "^config: loss.second: h is 'x', it has to be a whole num"),
        (
            {"first": TFIDF, "second": GOLDFISH | {"sed": 1}},
            "^config: loss.second: tfidf_tune.weighting.GoldfishWeighting has no argument 'sed'; did you mean 'seed'",
        ),
        (
            {"first": {"_component_": "tfidf_tune.weighting.Goldfish"}, "second": TFIDF},
            "^config: loss.first: no component 'tfidf_tune.weighting.Goldfish'",
        ),
        (
            {"first": {"_component_": None}, "second": TFIDF},
            "^config: loss.first has to be a section with `_component_",
        ),
        (
            {"first": TFIDF, "second": GOLDFISH | {"ignore_index": 7}},
            "^config: loss: second has ignore_index 7, the pr",
        ),
        # no weighting at all
        (
            {"first": PRODUCT | {"second": GOLDFISH | {"k": 1}}, "second": TFIDF},
            "^config: loss.first.second: k is 1: .* set it to 2 to 2147483648$",
        ),
        (
            {"first": PRODUCT | {"first": GOLDFISH | {"sed": 1}}, "second": TFIDF},
            "^config: loss.first.first: .* has no argument 'sed'; did you mean 'seed'",
        ),
        ({"first": 3, "second": TFIDF}, "^config: loss: first is 3: it has to be a weighting, in a config a section "),
        ({"first": GOLDFISH, "second": None}, "^config: loss: second is None: it has to be a weighting"),
        (
            {"first": GOLDFISH, "second": {"num_batches": 2}},
            "^config: loss: second is {'num_batches': 2}: it has to be",
        ),
        (
            {"first": "tfidf_tune.weighting.GoldfishWeighting", "second": TFIDF},
            "^config: loss: first is 'tfidf_tune.weighting.GoldfishWeighting': it has to be a weighting",
        ),
        (
            {"first": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}, "second": TFIDF},
            "^config: loss: first is a CrossEntropyLoss: it has to be a weighting",
        ),
    ],
)
def test_what_cannot_be_a_factor_is_refused_in_a_message_that_names_it(arguments, message):
    with pytest.raises(SetupError, match=message):
        built("ProductCrossEntropyLoss", **arguments)


# ---- alike in all


@every_objective
def test_the_weights_have_mean_1_and_are_0_at_ignored_positions(name):
    """All but those of repetition, which hold back and give to no other."""
    loss = built(name, **OBJECTIVES[name])
    for seed in range(5):
        logits, labels = random_batch(seed, rows=2 + seed, length=20 + seed)
        weights = loss.terms(logits, labels).weights
        valid = labels != IGNORED
        # Each weight is within 24 eps of what adds up to M, and 36 with a cap.
        if name != "RepetitionCrossEntropyLoss":
            assert float(weights.double().sum()) == pytest.approx(int(valid.sum()), rel=64 * EPS)
        assert not weights[~valid].any()
        assert (weights >= 0).all()


@every_objective
def test_value_and_gradient_are_those_of_its_weights(name):
    loss = built(name, **OBJECTIVES[name])
    for seed in range(3):
        logits, labels = random_batch(seed)
        state = {key: value.clone() for key, value in loss.state_dict().items()}
        weights = loss.terms(logits, labels).weights
        loss.load_state_dict(state)
        value, gradient = loss_and_gradient(loss, logits, labels)
        expected, expected_gradient = reference_loss(logits, labels, weights)
        # The weights given, what is left is the loss: 30 eps of values below 16, and of the gradient's largest.
        torch.testing.assert_close(value.double(), expected, rtol=64 * EPS, atol=0.0)
        largest = float(weights.max()) / int((labels != IGNORED).sum())
        torch.testing.assert_close(gradient.double(), expected_gradient, rtol=64 * EPS, atol=64 * EPS * largest)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["whole", "chunks", "fused", "torch"])
@every_objective
def test_nothing_valid_gives_a_loss_of_0_with_gradients_of_0_and_leaves_the_state(name, form, training):
    loss = built(name, **OBJECTIVES[name], head="torch" if form == "torch" else "fused")
    head, labels, _ = random_head(40, rows=2)
    loss(head, labels)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    given = [tensor.clone().requires_grad_() for tensor in head]
    logits = torch.randn(2, 20, 37, requires_grad=True)
    inputs = {
        "whole": (logits, [logits]),
        "chunks": (list(logits.chunk(3, dim=1)), [logits]),
        "fused": (HeadInput(*given), given),
        "torch": (HeadInput(*given), given),
    }[form]
    value = loss.train(training)(inputs[0], torch.full_like(labels, IGNORED))
    assert value.item() == 0.0
    assert not any(gradient.any() for gradient in torch.autograd.grad(value, inputs[1]))
    assert all(torch.equal(value, before[key]) for key, value in loss.state_dict().items())


@pytest.mark.parametrize("form", ["whole", "fused", "torch"])
def test_where_every_token_is_dropped_the_loss_is_0_and_can_be_backpropagated(form):
    loss = TokenDropCrossEntropyLoss(p=0.99, head="torch" if form == "torch" else "fused")
    head, labels, _ = random_head(40, rows=2)
    given = [tensor.clone().requires_grad_() for tensor in head]
    terms = loss.terms(given[0] if form == "whole" else HeadInput(*given), labels.clamp(max=15))
    assert not terms.weights.any()
    assert terms.loss.item() == 0.0
    assert float(terms.cross_entropy) > 1
    gradients = torch.autograd.grad(terms.loss, given[:1] if form == "whole" else given)
    assert not any(gradient.any() for gradient in gradients)


@every_objective
def test_a_saved_state_goes_on_exactly_and_evaluation_leaves_it(name):
    undisturbed, loaded = built(name, **OBJECTIVES[name]), built(name, **OBJECTIVES[name])
    for seed in range(4):
        undisturbed(*random_batch(seed))
    file = io.BytesIO()
    torch.save(undisturbed.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(4, 8):
        logits, labels = random_batch(seed, length=10 + seed)
        assert torch.equal(loaded(logits, labels), undisturbed(logits, labels))
        loaded.eval()(*random_batch(seed + 10))
        loaded.train()
        after = undisturbed.state_dict()
        assert loaded.state_dict().keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    "name",
    [
        "TFIDFCrossEntropyLoss",
        "TokenDropCrossEntropyLoss",
        "PowerLawCrossEntropyLoss",
        "ProductCrossEntropyLoss",
        "RepetitionCrossEntropyLoss",
    ],
)
def test_a_loss_that_has_learnt_differs_from_a_fresh_one(name):
    """The test above must be able to fail."""
    learnt, fresh = built(name, **OBJECTIVES[name]), built(name, **OBJECTIVES[name])
    for seed in range(4):
        learnt(*random_batch(seed))
    logits, labels = random_batch(4)
    assert not torch.equal(learnt(logits, labels), fresh(logits, labels))


@every_objective
def test_evaluation_of_one_that_hides_tokens_is_plain_cross_entropy(name):
    logits, labels = random_batch(0)
    loss = built(name, **OBJECTIVES[name])
    loss(logits, labels)
    terms = loss.eval().terms(logits, labels)
    hides = name in ("CrossEntropyLoss", "GoldfishCrossEntropyLoss", "TokenDropCrossEntropyLoss")
    assert torch.equal(terms.weights, (labels != IGNORED).float()) == hides


def test_a_product_asks_for_predictions_where_a_factor_needs_them():
    logits, labels = random_batch(1)
    mile = {"_component_": "tfidf_tune.weighting.MiLeWeighting", "gamma": 2.0}
    uniform = {"_component_": "tfidf_tune.weighting.UniformWeighting"}
    product = built("ProductCrossEntropyLoss", first=uniform, second=mile)
    alone = built("MiLeCrossEntropyLoss", gamma=2.0)
    weights = product.terms(logits, labels).weights
    torch.testing.assert_close(weights, alone.terms(logits, labels).weights, rtol=18 * EPS, atol=0.0)
    assert isinstance(product, ProductCrossEntropyLoss)
