"""The measurement of the monitor: the numbers of `probe`, with less work and without a trace in the
model.
"""

import random
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.fakes.probe import WordTokenizer, a_passage, random_ids
from helpers.references.probe import probe
from torch import nn

from tfidf_tune.probe import MemorizationProbe, evaluating, greedy_continuations, token_likelihoods

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
        assert found[f"memorization_{kind}_lms"] == sum(sample.lms for sample in chosen) / len(
            chosen
        )
        matches = sum(sample.prefix_match for sample in chosen) / len(chosen)
        assert found[f"memorization_{kind}_prefix_match"] == matches
        with torch.no_grad():
            expected = mean_nll(
                llama, [passage for passage in passages if passage.kind == kind], max_new_tokens
            )
        assert found[f"memorization_{kind}_nll"] == pytest.approx(expected, rel=1e-5)
    assert len(found) == 6
    assert (
        found["memorization_target_lms"] > found["memorization_target_prefix_match"]
        or max_new_tokens == 10
    )
    # Those that are recited as a whole need no decoding.
    undecided = 4 if max_new_tokens == 10 else 5
    assert sum(rows for rows, _ in model.decoded) == undecided


def test_a_device_measures_what_the_cpu_measures(llama, passages, device):
    if device.type == "cpu":
        pytest.skip("two equal runs show nothing: --device cuda")
    there = deepcopy(llama).to(device)
    tokenizer = WordTokenizer(eos_id=64)
    settings = {"prefix_lengths": (PREFIX,), "max_new_tokens": 100, "batch_size": 3}
    found, expected = (probe(model, tokenizer, passages, **settings) for model in (there, llama))
    assert [sample.lms for sample in found] == [sample.lms for sample in expected]
    texts = [passage.token_ids for passage in passages]
    for one, other in zip(
        token_likelihoods(there, texts), token_likelihoods(llama, texts), strict=True
    ):
        torch.testing.assert_close(
            torch.tensor(one.nll), torch.tensor(other.nll), rtol=1e-4, atol=1e-5
        )


def test_without_controls_there_are_no_numbers_of_them(llama, recited):
    tokenizer = WordTokenizer(eos_id=64)
    made = MemorizationProbe(recited, tokenizer, prefix_length=PREFIX, max_new_tokens=20)
    model = Monitored(llama)
    found = made.measure(model.logits, model.continuations)

    assert found.keys() == {
        f"memorization_target_{name}" for name in ("lms", "prefix_match", "nll")
    }
    assert found["memorization_target_lms"] == found["memorization_target_prefix_match"] == 20


def test_the_threshold_is_one_of_the_targets_mean(recited):
    measured = {"memorization_target_lms": 12.0, "memorization_control_lms": 20.0}
    for stop_above, expected in ((11.9, True), (12, False), (None, False)):
        made = MemorizationProbe(
            recited, WordTokenizer(), prefix_length=PREFIX, stop_above=stop_above
        )
        assert (made.reason_to_stop(measured) is not None) is expected


def test_what_cannot_be_measured_is_refused(recited):
    without_fingerprint = SimpleNamespace(
        vocab_size=64, eos_id=0, encode=lambda text, add_bos, add_eos: [len(text)]
    )
    for settings, message in (
        ({"prefix_length": 0}, "prefix_length must be .* got 0"),
        ({"prefix_length": 52}, "'target-0' has 52 tokens, no more than .*52"),
        ({"stop_above": 44.5}, r"stop_above is 44.5: .* from 0 to 44 \(the longest continuation"),
        (
            {"tokenizer": WordTokenizer(fingerprint="f2")},
            "fingerprint 'f1'; the given one, .* 'f2'",
        ),
        ({"tokenizer": without_fingerprint}, "the given one, 'SimpleNamespace', has"),
        (
            {"passages": [a_passage("a", [1, 2], kind="control")]},
            "none of the 1 passages is a target",
        ),
    ):
        settings = {
            "passages": recited,
            "tokenizer": WordTokenizer(),
            "prefix_length": PREFIX,
        } | settings
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


class Reader:
    """Copies: after an id it predicts the id that followed it the last time, of the ids after BOS
    if it needs BOS.
    """

    def __init__(self, *, needs_bos=None):
        self.needs_bos = needs_bos

    def logits(self, ids_bs, num_last):
        return torch.stack([self._row(ids) for ids in ids_bs.tolist()])[:, -num_last:]

    def continuations(self, prompts, num_tokens):
        rows = []
        for prompt, number in zip(prompts, num_tokens, strict=True):
            ids = list(prompt)
            for _ in range(number):
                ids.append(int(self._row(ids)[-1].argmax()))
            rows.append(ids[len(prompt) :])
        return rows

    def _row(self, ids):
        logits = torch.zeros(len(ids), 64)
        followed_by = {}
        for position, id_ in enumerate(ids):
            if position:
                followed_by[ids[position - 1]] = id_
            if self.needs_bos is None or ids[0] == self.needs_bos:
                logits[position, followed_by.get(id_, 0)] = 5.0
        return logits


