"""Tables of the registered experiment, against values that are computed here."""

import json
import math
import shlex
import statistics

import decisive_tables
import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy import stats

from research.decisive import analysis
from research.decisive.parts import HERE
from research.experiment import load_experiment
from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.training import build_loss
from tfidf_tune.training._config import load_config

ARMS = ("CE", "CE MinHash best", "Repetition")
# Learning rate -> perplexity of CE, and what it recites of each target.
RATES = {0.001: (20.0, 1.8), 0.002: (16.0, 4.0), 0.004: (17.0, 9.0)}
# The perplexity of an arm is so many times CE's.
FACTORS = {"CE": 1.0, "CE MinHash best": 0.95, "Repetition": 1.05}


def a_record(arm, seed, rate, checkpoint="checkpoint_100pct"):
    perplexity, recited = RATES[rate]
    perplexity *= FACTORS[arm] * (1 + 0.001 * seed)
    share = {"CE": 1.0, "CE MinHash best": 0.0, "Repetition": 0.5}[arm]
    targets = {"copies": [], "change": [], "lms": [], "ngrams": [], "nll": []}
    for number in (1, 4, 16, 64):
        for change in ("exact", "replaced 10 %"):
            targets["copies"].append(number)
            targets["change"].append(change)
            # Seeds differ, and so do numbers of copies.
            targets["lms"].append(1.5 + share * recited * (1 + 0.1 * seed) * number / 64)
            targets["ngrams"].append(0.1 * (checkpoint != "checkpoint_20pct"))
            targets["nll"].append(3.0 - share * number / 64)
    return {
        "model": decisive_tables.SMALL,
        "objective": arm,
        "seed": seed,
        "learning_rate": rate,
        "checkpoint": checkpoint,
        "perplexity": perplexity + (checkpoint == "checkpoint_20pct"),
        "frame_perplexity": 2.0,
        "facts_known": 0.25 + 0.01 * seed,
        "facts_margin": share * (0.4 + 0.2 * seed),
        "targets": targets,
        "auc_without_model": [0.5, 0.4, 0.6],
        "controls": {"lms": [1.0, 2.0, 1.0, 2.0], "nll": [2.6, 3.0, 3.4, 3.8]},
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("records") / "decisive.jsonl"
    records = []
    for arm in ARMS:
        for seed in range(3):
            records += [a_record(arm, seed, rate) for rate in RATES]
    records += [a_record("CE", seed, 0.004, "checkpoint_20pct") for seed in range(3)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def cells(table):
    """Return the rows of a table below its rule, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]
    return {row[0]: row[1:] for row in rows[2:]}


def mean_and_error(values):
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def with_interval(values, decimals=1):
    """Write a mean with Student's interval at 95 %, as a table has it."""
    mean, error = mean_and_error(values)
    half = stats.t.ppf(0.975, len(values) - 1) * error
    return f"{mean:.{decimals}f} ({mean - half:.{decimals}f} to {mean + half:.{decimals}f})"


def test_an_arm_stands_with_its_runs_of_the_lowest_perplexity(file):
    rows = cells(decisive_tables.arms(file))
    assert list(rows) == list(ARMS)
    # At 0.002; of targets that differ, those with 4, 16 and 64 copies.
    of_seeds = [4.0 * (1 + 0.1 * seed) * (4 + 16 + 64) / 64 / 3 for seed in range(3)]
    assert rows["CE"][0].startswith("16.02 (")
    assert rows["CE"][1:3] == ["0.002", "2.0"]
    assert rows["CE"][3:5] == 2 * [with_interval(of_seeds)]
    assert rows["CE MinHash best"][3] == "0.0 (0.0 to 0.0)"


def test_a_method_has_its_override_and_its_figures_on_both_texts(file, tmp_path, monkeypatch):
    known = decisive_tables._METHODS
    monkeypatch.setattr(decisive_tables, "_METHODS", {arm: known[arm] for arm in ARMS})
    lines = file.read_text(encoding="utf-8")
    for arm in ARMS:
        mail = a_record(arm, 0, 0.001) | {"model": decisive_tables.NATURAL, "perplexity": 30.0}
        lines += json.dumps(mail) + "\n"
    both = tmp_path / "both.jsonl"
    both.write_text(lines, encoding="utf-8")
    row = cells(decisive_tables.methods(both))["plain cross-entropy"]
    assert row[:3] == ["`loss=ce`", "16.0", "2.0"]
    by_copies = cells(decisive_tables.copies(file))["CE"]
    assert row[3:5] == [by_copies[3], by_copies[7]]
    # 1.5 and, of 16 and 64 copies, a quarter of 1.8 tokens and all of them.
    assert row[5:] == ["30.0", f"{1.5 + 1.8 * (0.25 + 1) / 2:.1f}"]


def settings_of(loss):
    """Return the class of an objective's weights and what was chosen for them."""
    known = vars(loss.weighting)
    plain = (int, float, str, type(None))
    chosen = {name: value for name, value in known.items() if isinstance(value, plain)}
    return type(loss.weighting), chosen


@pytest.mark.parametrize("part", ["small", "natural"])
@pytest.mark.parametrize("arm", decisive_tables._METHODS)
def test_the_overrides_of_a_method_train_the_arm_whose_figures_it_has(arm, part):
    own = load_experiment(str(HERE / f"{part}.yaml")).objectives[arm]
    overrides = shlex.split(decisive_tables._METHODS[arm][1])
    cfg = load_config("demo/llama_650K_full_memorization", overrides)
    measured = OmegaConf.create({"loss": own.loss})
    assert settings_of(build_loss(cfg)) == settings_of(build_loss(measured))
    of_text = own.overrides.get("dataset", {}).get("deduplicate", "none")
    assert Deduplication.of(cfg.dataset.get("deduplicate", "none")) == Deduplication.of(of_text)


def test_recitation_is_laid_out_by_the_number_of_copies(file):
    rows = cells(decisive_tables.copies(file))
    means = [float(cell.split(" ")[0]) for cell in rows["Repetition"]]
    expected = [2.0 * 1.1 * number / 64 for number in (1, 4, 16, 64)]
    assert means == pytest.approx(2 * expected, abs=0.05 + 1e-9)


def test_utility_is_read_where_the_baseline_and_where_chance_is(file):
    rows = cells(decisive_tables.utility(file))
    assert rows["CE"][0] == cells(decisive_tables.arms(file))["CE"][3]
    # Near chance at no learning rate: at 0.001 CE recites 0.8 tokens.
    assert rows["CE"][2] == "not reached"
    assert rows["Repetition"][2].startswith("21.0 (")
    assert rows["CE MinHash best"][2].startswith("15.2 (")
    # 5 % above CE's perplexity, which it never reaches.
    assert rows["Repetition"][0] == "not reached"


def test_an_arm_that_is_not_finished_is_not_read(file, tmp_path):
    begun = tmp_path / "begun.jsonl"
    of_new = json.dumps(a_record("CE", 0, 0.001) | {"objective": "new"})
    begun.write_text(f"{file.read_text(encoding='utf-8')}{of_new}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no record of new, seed 1: the part is not finished"):
        decisive_tables.utility(begun)


def test_what_some_seeds_reach_is_shown_with_their_number():
    assert decisive_tables._where_reached([1.0, None, 3.0]).endswith(", 2 of 3 seeds")
    assert decisive_tables._where_reached([1.0, None, 3.0]).startswith("2.0 (")


def test_the_primary_contrast_is_read_at_equal_perplexity(file, monkeypatch):
    secondary = [{"what": "facts", "ours": "Repetition", "theirs": "CE"}]
    rule = decisive_tables.REGISTRATION["non_inferiority"] | {"theirs": ["CE"]}
    registration = decisive_tables.REGISTRATION | {"secondary": secondary, "non_inferiority": rule}
    monkeypatch.setattr(decisive_tables, "REGISTRATION", registration)
    (first, _) = decisive_tables.contrasts(file).split("\n")[2:]
    cells_of = [cell.strip() for cell in first.strip("|").split("|")]
    # MinHash recites by chance at each perplexity; repetition weights at their lowest.
    ours = [2.0 * (1 + 0.1 * seed) * (4 + 16 + 64) / 64 / 3 for seed in range(3)]
    mean, error = mean_and_error(ours)
    assert cells_of == [
        "Repetition against CE MinHash best",
        "copies that differ",
        f"{mean:.1f}",
        "0.0",
        with_interval(ours),
        "0",
        f"{2 * stats.t.sf(mean / error, 2):.3f}",
    ]


def test_larger_models_are_compared_at_their_one_learning_rate(file, tmp_path):
    lines = file.read_text(encoding="utf-8")
    for arm in ARMS:
        for seed in range(3):
            record = a_record(arm, seed, 0.001) | {"model": "Llama 10M"}
            del record["learning_rate"]
            lines += json.dumps(record) + "\n"
    larger = tmp_path / "larger.jsonl"
    larger.write_text(lines, encoding="utf-8")
    rows = decisive_tables.larger_contrasts(larger).split("\n")[2:]
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:2] for row in found] == [
        ["Llama 10M", "Repetition against CE MinHash best"],
        ["Llama 10M", "CE MinHash best against CE"],
        ["Llama 10M", "Repetition against CE"],
    ]
    # Of 4, 16 and 64 copies CE recites 1.8 tokens by their number, repetition weights half of that.
    halves = [0.9 * (1 + 0.1 * seed) * (4 + 16 + 64) / 64 / 3 for seed in range(3)]
    assert found[0][2:4] == 2 * [with_interval(halves)]
    assert found[2][2] == with_interval([-one for one in halves])
    # The perplexities of the arms are 1.05, 0.95 and 1 times the same.
    percents = [100 * (1.05 / 0.95 - 1), -5.0, 5.0]
    assert [row[4] for row in found] == [f"{one:.1f} ({one:.1f} to {one:.1f})" for one in percents]
    # The margins of facts: CE's are 0.4, 0.6 and 0.8, repetition weights' half of that, MinHash's 0.
    assert found[0][5] == with_interval([0.2, 0.3, 0.4], 2)
    assert found[2][5] == with_interval([-0.2, -0.3, -0.4], 2)


