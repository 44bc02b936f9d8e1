"""``tfidf_membership``: equal to plain loops, with our model and with the harness's."""

import dataclasses
import json
import math
import zlib

import numpy as np
import pytest
import torch
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import FAMILIES, lm_eval, run_tasks
from sklearn.metrics import roc_auc_score

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.probe.membership_scores import error_zone, window_comparison
from tfidf_tune.results import import_results
from tfidf_tune.tasks import save_token_ids_tokenizer

TASK = "tfidf_membership"


@torch.no_grad()
def nll_by_loop(model, ids):
    """One id at a time, in float64 from the logits on."""
    log_probs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    return np.array([-log_probs[i - 1, ids[i]].item() for i in range(1, len(ids))])


@pytest.fixture(scope="module")
def many_passages(tokenizers, tmp_path_factory):
    """Twelve passages of several lengths, and a completion of 30 tokens."""
    passages = task_fakes.passages_of(
        tokenizers["plain"], num_targets=6, num_controls=6, num_tokens=150
    )
    passages = [
        dataclasses.replace(one, token_ids=one.token_ids[: 150 - 3 * (number % 4)])
        for number, one in enumerate(passages)
    ]
    completion = dataclasses.replace(
        passages[0], id="target-9999", token_ids=passages[0].token_ids[50:100], num_prompt=20
    )
    file = tmp_path_factory.mktemp("probe") / "probe.jsonl"
    return task_fakes.probe_file(file, [*passages, completion])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_plain_loops(family, models, many_passages, tmp_path):
    settings = {"prefix_lengths": [16, 64], "max_new_tokens": 24, "offset": 7, "batch_size": 5}
    output = run_tasks(models[family], TASK, tmp_path, probe_file=many_passages, **settings)
    model = load_model(models[family])
    tokenizer = hf_tokenizer(str(models[family]))
    scored = {doc["passage_id"]: doc for doc in output.docs(TASK)}
    nlls = {"target": [], "control": []}
    for passage in read_probe_file(many_passages):
        doc = scored.pop(passage.id)
        if passage.num_prompt is None:
            nll = nll_by_loop(model, passage.token_ids[7:])
            text = tokenizer.decode(passage.token_ids[7:])
            continuations = [[16, nll[15 : 15 + 24].sum()], [64, nll[63 : 63 + 24].sum()]]
        else:
            nll = nll_by_loop(model, passage.token_ids)[19:]
            text = tokenizer.decode(passage.token_ids[20:])
            continuations = [[0, nll[:24].sum()]]
        expected = {
            "nll": nll.mean(),
            "min_k": -np.sort(nll)[-int(0.2 * len(nll)) :].mean(),
            "zlib": nll.sum() / len(zlib.compress(text.encode())),
        }
        assert {name: doc["scores"][name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert math.isfinite(doc["scores"]["min_k_plus_plus"])
        assert np.array(doc["continuations"]) == pytest.approx(np.array(continuations), rel=1e-5)
        nlls[passage.kind].append(nll.mean())
    assert not scored
    metrics = output.metrics(TASK)
    assert metrics["nll"] == pytest.approx(np.mean(nlls["target"]), rel=1e-5)
    assert metrics["control_nll"] == pytest.approx(np.mean(nlls["control"]), rel=1e-5)
    scores = [-nll for nll in nlls["target"] + nlls["control"]]
    labels = [True] * len(nlls["target"]) + [False] * len(nlls["control"])
    auc = roc_auc_score(labels, scores)
    assert metrics["auc_loss"] == pytest.approx(auc)
    assert math.isnan(metrics["auc_wbc"])  # without a reference


def test_what_a_model_recites_is_detected_and_read_back_with_the_reference(
    reciting, llama, tokenizers, probe_file, tmp_path
):
    output = run_tasks(
        reciting, TASK, tmp_path / "ours", probe_file=probe_file, reference_model=llama
    )
    metrics = output.metrics(TASK)
    assert metrics["nll"] < 0.5 < metrics["control_nll"]
    for name in (
        "tpr_loss",
        "auc_loss",
        "auc_zlib",
        "auc_min_k",
        "auc_min_k_plus_plus",
        "auc_loss_against_start",
        "auc_wbc",
        "auc_error_zone",
    ):
        assert metrics[name] == 1.0
    made = import_results([output.folder])
    scores = made.scores.astype({"metric": str, "kind": str})
    assert set(scores["metric"]) == {
        "passage_nll",
        "min_k",
        "min_k_plus_plus",
        "zlib",
        "reference_nll",
        "wbc",
        "error_zone",
        "continuation_nll",
        "vocab_size",
        "has_bos",
    }
    reference = scores[scores["metric"] == "reference_nll"].set_index("unit")["value"]
    start = load_model(llama)
    for passage in read_probe_file(probe_file):
        assert reference[passage.id] == pytest.approx(
            nll_by_loop(start, passage.token_ids).mean(), rel=1e-5
        )
    assert sorted(set(scores.loc[scores["metric"] == "continuation_nll", "prefix"])) == [
        32,
        50,
        100,
    ]
    assert set(made.checkpoints[0].asked) == {"passages"}
    # The log has each response once as a pair, not the scores of all tokens.
    assert not any("reference_nlls" in doc for doc in output.docs(TASK))
    assert all(len(sample["filtered_resps"][0]) == 2 for sample in output.samples(TASK))
    assert all(isinstance(sample["auc_min_k"][1], float) for sample in output.samples(TASK))
    assert all(isinstance(sample["auc_error_zone"][1], float) for sample in output.samples(TASK))
    assert max(len(json.dumps(sample["resps"])) for sample in output.samples(TASK)) < 80


@torch.no_grad()
def greedy_by_loop(model, ids):
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    return np.array([logits[i - 1].argmax().item() == ids[i] for i in range(1, len(ids))])


def test_the_reference_is_compared_token_by_token_from_one_forward_pass_of_each_model(
    reciting, llama, many_passages, tmp_path
):
    settings = {"prefix_lengths": [16], "offset": 7, "bos": False, "batch_size": 5}
    with task_fakes.embedded_ids() as calls:
        run_tasks(reciting, TASK, tmp_path / "alone", probe_file=many_passages, **settings)
        num_alone = len(calls)
        output = run_tasks(
            reciting,
            TASK,
            tmp_path / "compared",
            probe_file=many_passages,
            reference_model=llama,
            **settings,
        )
    # 13 passages: three batches, and one of the reference.
    assert (num_alone, len(calls) - num_alone) == (3, 4)
    model = load_model(reciting)
    reference = load_model(llama)
    scored = {doc["passage_id"]: doc["scores"] for doc in output.docs(TASK)}
    values = []
    for passage in read_probe_file(many_passages):
        ids = passage.token_ids
        first = 0
        if passage.num_prompt is None:
            ids = ids[7:]
        else:
            first = passage.num_prompt - 1
        differences = nll_by_loop(reference, ids)[first:] - nll_by_loop(model, ids)[first:]
        greedy = greedy_by_loop(model, ids)[first:]
        expected = (window_comparison(differences), error_zone(differences, greedy))
        scores = scored[passage.id]
        # A sum of differences can be nearly 0, and so in one precision above it.
        assert (scores["wbc"], scores["error_zone"]) == pytest.approx(expected, abs=2e-3)
        values.append(expected)
    # Of the formulas, not only of their edge cases.
    assert any(0 < wbc < 1 and zone < 1 for wbc, zone in values)


def test_the_stock_model_gives_the_same_likelihoods_but_not_those_of_tokens(
    llama, probe_file, stock_command, tmp_path
):
    save_token_ids_tokenizer(str(llama), tmp_path / "ids")
    model_args = f"pretrained={llama},tokenizer={tmp_path / 'ids'},dtype=float32"
    stock = lm_eval(
        stock_command,
        tmp_path / "stock",
        TASK,
        model_args=model_args,
        metadata={"probe_file": probe_file, "reference_model": llama},
    )
    ours = run_tasks(llama, TASK, tmp_path / "ours", probe_file=probe_file, reference_model=llama)
    for doc, same in zip(stock.docs(TASK), ours.docs(TASK), strict=True):
        assert doc["scores"] == {
            name: pytest.approx(same["scores"][name], rel=1e-5)
            for name in ("nll", "zlib", "reference_nll")
        }
        assert doc["continuations"] == []
    assert stock.metrics(TASK)["auc_loss"] == ours.metrics(TASK)["auc_loss"]
    for metric in ("auc_min_k", "auc_wbc", "auc_error_zone"):
        assert math.isnan(stock.metrics(TASK)[metric])
        assert math.isfinite(ours.metrics(TASK)[metric])
