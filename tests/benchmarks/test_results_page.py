"""The tables of docs/results.md are those of the records beside it, and say what the records say."""

import math
import re
import statistics

import pytest
import results_page
from scipy import stats

from tfidf_tune.analysis import read_records

PAGE = results_page.PAGE.read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"<!-- table: \w+ (\S+) -->", PAGE)))


def test_the_tables_of_the_page_are_those_of_the_records():
    assert results_page.filled(PAGE) == PAGE


def test_all_records_are_used_and_all_tables_have_rows():
    assert sorted(file.name for file in results_page.RECORDS.glob("*.jsonl")) == FILES
    for block in re.findall(r"<!-- table: .*? -->\n(.*?)<!-- end -->", PAGE, re.DOTALL):
        assert len(re.findall(r"^\|", block, re.MULTILINE)) > 2


@pytest.mark.parametrize("file", FILES)
def test_operating_points_and_intervals_follow_from_the_records(file):
    """Worked out here once more, from the records alone."""
    records, _ = read_records(results_page.RECORDS / file)
    models = re.split(r"^\*\*(.+?)\*\*$", _block("operating_points", file), flags=re.MULTILINE)[1:]
    assert models[::2] == list(dict.fromkeys(record.model for record in records))
    for model, table in zip(models[::2], models[1::2], strict=True):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
        for objective, rate, lms, perplexity, *_ in rows[2:]:
            own = [record for record in records if (record.model, record.objective) == (model, objective)]
            by_rate = {rate: [r for r in own if r.learning_rate == rate] for rate in {r.learning_rate for r in own}}
            best = min(by_rate, key=lambda rate: statistics.fmean(r.log_perplexity for r in by_rate[rate]))
            assert rate.split(" ")[0] == f"{best:g}"
            assert lms == _interval([r.lms for r in by_rate[best]])
            assert perplexity == _interval([r.log_perplexity for r in by_rate[best]], math.exp)


def _block(name, file):
    return re.search(rf"<!-- table: {name} {re.escape(file)} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)[1]


def _interval(values, scale=float):
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{scale(mean):.1f}"
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    return f"{scale(mean):.1f} ({scale(low):.1f} to {scale(high):.1f})"
