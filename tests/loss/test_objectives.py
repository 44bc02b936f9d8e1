"""Every objective that a config names, the one of the page included: built, refused, and alike in
the rest.
"""

import copy
import inspect
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from helpers.fakes.label_batches import EPS
from helpers.fakes.tiny_run import run_config
from helpers.references.head import random_head
from helpers.references.loss import loss_and_gradient, random_batch, reference_loss
from helpers.references.tfidf import IGNORED
from tfidf_tune.recipes.full_finetune import recipe_main

from tfidf_tune import weighting as weightings
from tfidf_tune.loss import HeadInput, WeightedCrossEntropyLoss
from tfidf_tune.training import FinetuneConfig, SetupError, build_loss, check_config, load_config
from tfidf_tune.weighting import GoldfishWeighting, TokenWeighting


def weighted(name, **arguments):
    """The section of a loss with a weighting."""
    weighting = {"_component_": f"tfidf_tune.weighting.{name}Weighting", **arguments}
    return {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": weighting}


# Sections of configs, no argument with its default.
OBJECTIVES = {
    "CE": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
    "TF-IDF": {
        "_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss",
        "tf": "log",
        "max_weight": 2.5,
        "sync": True,
    },
    "Goldfish": weighted("Goldfish", strategy="static", k=3, h=5, seed=7),
    "MiLe": weighted("MiLe", gamma=0.5),
    "Focal": weighted("Focal", gamma=3.0),
    "Repetition": weighted(
        "Repetition", h=1, k=1, span=3, min_length=1, sample=1, num_buckets=1000
    ),
}
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def built(section, **arguments):
    """The loss of a recipe's config."""
    section = OBJECTIVES[section] if isinstance(section, str) else section
    nowhere = Path("nowhere")
    return build_loss(
        check_config(
            run_config(nowhere, nowhere, nowhere, loss=section | arguments), FinetuneConfig
        )
    )


def test_every_weighting_is_listed_here():
    public = [getattr(weightings, name) for name in weightings.__all__]
    found = {each for each in public if inspect.isclass(each) and issubclass(each, TokenWeighting)}
    assert found - {TokenWeighting} == {type(built(name).weighting) for name in OBJECTIVES}


# ---- built from a config


@every_objective
def test_a_config_builds_it_with_its_arguments(name):
    section = OBJECTIVES[name]
    loss = built(name)
    assert f"tfidf_tune.loss.{type(loss).__name__}" == section["_component_"]
    of_weighting = section.get("weighting", section)
    if "weighting" in section:
        assert (
            f"tfidf_tune.weighting.{type(loss.weighting).__name__}" == of_weighting["_component_"]
        )
    for argument, value in of_weighting.items():
        if argument != "_component_":
            assert getattr(loss.weighting, argument) == value


# ---- on the command line


def overridden(*overrides):
    """The loss of a packaged config, whose own is TF-IDF, after overrides on the command line."""
    return build_loss(
        check_config(load_config("demo/llama_3M_full_memorization", overrides), FinetuneConfig)
    )


def test_a_weighting_is_chosen_on_the_command_line():
    chosen = [
        "loss=tfidf_tune.loss.WeightedCrossEntropyLoss",
        "loss.weighting=tfidf_tune.weighting.GoldfishWeighting",
    ]
    made = overridden(*chosen, "loss.weighting.k=3")
    assert type(made) is WeightedCrossEntropyLoss
    assert type(made.weighting) is GoldfishWeighting
    assert made.weighting.k == 3
    with pytest.raises(SetupError, match="^config: loss: .* keyword argument 'tf'"):
        overridden(*chosen, "loss.tf=log")


# ---- refused


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (weighted("TFIDF", tf="sublinear"), "loss.weighting: .*tf is 'sublinear'"),
        (weighted("Focal", gamma=float("nan")), "loss.weighting: .*gamma is nan"),
        (weighted("Repetition", alpha=[1.0]), r"loss.weighting: .*alpha is \[1.0\]"),
        (weighted("Goldfish", sed=1), "loss.weighting: .*'sed'"),
        ({"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss"}, "loss: .*'weighting'"),
        (weighted("TFIDF") | {"weighting": 3}, "loss: weighting is 3"),
        (weighted("TFIDF") | {"k": 3}, "loss: .*'k'"),
        (weighted("TFIDF") | {"head": "triton"}, "loss: head is 'triton'"),
    ],
)
def test_an_invalid_objective_is_refused_in_one_message(section, message):
    with pytest.raises(SetupError, match=f"^config: {message}") as error:
        built(section)
    assert "\n" not in str(error.value)


# ---- alike in all


