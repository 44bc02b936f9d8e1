import dataclasses

import pytest
from analysis_fakes import SAMPLE

from tfidf_tune.analysis import MemorizationSummary, summarize


def sample(passage_id, kind, prefix_match, lms, rouge_l, verbatim=False):
    return dataclasses.replace(
        SAMPLE,
        passage_id=passage_id,
        kind=kind,
        prefix_match=prefix_match,
        lms=lms,
        rouge_l=rouge_l,
        verbatim=verbatim,
    )


def test_means_and_maxima_go_over_passages_and_prefix_lengths():
    samples = [
        sample("a", "target", 0, 3, 10.0),
        sample("a", "target", 98, 128, 100.0, verbatim=True),
        sample("b", "target", 1, 4, 19.0),
    ]
    assert summarize(samples) == {
        "target": MemorizationSummary(
            num_passages=2,
            avg_prefix=33.0,
            max_prefix=98,
            avg_lms=45.0,
            max_lms=128,
            rouge_l=43.0,
            verbatim_rate=pytest.approx(1 / 3),
        )
    }


def test_kinds_are_kept_apart():
    summary = summarize([sample("a", "target", 9, 9, 90.0), sample("b", "control", 0, 1, 5.0)])
    assert (summary["target"].avg_lms, summary["control"].avg_lms) == (9.0, 1.0)


def test_no_samples_give_no_summary():
    assert summarize([]) == {}
