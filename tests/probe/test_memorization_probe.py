"""The measurement of the monitor: the numbers of `probe`, with less work and without a trace in the model."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from probe_fakes import WordTokenizer, a_passage, random_ids
from torch import nn

from tfidf_tune.probe import MemorizationProbe, evaluating, greedy_continuations, probe, token_likelihoods

PREFIX = 8


class Monitored:
    """A model of transformers that records the prompts that it continues."""

    def __init__(self, model):
        self.model = model
        self.decoded = []

    def logits(self, ids_bs, num_last):
        return self.model(input_ids=ids_bs, use_cache=False, logits_to_keep=num_last).logits

    def continuations(self, prompts, num_tokens):
        self.decoded.append((len(prompts), max(num_tokens)))
        return greedy_continuations(self.model, prompts, num_tokens)


@pytest.fixture(scope="module")
def passages(recited, unseen):
    """Recited as a whole, up to a wrong token, shorter than the others, and not at all."""
    wrong = [*recited[0].token_ids[:20], 63 - recited[0].token_ids[20], *recited[0].token_ids[21:]]
    shorter = replace(recited[1], id="shorter", token_ids=recited[1].token_ids[:30])
    return [
        *recited,
        a_passage("wrong", wrong),
        shorter,
        *unseen[:2],
        replace(unseen[2], token_ids=random_ids(9, 7)),
        replace(recited[2], id="completion", num_prompt=20),
        replace(unseen[0], id="other completion", num_prompt=13),
    ]


def mean_nll(model, passages, max_new_tokens):
    """Token by token."""
    terms = []
    for passage in passages:
        num_prompt = passage.num_prompt or PREFIX
        ids = passage.token_ids[: num_prompt + max_new_tokens]
        for end in range(num_prompt, len(ids)):
            logits = model(input_ids=torch.tensor([ids[:end]]), use_cache=False).logits[0, -1]
            terms.append(-logits.double().log_softmax(-1)[ids[end]].item())
    return sum(terms) / len(terms)


@pytest.mark.parametrize("max_new_tokens", [10, 100])
@pytest.mark.parametrize("batch_size", [3, 100])
def test_the_numbers_are_those_of_the_probe(llama, passages, max_new_tokens, batch_size):
    eos = passages[2].token_ids[14]  # ends a text that is recited
    tokenizer = WordTokenizer(eos_id=eos)
    settings = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    model = Monitored(llama)

    made = MemorizationProbe(passages, tokenizer, prefix_length=PREFIX, **settings)
    found = made.measure(model.logits, model.continuations)

    samples = probe(llama, tokenizer, passages, prefix_lengths=(PREFIX,), **settings)
    for kind in ("target", "control"):
        chosen = [sample for sample in samples if sample.kind == kind]
        assert found[f"memorization_{kind}_lms"] == sum(sample.lms for sample in chosen) / len(chosen)
        matches = sum(sample.prefix_match for sample in chosen) / len(chosen)
        assert found[f"memorization_{kind}_prefix_match"] == matches
        with torch.no_grad():
            expected = mean_nll(llama, [passage for passage in passages if passage.kind == kind], max_new_tokens)
        assert found[f"memorization_{kind}_nll"] == pytest.approx(expected, rel=1e-5)
    assert len(found) == 6
    assert found["memorization_target_lms"] > found["memorization_target_prefix_match"] or max_new_tokens == 10
    # Those that are recited as a whole need no decoding.
    undecided = 4 if max_new_tokens == 10 else 5
    assert sum(rows for rows, _ in model.decoded) == undecided


def test_a_device_measures_what_the_cpu_measures(llama, passages, device):
    if device.type == "cpu":
        pytest.skip("two equal runs show nothing: --device cuda")
    there, tokenizer = deepcopy(llama).to(device), WordTokenizer(eos_id=64)
    settings = {"prefix_lengths": (PREFIX,), "max_new_tokens": 100, "batch_size": 3}
    found, expected = (probe(model, tokenizer, passages, **settings) for model in (there, llama))
    assert [sample.lms for sample in found] == [sample.lms for sample in expected]
    texts = [passage.token_ids for passage in passages]
    for one, other in zip(token_likelihoods(there, texts), token_likelihoods(llama, texts), strict=True):
        torch.testing.assert_close(torch.tensor(one.nll), torch.tensor(other.nll), rtol=1e-4, atol=1e-5)


def test_without_controls_there_are_no_numbers_of_them(llama, recited):
    tokenizer = WordTokenizer(eos_id=64)
    made, model = MemorizationProbe(recited, tokenizer, prefix_length=PREFIX, max_new_tokens=20), Monitored(llama)
    found = made.measure(model.logits, model.continuations)

    assert found.keys() == {f"memorization_target_{name}" for name in ("lms", "prefix_match", "nll")}
    assert found["memorization_target_lms"] == found["memorization_target_prefix_match"] == 20


def test_the_threshold_is_one_of_the_targets_mean(recited):
    measured = {"memorization_target_lms": 12.0, "memorization_control_lms": 20.0}
    for stop_above, expected in ((11.9, True), (12, False), (None, False)):
        made = MemorizationProbe(recited, WordTokenizer(), prefix_length=PREFIX, stop_above=stop_above)
        assert (made.reason_to_stop(measured) is not None) is expected


def test_what_cannot_be_measured_is_refused(recited):
    without_fingerprint = SimpleNamespace(vocab_size=64, eos_id=0, encode=lambda text, add_bos, add_eos: [len(text)])
    for settings, message in (
        ({"prefix_length": 0}, "prefix_length must be .* got 0"),
        ({"prefix_length": 52}, "'target-0' has 52 tokens, no more than .*52"),
        ({"stop_above": 44.5}, r"stop_above is 44.5: .* from 0 to 44 \(the longest continuation"),
        ({"tokenizer": WordTokenizer(fingerprint="f2")}, "fingerprint 'f1'; the given one, .* 'f2'"),
        ({"tokenizer": without_fingerprint}, "the given one, 'SimpleNamespace', has"),
        ({"passages": [a_passage("a", [1, 2], kind="control")]}, "none of the 1 passages is a target"),
    ):
        settings = {"passages": recited, "tokenizer": WordTokenizer(), "prefix_length": PREFIX} | settings
        with pytest.raises(ValueError, match=message):
            MemorizationProbe(settings.pop("passages"), settings.pop("tokenizer"), **settings)


def test_a_measurement_leaves_no_trace():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    model[1].eval()  # frozen by the user
    model[1][1].train()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        torch.rand(3)

    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
