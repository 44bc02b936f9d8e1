"""The score that decides about membership is fixed by the kind of targets, whatever the scores
are.
"""

import json
import shutil
from importlib.resources import files

import jsonschema
import numpy as np
import pytest
from helpers.fakes.openai_server import serving
from helpers.fakes.runs import evaluation, results, run, sample

from tfidf_tune.audit import (
    AuditSpec,
    Headline,
    ServerSpec,
    audit,
    audit_report,
    audit_results,
    parse_bounds,
    verify,
)
from tfidf_tune.audit._headline import choose_headline, planned_headline
from tfidf_tune.audit._plan import resolve
from tfidf_tune.audit._record import write_sums
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import read_probe_file, write_probe_file
from tfidf_tune.passages.probe_file import PassageDraft, make_passages

pytestmark = pytest.mark.usefixtures("quick_reports")
SCHEMA = json.loads(
    files("tfidf_tune.audit").joinpath("audit.schema.json").read_text(encoding="utf-8")
)
ALL = ("Loss", "Min-K%", "Min-K%++", "WBC")


@pytest.mark.parametrize(
    ("is_random", "scores", "expected"),
    [
        (True, ALL, "Min-K%++"),
        (True, ("Loss", "Min-K%", "WBC"), "Min-K%"),
        (True, ("Loss",), "Loss"),
        (False, ALL, "WBC"),
        (False, ("Loss", "Min-K%", "Min-K%++"), "Loss"),
        (False, (), None),
        (True, (), None),
    ],
)
def test_the_rule(is_random, scores, expected):
    assert choose_headline(is_random=is_random, scores=scores).score == expected


# Of 100 targets and 100 controls. Each headline differs from another score that finds more.
AUCS = {"nll": 1.0, "min_k": 0.0, "min_k_plus_plus": 1.0, "wbc": 0.5}


def answers(metrics, *, is_random=False, texts_differ=False):
    """Answers with these scores, which find targets with the AUCs above."""
    samples = []
    scored = []
    prompts = {}
    for kind in ("target", "control"):
        for at in range(100):
            name = f"{kind}-{at}"
            samples.append(sample(name, at % 3, kind=kind))
            prompts[name] = f"a {kind}" if texts_differ else "as any other"
            scores = {}
            for metric in metrics:
                score = at / 1000
                if kind == "target":
                    score += 2 * AUCS[metric] - 1
                scores[metric] = 5 - score if metric == "nll" else score
            scored.append(
                {
                    "passage_id": name,
                    "kind": kind,
                    "token_ids": [1],
                    "round_trip": True,
                    "prompts": "token_ids",
                    "scores": scores,
                    "continuations": [],
                    "is_random": is_random,
                }
            )
    made = evaluation(samples=samples, passages=tuple(scored), prompts=prompts, num_read=(48,) * 10)
    return results(run("CE", [made], model="tiny"))


def table_of(report, name):
    return next(table for table in report.tables if table.name == name)


LEAST_LIKELY = "the likelihood of its least likely tokens"


@pytest.mark.parametrize(
    ("metrics", "is_random", "score", "words"),
    [
        ([*AUCS], False, "WBC", ""),
        (["nll", "min_k", "min_k_plus_plus"], False, "Loss", "its loss"),
        ([*AUCS], True, "Min-K%++", f"{LEAST_LIKELY} (Min-K%++)"),
        (["nll", "min_k", "wbc"], True, "Min-K%", f"{LEAST_LIKELY} (Min-K%)"),
    ],
)
def test_verdict_limit_and_tables_are_of_the_headline_though_others_find_more(
    metrics, is_random, score, words
):
    names = {"nll": "Loss", "min_k": "Min-K%", "min_k_plus_plus": "Min-K%++", "wbc": "WBC"}
    made = answers(metrics, is_random=is_random)
    report = audit_report(made, bounds=parse_bounds("auc=0.75"))
    summary = report.summary
    jsonschema.validate(summary, SCHEMA)
    auc = {"WBC": 0.5, "Loss": 1.0, "Min-K%++": 1.0, "Min-K%": 0.0}[score]
    assert summary["headline"]["membership"]["score"] == score
    assert summary["measures"]["auc"]["value"] == summary["limits"][0]["value"] == auc
    assert report.tables[0].frame["Membership AUC"][0].startswith(f"{auc:.2f} (")
    # A score at chance tells nothing apart, whatever the others tell.
    if words:
        assert f", but {words} still tells the two apart" in report.verdict
    else:
        assert "still tells the two apart" not in report.verdict
    # It is marked and first, before all others, and its true positives are counted.
    membership = table_of(report, "membership")
    assert membership.rows[0][:2] == (f"{score} (headline)", auc)
    expected = {names[name]: AUCS[name] for name in metrics if names[name] != score}
    assert {row[0]: row[1] for row in membership.rows[1:]} == expected
    found = {0.0: 0, 0.5: 1, 1.0: 100}[auc]
    rows = table_of(report, "true_positives").rows
    assert (rows[0][0], rows[0][2]) == (f"{score} (headline)", f"{found} of 100")
    assert len(rows) == len(metrics)