def distinct_passages(number, *, num_ids=40):
    """A target, and controls without an id twice."""
    rows = [random.Random(seed).sample(range(1, 63), num_ids) for seed in range(number + 1)]
    controls = [
        replace(a_passage(f"c{number}", ids), kind="control") for number, ids in enumerate(rows[1:])
    ]
    return [a_passage("t", rows[0]), *controls]


def test_controls_are_read_by_a_model_that_copies_and_by_no_other(llama):
    passages = distinct_passages(12)
    made = MemorizationProbe(
        passages, WordTokenizer(eos_id=64), prefix_length=PREFIX, max_new_tokens=10
    )
    reader = Reader()
    measured, notice = made.show_controls(reader.logits, reader.continuations, None)
    assert measured == {
        "memorization_shown_lms": 40 - PREFIX,
        "memorization_not_shown_lms": pytest.approx(0, abs=1),
    }
    assert notice == ""
    model = Monitored(llama)  # random weights
    measured, notice = made.show_controls(model.logits, model.continuations, None)
    assert measured["memorization_shown_lms"] < 5
    assert "of 32 tokens" in notice
    assert "nothing shows that the monitor could see a recited passage" in notice
    # A context of 60 has room for 22 tokens of the copy and of the answer.
    measured, notice = made.show_controls(reader.logits, reader.continuations, 60)
    assert (measured["memorization_shown_lms"], notice) == (22, "")
    assert made.show_controls(reader.logits, reader.continuations, 40)[0] == {}
    few = MemorizationProbe(passages[:10], WordTokenizer(eos_id=64), prefix_length=PREFIX)
    measured, notice = few.show_controls(reader.logits, reader.continuations, None)
    assert measured == {}
    assert notice.endswith("its positive control takes 10 controls, there are 9")


def test_bos_is_before_each_prompt_if_the_model_needs_it():
    passages = distinct_passages(12)
    tokenizer = WordTokenizer(eos_id=64, bos_id=63)
    reader = Reader(needs_bos=63)
    for bos, expected in ((True, 32), (False, 0)):
        made = MemorizationProbe(
            passages, tokenizer, prefix_length=PREFIX, max_new_tokens=10, bos=bos
        )
        measured, _ = made.show_controls(reader.logits, reader.continuations, None)
        assert measured["memorization_shown_lms"] == expected
        assert made.num_positions == PREFIX + 10 + bos
        if (
            bos
        ):  # which takes one of the 60 tokens, so that 21 of the copy and of the answer have room
            measured, _ = made.show_controls(reader.logits, reader.continuations, 60)
            assert measured["memorization_shown_lms"] == 21
    with pytest.raises(ValueError, match="bos is true, and the tokenizer has no BOS"):
        MemorizationProbe(passages, WordTokenizer(), prefix_length=PREFIX, bos=True)


@pytest.mark.parametrize("helps", [True, False])
def test_where_the_tokenizer_does_not_say_it_the_likelihood_of_the_controls_decides_about_bos(
    helps,
):
    passages = distinct_passages(12)
    made = MemorizationProbe(
        passages, WordTokenizer(eos_id=64, bos_id=63), prefix_length=PREFIX, max_new_tokens=10
    )
    seen = []

    def logits(ids_bs, num_last):
        seen.extend(ids_bs.tolist())
        rows = torch.zeros(*ids_bs.shape, 64)
        rows[:, :-1].scatter_(2, ids_bs[:, 1:, None], 1.0)  # what follows is likelier than chance
        has_bos = ids_bs[:, :1] == 63
        return torch.where((has_bos == helps)[..., None], 2 * rows, rows)[:, -num_last:]

    made.measure(logits, Reader().continuations)
    first_of_prompts = {ids[0] == 63 for ids in seen[-len(passages) :]}
    assert first_of_prompts == {helps}


def test_of_a_short_control_all_that_it_has_can_be_read():
    target, longest, *others = distinct_passages(10)
    shorter = [replace(one, token_ids=one.token_ids[: PREFIX + 2]) for one in others]
    passages = [target, longest, *shorter]
    made = MemorizationProbe(
        passages, WordTokenizer(eos_id=64), prefix_length=PREFIX, max_new_tokens=2
    )
    reader = Reader()
    measured, notice = made.show_controls(reader.logits, reader.continuations, None)
    assert measured["memorization_shown_lms"] == (32 + 9 * 2) / 10
    assert notice == ""
