"""Whether texts can be told apart without the model, and what an audit then says of its loss."""

import dataclasses
import json
import re
import warnings
from importlib.resources import files

import jsonschema
import numpy as np
import pandas as pd
import pytest
from helpers.fakes.runs import evaluation, likelihoods, results, run, sample
from scipy.stats import binom, mannwhitneyu
from sklearn.linear_model import Ridge

from tfidf_tune.audit import _blind, audit_report, parse_bounds
from tfidf_tune.audit._blind import BlindText, blind_baseline, blind_texts
from tfidf_tune.passages import Passage
from tfidf_tune.report import html_page, markdown
from tfidf_tune.results.intervals import clustered_auc, membership
from tfidf_tune.results.table import START

WORDS = [f"word{number}" for number in range(400)]
LICENSE = ["permission", "is", "hereby", "granted", "free", "of", "charge", "to", "any", "person"]
MANUAL = ["the", "function", "returns", "a", "list", "and", "raises", "an", "error", "if"]


def drawn(rng, words=WORDS, number=60):
    """Words by Zipf's law."""
    weights = 1 / np.arange(1, len(words) + 1)
    return " ".join(rng.choice(words, number, p=weights / weights.sum()))


def texts_of(targets, controls):
    texts = [BlindText(text, True, f"target-{at}") for at, text in enumerate(targets)]
    return texts + [BlindText(text, False, f"control-{at}") for at, text in enumerate(controls)]


@pytest.mark.parametrize(
    ("in_targets", "in_controls"), [("Whereas", "Because"), ("法", "令"), ("(c)", "")]
)
def test_texts_that_differ_by_one_word_are_told_apart(in_targets, in_controls):
    rng = np.random.default_rng(0)
    words = WORDS
    if in_targets == "法":
        words = [chr(0x4E00 + number) for number in range(400)]
    targets = [f"{drawn(rng, words)} {in_targets}" for _ in range(60)]
    controls = [f"{drawn(rng, words)} {in_controls}" for _ in range(60)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blind = blind_baseline(texts_of(targets, controls))

    assert blind.tells_apart
    assert blind.auc > 0.85
    assert 0.5 < blind.low <= blind.auc <= blind.high <= 1
    assert blind.p_value == 0.001
    assert blind == blind_baseline(texts_of(targets, controls))


def test_a_random_division_of_one_pool_is_rarely_told_apart():
    num_divisions = 80
    alarms = 0
    for seed in range(num_divisions):
        rng = np.random.default_rng(seed)
        pool = [drawn(rng) for _ in range(40)]
        alarms += blind_baseline(texts_of(pool[:20], pool[20:])).tells_apart
    # 5 % of divisions; more than this many in one test of a hundred.
    assert alarms <= binom.ppf(0.99, num_divisions, 0.05)


def of_documents(num_documents=8, num_passages=6):
    """Documents with subjects of their own, half of them targets by chance."""
    rng = np.random.default_rng(3)
    texts = []
    for document in range(num_documents):
        subject = [f"subject{document}x{number}" for number in range(20)]
        passages = [drawn(rng, subject, 30) for _ in range(num_passages)]
        texts += [BlindText(text, document % 2 == 0, document) for text in passages]
    return texts


def test_passages_of_a_document_are_in_one_fold():
    """Otherwise the subject of a document gives its passages away."""
    # With fewer documents than folds each passage would count alone.
    texts = of_documents(num_documents=12)
    alone = [text._replace(document=number) for number, text in enumerate(texts)]
    assert blind_baseline(alone).auc == 1
    assert blind_baseline(alone).tells_apart

    blind = blind_baseline(texts)

    assert abs(blind.auc - 0.5) < 0.4
    assert not blind.tells_apart
    documents = _blind._numbered(texts)
    folds = _blind._folds(np.array([text.is_target for text in texts]), documents)
    for document in set(documents):
        assert len(set(folds[documents == document])) == 1
    assert set(folds) == {0, 1, 2, 3, 4}


def test_shuffled_labels_keep_documents_and_the_targets_of_each_fold():
    texts = of_documents(num_documents=12)
    is_target = np.array([text.is_target for text in texts])
    documents = _blind._numbered(texts)
    folds = _blind._folds(is_target, documents)

    labels = _blind._labels_by_chance(is_target, documents, folds)

    assert labels.shape == (len(texts), 999)
    for document in set(documents):
        of_document = labels[documents == document]
        assert (of_document == of_document[0]).all()
    for fold in set(folds):
        assert (labels[folds == fold].sum(axis=0) == is_target[folds == fold].sum()).all()
    assert len(np.unique(labels, axis=1).T) > 10


def test_few_documents_of_a_kind_count_as_passages():
    """A book against another one: the texts differ, whatever the model saw."""
    texts = of_documents(num_documents=2, num_passages=12)
    assert blind_baseline(texts).auc == 1
    assert blind_baseline(texts).tells_apart


@pytest.mark.parametrize(("num_targets", "num_controls"), [(9, 30), (30, 9), (0, 0)])
def test_too_few_passages_say_nothing(num_targets, num_controls):
    rng = np.random.default_rng(0)
    made = texts_of(
        [drawn(rng) for _ in range(num_targets)], [drawn(rng) for _ in range(num_controls)]
    )
    blank = [BlindText(" \n", kind, f"{kind}{at}") for kind in (True, False) for at in range(30)]
    assert blind_baseline([*made, *blank]) is None


def test_of_many_passages_some_are_drawn(monkeypatch):
    monkeypatch.setattr(_blind, "_MOST_PASSAGES", 12)
    rng = np.random.default_rng(0)
    made = texts_of([drawn(rng) for _ in range(30)], [drawn(rng) for _ in range(11)])
    chosen = _blind._drawn(made)
    assert [sum(text.is_target == kind for text in chosen) for kind in (True, False)] == [12, 11]
    assert chosen == _blind._drawn(made)


def test_the_aucs_are_those_of_pairs():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 9, (30, 4)).astype(float)
    labels = rng.random((30, 4)) < 0.4
    for column, auc in enumerate(_blind._aucs(scores, labels)):
        targets = scores[labels[:, column], column]
        controls = scores[~labels[:, column], column]
        pairs = len(targets) * len(controls)
        assert auc == pytest.approx(mannwhitneyu(targets, controls).statistic / pairs)