def test_a_planned_headline_that_was_not_measured_is_not_replaced():
    planned = Headline("WBC", "the targets are natural text, which a reference scores, too")
    report = audit_report(answers(["nll"]), bounds=parse_bounds("auc=0.75"), headline=planned)
    assert report.summary["headline"]["membership"]["score"] == "WBC"
    assert report.summary["measures"]["auc"]["value"] is None
    (limit,) = report.summary["limits"]
    assert (limit["outcome"], limit["reason"]) == ("undecided", "it was not measured")
    assert "still tells the two apart" not in report.verdict
    assert "Membership AUC" not in report.tables[0].headers


def test_the_caveat_about_texts_that_differ_is_of_the_headline():
    made = answers(["nll", "min_k"], is_random=True, texts_differ=True)
    assert (
        " The likelihood of its least likely tokens (Min-K%) tells these passages from unseen text "
        "(AUC 0.00), but so does a classifier that never saw the model (AUC 1.00)"
    ) in audit_report(made).verdict


def test_without_likelihoods_nothing_decides():
    samples = [sample(kind, 1, kind=kind) for kind in ("target", "control")]
    made = results(run("CE", [evaluation(samples=samples)], model="tiny"))
    planned = Headline("Loss", "natural text; none if the server gives no likelihoods")
    for headline in (planned, None):
        report = audit_report(made, headline=headline)
        assert report.summary["headline"]["membership"]["score"] is None
        jsonschema.validate(report.summary, SCHEMA)


@pytest.fixture(scope="module")
def folder(tiny_checkpoint, tmp_path_factory):
    """A model, one before it, and probe files: natural text, random tokens, and both."""
    folder = tmp_path_factory.mktemp("headline")
    for name in ("model", "before"):
        shutil.copytree(tiny_checkpoint, folder / name)
    tokenizer = hf_tokenizer(str(folder / "model"))
    rng = np.random.default_rng(0)
    natural = []
    random = []
    for at in range(24):
        ids = rng.integers(100, 200, 24).astype(np.int32)
        positions = [[at, 0]] if at < 12 else []
        natural.append(PassageDraft(ids, positions, "mine", {}))
        random.append(PassageDraft(ids, positions, "mine", {"is_random": True}))
    drafts = {"natural": natural, "random": random, "mixed": [*random[:11], *natural[11:]]}
    for name, of_file in drafts.items():
        write_probe_file(folder / f"{name}.jsonl", make_passages(tokenizer, of_file, 12))
    write_probe_file(folder / "targets.jsonl", make_passages(tokenizer, natural[:12], 12))
    return folder


def spec_of(folder, passages, **changes):
    arguments = {
        "model": str(folder / "model"),
        "passages": folder / f"{passages}.jsonl",
        "prefix_lengths": (6,),
        "max_new_tokens": 8,
        "output_dir": folder / "out",
        "accept_unproven": True,
    }
    return AuditSpec(**arguments | changes)


@pytest.mark.parametrize(
    ("passages", "is_served", "has_reference", "expected"),
    [
        ("natural", False, False, "Loss"),
        ("natural", False, True, "WBC"),
        ("random", False, True, "Min-K%++"),
        ("mixed", False, True, "WBC"),
        ("mixed", False, False, "Loss"),
        ("natural", True, False, "Loss"),
        ("random", True, False, "Min-K%"),
        ("targets", False, True, None),
    ],
)
def test_the_plan_follows_from_the_probe_file_the_model_and_the_reference(
    folder, passages, is_served, has_reference, expected
):
    changes = {"reference": str(folder / "before")} if has_reference else {}
    if is_served:
        server = ServerSpec(base_url="http://localhost:1/v1")
        changes |= {"server": server, "tokenizer": str(folder / "model"), "model": "served"}
    plan = resolve(spec_of(folder, passages, **changes))
    headline = planned_headline(plan, read_probe_file(plan.probe_file))
    assert headline.score == expected
    assert ("none if the server gives no likelihoods" in headline.reason) == is_served


def test_an_audit_is_judged_by_the_headline_of_its_plan_and_so_is_its_verification(
    folder, tmp_path
):
    out = tmp_path / "out"
    result = audit(spec_of(folder, "random", output_dir=out))
    plan = json.loads((out / "plan.json").read_text())
    planned = plan["headline"]["membership"]
    assert planned["score"] == "Min-K%++"
    assert result.summary["headline"]["membership"] == planned
    assert not verify(out).changed
    # Answers without a plan say themselves that their targets are random.
    again = audit_results(out / "evaluation", tmp_path / "again", accept_unproven=True)
    assert again.summary["headline"]["membership"] == planned
    assert again.summary["measures"]["auc"] == result.summary["measures"]["auc"]
    # Who changes the plan afterwards is found, although all hashes fit.
    plan["headline"]["membership"]["score"] = "Loss"
    (out / "plan.json").write_text(json.dumps(plan))
    write_sums(out)
    assert "figures, tables and page, from the scores" in verify(out).changed


def test_a_server_without_likelihoods_has_no_headline(folder, tmp_path):
    with serving(folder / "model") as (_, url):
        spec = spec_of(
            folder,
            "natural",
            model="served",
            server=ServerSpec(base_url=url, max_retries=0),
            tokenizer=str(folder / "model"),
            output_dir=tmp_path / "out",
        )
        result = audit(spec)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert "none if the server gives no likelihoods" in plan["headline"]["membership"]["reason"]
    assert result.summary["headline"]["membership"]["score"] is None
    assert not verify(tmp_path / "out").changed