@every_objective
def test_value_and_gradient_are_those_of_its_weights(name):
    """Which have mean 1, except those of repetition, and are 0 at ignored positions."""
    loss = built(name)
    for seed in range(3):
        logits, labels = random_batch(seed)
        state = {key: value.clone() for key, value in loss.state_dict().items()}
        weights = loss.terms(logits, labels).weights
        loss.load_state_dict(state)
        valid = labels != IGNORED
        # Each weight is within 24 eps of what adds up to M, and 36 with a cap.
        if name != "Repetition":
            assert float(weights.double().sum()) == pytest.approx(int(valid.sum()), rel=64 * EPS)
        assert not weights[~valid].any()
        assert (weights >= 0).all()
        value, gradient = loss_and_gradient(loss, logits, labels)
        expected, expected_gradient = reference_loss(logits, labels, weights)
        # The weights given, what is left is the loss: 30 eps of values below 16, and of the
        # gradient's largest.
        torch.testing.assert_close(value.double(), expected, rtol=64 * EPS, atol=0.0)
        largest = float(weights.max()) / int((labels != IGNORED).sum())
        torch.testing.assert_close(
            gradient.double(), expected_gradient, rtol=64 * EPS, atol=64 * EPS * largest
        )


def forms():
    """Whole logits, chunks, hidden states: the head, the input, the tensors that get a gradient."""
    logits = torch.randn(2, 20, 37, requires_grad=True)
    yield "fused", logits, [logits]
    yield "fused", list(logits.chunk(3, dim=1)), [logits]
    given = [tensor.clone().requires_grad_() for tensor in random_head(40, rows=2).head]
    yield "fused", HeadInput(*given), given


@every_objective
def test_without_valid_tokens_loss_and_gradients_are_0_and_the_state_stays(name):
    for head, given, trained in forms():
        loss = built(name, head=head)
        labels = random_head(40, rows=2).labels
        loss(given, labels)
        before = {key: value.clone() for key, value in loss.state_dict().items()}
        for training in (True, False):
            terms = loss.train(training).terms(given, torch.full_like(labels, IGNORED))
            assert terms.loss.item() == terms.cross_entropy.item() == 0.0
            assert not any(
                gradient.any()
                for gradient in torch.autograd.grad(terms.loss, trained, retain_graph=True)
            )
            assert all(torch.equal(value, before[key]) for key, value in loss.state_dict().items())


class NoWeights(TokenWeighting):
    def weigh(self, batch):
        return torch.zeros(batch.labels.shape)


def test_where_every_weight_is_0_the_loss_is_0_and_can_be_backpropagated():
    for head, given, trained in forms():
        loss = WeightedCrossEntropyLoss(NoWeights(), head=head)
        terms = loss.terms(given, random_head(40, rows=2).labels)
        assert not terms.weights.any()
        assert terms.loss.item() == 0.0
        assert float(terms.cross_entropy) > 1
        assert not any(gradient.any() for gradient in torch.autograd.grad(terms.loss, trained))


@every_objective
def test_a_loaded_state_continues_exactly_and_evaluation_does_not_change_it(name):
    undisturbed = built(name)
    loaded = built(name)
    for seed in range(4):
        undisturbed(*random_batch(seed))
    file = io.BytesIO()
    torch.save(undisturbed.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    logits, labels = random_batch(4, length=14)
    learns = name in ("TF-IDF", "Repetition")
    assert (
        torch.equal(copy.deepcopy(undisturbed)(logits, labels), built(name)(logits, labels))
        != learns
    )
    for seed in range(4, 8):
        logits, labels = random_batch(seed, length=10 + seed)
        assert torch.equal(loaded(logits, labels), undisturbed(logits, labels))
        loaded.eval()(*random_batch(seed + 10))
        loaded.train()
        after = undisturbed.state_dict()
        assert loaded.state_dict().keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in loaded.state_dict().items())


PAGE = (Path(__file__).parents[2] / "docs" / "new_objective.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def my_weights(tmp_path, monkeypatch):
    """The module of the page, in the working directory."""
    (tmp_path / "my_weights.py").write_text(blocks("python")[0])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_weights", None)


@pytest.mark.usefixtures("my_weights")
def test_the_tests_of_the_page_pass(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # as pytest does
    module = ModuleType("tests_of_the_page")
    exec(blocks("python")[1], vars(module))
    tests = [
        function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.startswith("test_")
    ]
    assert len(tests) == 4
    for test in tests:
        test()


@pytest.mark.usefixtures("my_weights")
def test_the_config_of_the_page_trains(recipe_config):
    section = yaml.safe_load(blocks("yaml")[0])["loss"]
    cfg = recipe_config(loss=section, max_steps=2)
    recipe_main.__wrapped__(cfg)
    assert (Path(cfg.output_dir) / "checkpoint_100pct").is_dir()


@pytest.mark.usefixtures("my_weights")
def test_the_command_of_the_page_chooses_it_and_its_own_error_names_the_section():
    words = blocks("bash")[0].replace("\\\n", " ").splitlines()[-1].split()
    assert words[:3] == ["tfidf-tune", "run", "full_finetune"]
    overrides = [word for word in words[5:] if "=" in word]
    loss = build_loss(check_config(load_config(words[4], overrides), FinetuneConfig))
    assert type(loss.weighting).__name__ == "FirstOccurrenceWeighting"
    assert loss.weighting.repeated == 0.2
    section = yaml.safe_load(blocks("yaml")[0])["loss"]
    section["weighting"]["repeated"] = 2.0
    with pytest.raises(SetupError, match="^config: loss.weighting: repeated is 2.0"):
        built(section)