def test_scores_are_those_of_ridge_regression_without_the_fold():
    rng = np.random.default_rng(0)
    texts = [drawn(rng) for _ in range(30)]
    labels = rng.random((30, 3)) < 0.5
    folds = np.arange(30) % 5

    scores = _blind._scores_out_of_fold(texts, labels, folds)

    features = _blind._features(texts).toarray()
    for fold in range(5):
        learned = folds != fold
        for column in range(3):
            ridge = Ridge(alpha=1.0, fit_intercept=False)
            values = labels[learned, column].astype(float)
            ridge.fit(features[learned], values - values.mean())
            expected = ridge.predict(features[~learned])
            np.testing.assert_allclose(scores[~learned, column], expected, atol=1e-6)


def test_the_interval_over_documents():
    rng = np.random.default_rng(0)
    members = rng.normal(0.5, 1, 24)
    others = rng.normal(0, 1, 30)
    expected = membership(members[None], others[None])
    # Alone, passages have the interval of membership inference.
    auc, interval = clustered_auc(members, others, np.arange(24), np.arange(30))
    assert auc == pytest.approx(expected.auc)
    assert interval[:2] == pytest.approx(expected.auc_interval[:2])
    # Copies of a passage are no further observations.
    auc, copied = clustered_auc(
        members.repeat(3), others.repeat(2), np.arange(24).repeat(3), np.arange(30).repeat(2)
    )
    assert auc == pytest.approx(expected.auc)
    assert copied[:2] == pytest.approx(expected.auc_interval[:2])