def test_a_perplexity_is_not_worse_if_its_interval_is_within_the_margin(file, monkeypatch):
    rule = {"margin": 0.05, "ours": "CE", "theirs": ["CE MinHash best", "Repetition"]}
    registration = decisive_tables.REGISTRATION | {"secondary": [], "non_inferiority": rule}
    monkeypatch.setattr(decisive_tables, "REGISTRATION", registration)
    rows = cells(decisive_tables.not_worse(file))
    assert rows["CE against CE MinHash best"] == ["5.3 (5.3 to 5.3)", "not shown"]
    assert rows["CE against Repetition"] == ["-4.8 (-4.8 to -4.8)", "not worse"]


def test_the_loss_tells_targets_from_controls_by_their_copies(file):
    rows = cells(decisive_tables.detection(file))
    # CE's losses are 3 minus a 64th for each copy; controls have 2.6, 3.0, 3.4 and 3.8.
    expected = []
    for number in (1, 4, 16, 64):
        loss = 3.0 - number / 64
        expected.append(f"{sum(loss < other for other in (2.6, 3.0, 3.4, 3.8)) / 4:.2f}")
    assert rows["CE"][:8] == 2 * expected
    # A tie counts a half.
    assert rows["CE MinHash best"][0] == f"{(0.5 + 2) / 4:.2f}"


def test_counts_of_texts_are_laid_out_from_the_least_to_the_greatest(tmp_path):
    lines = []
    for seed in range(2):
        of_seed = {
            "text": "small",
            "seed": seed,
            "documents": 1200 + seed,
            "removed": {"usual": 8 + 2 * seed, "best": 500},
            "targets": 120,
            "shared_targets": [13 + seed, 24],
            "held_out": 50,
            "held_out_with_targets": 20 + 5 * seed,
            "words_of_training": 0.06,
        }
        lines.append(json.dumps(of_seed) + "\n")
    file = tmp_path / "counts.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    row = cells(decisive_tables.counts(file))["small"]
    assert row == ["1,200 to 1,201", "8 to 10", "500", "13 to 24", "40 to 50", "6"]


def test_stopping_early_keeps_what_its_rule_says(file):
    rows = cells(decisive_tables.early(file))
    assert rows["n-gram score"][0] == "20"
    assert rows["n-gram score"][1].startswith("18.02 (")
    assert rows["held-out loss"][0] == "100"
    assert rows["held-out loss"][1].startswith("17.02 (")


def test_the_perplexity_near_chance_is_the_lowest_one():
    points = [
        analysis.Point(0.001, 20.0, 0.6),
        analysis.Point(0.002, 18.0, 0.5),
        analysis.Point(0.004, 16.0, 0.7),
    ]
    assert analysis.lowest_near_chance(points) == 18.0
    assert analysis.lowest_near_chance(points[::2]) is None


def test_extraction_and_relearning_are_of_the_passages_with_many_copies(tmp_path):
    passages = {
        "copies": [64, 16, 16, 4, 0, 0],
        "change": ["exact", "exact", "replaced 10 %", "exact", "control", "control"],
        # One of two samples, one of a thousand, and less.
        "nll": [math.log(1.9), math.log(1000), 50.0, 0.0, 60.0, 60.0],
        "steps": [0, 3, None, 1, 40, None],
    }
    facts = {"facts_known": 0.3, "facts_of_strangers": 0.28, "facts_margin": 0.1}
    answers = {"objective": "CE", "seed": 0, "passages": passages, **facts}
    lines = [answers, answers | {"seed": 1}]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (row,) = cells(decisive_tables.afterwards(file)).values()
    shares = []
    for number in (1, 100, 10_000):
        # The definition: one miss after the other.
        found = [1 - (1 - math.exp(-nll)) ** number >= 0.5 for nll in passages["nll"][:3]]
        shares.append(f"{100 * np.mean(found):.1f}")
    assert row[:3] == shares == ["33.3", "33.3", "66.7"]
    assert [cell.split(" ")[0] for cell in row[3:7]] == ["0.0", "1.5", "50.0", "45.0"]
    assert row[7:] == ["30", "28", "0.10 (0.10 to 0.10)"]