def passage(number, kind, text, *, source="texts.jsonl", document=None):
    return Passage(
        id=f"{kind}-{number}",
        kind=kind,
        text=text,
        token_ids=[1],
        num_injections=0,
        positions=[],
        source=source,
        tokenizer="t",
        tokenizer_fingerprint="f",
        document=document,
    )


def audited(targets, controls, *, has_reference=False):
    """An audit of a model that saw neither text, and finds the targets likelier."""
    rng = np.random.default_rng(5)
    samples = []
    prompts = {}
    scored = []
    for kind, texts in (("target", targets), ("control", controls)):
        for number, text in enumerate(texts):
            name = f"{kind}-{number}"
            prompts[name] = text
            samples.append(sample(name, number % 3, kind=kind, length=12))
            nll = rng.normal(2.0 if kind == "target" else 3.0, 0.8)
            scored.append(likelihoods(name, kind, float(nll)))
    evaluated = evaluation(
        samples=samples, passages=tuple(scored), prompts=prompts, num_read=(8, 48) * 5
    )
    runs = [run("CE", [evaluated], model="tiny")]
    if has_reference:
        runs.append(run(START, [evaluated], model="tiny"))
    return results(*runs)


@pytest.fixture(scope="module")
def licenses():
    rng = np.random.default_rng(1)
    return audited(
        [drawn(rng, LICENSE, 40) for _ in range(30)], [drawn(rng, MANUAL, 40) for _ in range(30)]
    )


@pytest.fixture(scope="module")
def one_pool():
    rng = np.random.default_rng(1)
    return audited([drawn(rng) for _ in range(30)], [drawn(rng) for _ in range(30)])


def overview(report):
    (row,) = report.tables[0].frame.to_dict("records")
    return row


NO_FINDING = re.compile(
    r"Its loss tells these passages from unseen text \(AUC 0\.\d\d\), but so does a classifier "
    r"that never saw the model \(AUC 1\.00\): the texts differ, so this is no finding about the "
    r"model\."
)
SCHEMA = json.loads(
    files("tfidf_tune.audit").joinpath("audit.schema.json").read_text(encoding="utf-8")
)


def test_texts_that_differ_are_no_finding_about_the_model(licenses):
    report = audit_report(licenses, bounds=parse_bounds("auc=0.75,auc.upper=0.99"))

    assert "still tells the two apart" not in report.verdict
    assert NO_FINDING.search(report.verdict)
    assert report.summary["measures"]["auc"]["value"] > 0.75
    blind = report.summary["blind"]
    assert (blind["auc"], blind["tells_apart"]) == (1, True)
    assert overview(report)["Without the model"] == "1.00 (1.00 to 1.00)"
    names = report.tables[0].headers
    assert names.index("Without the model") == names.index("Membership AUC") + 1
    # Neither above the limit nor below it.
    for limit in report.summary["limits"]:
        assert limit["outcome"] == "undecided"
        assert "classifier that never saw the model" in limit["reason"]
    assert not report.summary["passed"]
    jsonschema.validate(report.summary, SCHEMA)
    assert any("choose controls from the same text by chance" in note for note in report.footnotes)


def test_texts_that_a_coin_divided_are_a_finding(licenses):
    report = audit_report(licenses, bounds=parse_bounds("auc=0.75"), by_coin=True)

    assert "but its loss still tells the two apart" in report.verdict
    assert not NO_FINDING.search(report.verdict)
    assert report.summary["blind"]["tells_apart"]
    assert "Without the model" in overview(report)
    assert [limit["outcome"] for limit in report.summary["limits"]] == ["fail"]
    assert "they differ by the coin alone" in " ".join(markdown(report).split())


def test_texts_that_do_not_differ_leave_the_finding(one_pool):
    report = audit_report(one_pool, bounds=parse_bounds("auc=0.75"))

    assert "but its loss still tells the two apart" in report.verdict
    assert not report.summary["blind"]["tells_apart"]
    assert [limit["outcome"] for limit in report.summary["limits"]] == ["fail"]
    assert "differ by the coin" not in markdown(report)


def test_controls_of_few_documents_are_not_told_apart_by_these_documents():
    """Ten documents of one pool, each with a subject; five give the targets, five the controls."""
    rng = np.random.default_rng(4)
    made = []
    for document in range(10):
        kind = "target" if document % 2 else "control"
        subject = [f"subject{document}{letter}" for letter in "abcdefgh"]
        for number in range(6):
            text = f"{drawn(rng)} {drawn(rng, subject, 12)}"
            made.append(passage(6 * document + number, kind, text, document=document))
    samples = pd.DataFrame({"passage_id": [each.id for each in made]})
    assert not blind_baseline(blind_texts(samples, made)).tells_apart
    unknown = [dataclasses.replace(each, document=None) for each in made]
    assert blind_baseline(blind_texts(samples, unknown)).tells_apart


@pytest.mark.parametrize(
    ("in_controls", "by_coin", "is_finding"),
    [(MANUAL, False, False), (MANUAL, True, True), (LICENSE, False, True)],
)
def test_before_and_after_stand_beside_the_verdict_and_say_if_the_texts_differ(
    in_controls, by_coin, is_finding
):
    rng = np.random.default_rng(1)
    targets = [drawn(rng, LICENSE, 40) for _ in range(30)]
    controls = [drawn(rng, in_controls, 40) for _ in range(30)]
    report = audit_report(audited(targets, controls, has_reference=True), by_coin=by_coin)
    table = report.tables[1]
    assert table.name == "before_and_after"
    row = table.frame["Measure"].tolist()[-1]
    caveat = "" if is_finding else ": no finding, the texts differ"
    assert row == f"Membership AUC, by the loss{caveat}"
    assert any("can be told apart without the model" in note for note in table.notes) == (
        not is_finding
    )
    # Not folded, and before all other tables.
    page = html_page(report)
    assert page.index("Because of this training</h2>") < page.index("<details>")
    text = markdown(report)
    assert text.index("## Because of this training") < text.index("## Distribution of")
    assert text.count("## Because of this training") == 1


def test_without_likelihoods_there_is_no_classifier():
    samples = [
        sample(f"{kind}-{at}", at % 3, kind=kind)
        for kind in ("target", "control")
        for at in range(12)
    ]
    report = audit_report(results(run("CE", [evaluation(samples=samples)], model="tiny")))
    assert report.summary["blind"] is None
    jsonschema.validate(report.summary, SCHEMA)
    assert "Without the model" not in report.tables[0].headers


def test_texts_are_those_of_the_probe_file_with_its_documents(one_pool):
    from tfidf_tune.audit._measures import Facts

    samples = Facts(one_pool, 0).plain
    known = [passage(at, "target", f"text {at}", document=at // 2) for at in range(30)]
    known += [passage(at, "control", f"other {at}") for at in range(30)]
    texts = blind_texts(samples, [*known, passage(77, "target", "not asked for")])
    assert [text.text for text in texts] == [each.text for each in known]
    assert [text.document for text in texts[:3]] == [("texts.jsonl", 0)] * 2 + [("texts.jsonl", 1)]
    assert len({text.document for text in texts[30:]}) == 30
    # Of controls as of targets: the same number in two sources is two documents.
    several = [
        passage(at, "control", "text", source=f"{at % 2}.txt", document=at % 3) for at in range(30)
    ]
    texts = blind_texts(samples, known[:30] + several)
    assert len({text.document for text in texts[30:]}) == 6
    # Without the probe file, or with another one: prompts and continuations.
    for given in ((), known[1:]):
        texts = blind_texts(samples, given)
        assert len(texts) == len({text.document for text in texts}) == 60
        first = samples.iloc[0]
        assert texts[0].text == first["prompt"] + first["sample"].reference_text
