"""The first screen of a comparison against numbers computed from the scores by other means."""

import dataclasses
import re

import numpy as np
import pytest
from helpers.fakes.runs import (
    answers,
    block,
    evaluation,
    likelihoods,
    results,
    run,
    sample,
    targets,
)

from tfidf_tune.compare import comparison_report
from tfidf_tune.report import terminal_text


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """They take a third of a report, and say no verdict."""
    monkeypatch.setattr(
        "tfidf_tune.compare._report.comparison_figures", lambda results, evaluations: []
    )


def drawn(mean, number, *, kind="target", seed=0):
    values = np.random.default_rng([seed, number]).poisson(mean, number)
    return [
        sample(f"{kind}-{at}", int(value), kind=kind, length=128) for at, value in enumerate(values)
    ]


def noisy_blocks(perplexity, number=40):
    # Blocks are paired: what two runs share says nothing about the width of an interval, the rest
    # does.
    noise = np.random.default_rng(0).normal(0, 0.1, number)
    noise += np.random.default_rng(int(perplexity)).normal(0, 0.02, number)
    values = np.log(perplexity) + noise - noise.mean()
    return tuple(block(at, 10, -10 * float(value)) for at, value in enumerate(values))


def runs_of(
    lms=(20, 10), perplexity=(20, 25), *, objectives=("CE", "TF-IDF"), number=40, **options
):
    """Runs under objectives of these mean LMS and perplexities."""
    progress = options.get("progress", (100,))
    model = options.get("model", "Tiny")
    for at, (name, mean) in enumerate(zip(objectives, lms, strict=True)):
        for seed in options.get("seeds", (0,)):
            probed = drawn(mean, number, seed=1 + seed + 10 * at)
            if options.get("controls", 2) is not None:
                probed += drawn(options.get("controls", 2), number, kind="control", seed=99)
            fields = (
                {}
                if perplexity is None
                else {"blocks": noisy_blocks(perplexity[at], options.get("blocks", 40))}
            )
            fields |= {"num_read": (48,) * 10} | options.get("fields", {})
            yield run(
                name,
                [evaluation(one, probed, **fields) for one in progress],
                model=model,
                seed=seed,
            )


LESS = r"TF-IDF recites \d+\.\d % less than CE by the average LMS"
HIGHER = r"its perplexity is \d+\.\d % higher"
NO_MORE = "recites no more than text it never saw"
COMPARISONS = {
    rf"{LESS}; {HIGHER}\.": [*runs_of()],
    r"TF-IDF recites \d+\.\d % more than CE by the average LMS; its perplexity is \d+\.\d % lower\.": [
        *runs_of((10, 20), (25, 20))
    ],
    "TF-IDF is not shown to recite less or more than CE; its perplexity is not shown to differ\\.": [
        *runs_of((10, 9.5), (20, 20))
    ],
    rf"TF-IDF {NO_MORE}; {HIGHER}\.": [*runs_of((20, 2))],
    rf"TF-IDF, like CE, {NO_MORE}; {HIGHER}\. CE already {NO_MORE}: keep it\.": [
        *runs_of((2, 2), controls=9)
    ],
    rf"TF-IDF, like CE, {NO_MORE}; its perplexity is \d+\.\d % lower\.": [
        *runs_of((2, 2), (25, 20), controls=9)
    ],
    rf"TF-IDF {NO_MORE} \(no positive control shows that it could be seen to recite\); {HIGHER}\.": [
        *runs_of((20, 2), fields={"num_read": (3,) * 10})
    ],
    rf"{LESS}; its F1 of answers is not shown to differ\.": [
        *runs_of(perplexity=None, fields={"answers": answers(*[100, 0] * 20)})
    ],
    rf"{LESS}; {HIGHER}\. ?": [*runs_of(seeds=(0, 1, 2), progress=(50, 100), controls=None)],
    rf"too little was measured to judge what TF-IDF recites; {HIGHER}\.": [*runs_of(number=4)],
    rf"Tiny: {LESS}; {HIGHER}\. Other: TF-IDF {NO_MORE}; {HIGHER}\.": [
        *runs_of(),
        *runs_of((20, 2), (20, 21), model="Other"),
    ],
}


def by_passage(made, model, objective, kind="target", metric="lms"):
    """Values by unit, averaged over seeds, of the last checkpoints of an objective."""
    rows = made.scores[(made.scores["metric"] == metric) & (made.scores["kind"] == kind)]
    at = [
        number
        for number, one in enumerate(made.checkpoints)
        if (one.model, one.objective, one.progress) == (model, objective, 100)
    ]
    return (
        rows[rows["checkpoint"].isin(at)]
        .groupby("unit", observed=True)["value"]
        .mean()
        .to_numpy(float)
    )


def percentiles(statistic, *arrays, paired):
    """The ends of the bootstrap's 95 % interval of a statistic of resampled rows."""
    rng = np.random.default_rng(7)
    number = 4000
    index = rng.integers(0, len(arrays[0]), (number, len(arrays[0])))
    drawn = []
    for one in arrays:
        if not paired:
            index = rng.integers(0, len(one), (number, len(one)))
        drawn.append(one[index])
    return np.percentile(statistic(*drawn), [2.5, 97.5])


def numbers(text):
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", text)]


@pytest.mark.parametrize("verdict", COMPARISONS)
def test_the_verdict_and_the_first_table_equal_the_scores(verdict):
    source = results(*COMPARISONS[verdict])
    made = comparison_report(source)
    counted = r"( Passages recited further than unseen text: .*\d of \d+\.)?"
    assert re.fullmatch(verdict + counted, made.verdict)
    shown = terminal_text(made)
    assert len(shown.splitlines()) <= 20
    assert " ".join(shown.split()).endswith(made.verdict)
    table = made.tables[0]
    assert table.name == "overview"
    for row in table.frame.to_dict("records"):
        names = row["Model"], row["Objective"]
        ours, controls = (by_passage(source, *names, kind) for kind in ("target", "control"))
        if len(controls):
            ends = percentiles(lambda x, y: x.mean(-1) - y.mean(-1), ours, controls, paired=False)
            expected = [ours.mean() - controls.mean(), *ends]
            assert numbers(row["Recited above chance"]) == pytest.approx(expected, abs=0.3)
        else:
            assert row["Recited above chance"] is None
        share, low, high = numbers(row["Verbatim (%)"])
        assert (share, low) == (0, 0)  # none of so many: the one-sided bound of Clopper and Pearson
        assert high == pytest.approx(100 * (1 - 0.05 ** (1 / len(ours))), abs=0.05)
        ours, theirs = (
            by_passage(source, names[0], name, "block", "nll") for name in (names[1], "CE")
        )
        cost = row["Perplexity against CE (%)"]
        if names[1] == "CE":
            assert cost == "baseline"
        elif not len(ours):
            assert cost is None
        else:
            change = 100 * np.expm1(ours.mean() - theirs.mean())
            ends = percentiles(
                lambda x, y: 100 * np.expm1(x.mean(-1) - y.mean(-1)), ours, theirs, paired=True
            )
            assert numbers(cost) == pytest.approx([change, *ends], abs=0.3)


@pytest.mark.parametrize("baseline_lms", [2, 20])
def test_a_loss_that_tells_the_text_apart_is_said_of_each_objective_at_chance(baseline_lms):
    """Also if the baseline recites no more than unseen text, either."""
    scored = [likelihoods(f"target-{at}", "target", 1 + at / 100) for at in range(40)]
    scored += [likelihoods(f"control-{at}", "control", 3 + at / 100) for at in range(40)]
    runs = runs_of(lms=(baseline_lms, 2), fields={"passages": tuple(scored)})
    verdict = comparison_report(results(*runs)).verdict
    still = f"{NO_MORE}, but its loss still tells the two apart"
    if baseline_lms == 2:
        assert verdict.startswith(f"TF-IDF, like CE, {still}; ")
        assert f"CE already {still}: keep it." in verdict
    else:
        assert verdict.startswith(f"TF-IDF {still}; ")


def test_recitation_and_cost_are_of_the_last_checkpoint_that_all_runs_share():
    early = evaluation(50, drawn(20, 40), blocks=noisy_blocks(50))
    last = evaluation(100, drawn(30, 40), blocks=noisy_blocks(20))
    made = comparison_report(
        results(run("CE", [early, last]), run("TF-IDF", [evaluation(50, drawn(5, 40, seed=1))]))
    )
    assert re.fullmatch(r"TF-IDF recites \d+\.\d % less than CE by the average LMS\.", made.verdict)
    assert any(
        "last checkpoint that all runs of the model share: Tiny at 50 %" in text
        for text in made.footnotes
    )
    later = evaluation(100, blocks=noisy_blocks(90))
    both = [evaluation(50, drawn(5, 40, seed=1)), later]
    made = comparison_report(results(run("CE", [early, last]), run("TF-IDF", both)))
    assert re.fullmatch(
        r"TF-IDF recites \d+\.\d % less than CE by the average LMS\.", made.verdict
    )  # perplexities are of 100 %
    assert made.tables[0].frame["Perplexity against CE (%)"].tolist() == ["baseline", None]
    measured = evaluation(50, drawn(5, 40, seed=1), blocks=noisy_blocks(60))
    made = comparison_report(results(run("CE", [early, last]), run("TF-IDF", [measured, later])))
    # Of 50 %, not 90 / 20.
    expected = r"TF-IDF recites \d+\.\d % less than CE by the average LMS; its perplexity is 20\.0 % higher\."
    assert re.fullmatch(expected, made.verdict)
    assert numbers(made.tables[0].frame["Perplexity against CE (%)"][1])[0] == pytest.approx(20)


def test_the_start_has_a_row_and_no_verdict():
    """It changes no other row and no correction for the number of comparisons."""
    compared = [*runs_of((20, 16), (20, 20.4))]
    probed = [*drawn(2, 40, seed=5), *drawn(2, 40, kind="control", seed=99)]
    start = run(
        "start", [evaluation(0, probed, blocks=noisy_blocks(90), num_read=(48,) * 10)], seed=None
    )
    made = comparison_report(results(*compared, start))
    without = comparison_report(results(*compared))
    assert made.title == without.title
    assert made.verdict.removesuffix(", start 0 of 40.") == without.verdict.removesuffix(".")
    tables, expected = (
        {table.name: table.frame for table in each.tables} for each in (made, without)
    )
    for name, frame in tables.items():
        if "Objective" in frame:
            rows = frame[frame["Objective"] != "start"]
            assert rows.to_dict("records") == expected[name].to_dict("records"), name
    assert tables["perplexity"]["Objective"].tolist() == ["CE", "TF-IDF", "start"]
    row = tables["overview"].to_dict("records")[2]
    assert row["Objective"] == "start"
    assert numbers(row["Recited above chance"])[1] < 0.5
    with pytest.raises(ValueError, match="nothing to compare: there is only"):
        comparison_report(results(compared[0], start))
    against_start = comparison_report(results(compared[0], start), baseline="start").verdict
    assert re.match(r"CE recites \d+\.\d % more than start by the average LMS", against_start)


def test_a_model_without_a_run_to_compare_with_is_named():
    lone = run("IDF", [evaluation(100, targets(*[4] * 12))], model="Other")
    said = comparison_report(results(*runs_of(), lone)).verdict
    assert " Not compared: Other (only IDF)." in said
    alone = [
        run(name, [evaluation(samples=targets(4))], model=model)
        for model, name in (("A", "CE"), ("B", "IDF"))
    ]
    assert comparison_report(results(*alone)).verdict.startswith(
        "Nothing is compared: no model has runs of CE and"
    )


def test_many_rows_are_counted_on_the_terminal_and_shown_if_asked_for():
    objectives = ("CE", *(f"objective {number}" for number in range(14)))
    made = comparison_report(
        results(*runs_of((9,) * 15, (20,) * 15, objectives=objectives, number=12, blocks=3))
    )
    assert re.fullmatch(r"(objective \d [^.]*\. ){3}11 more are in the table\.", made.verdict)
    shown = terminal_text(made)
    assert len(shown.splitlines()) == 20
    hidden = int(re.search(r"and (\d+) more rows: --verbose", shown)[1])
    assert shown.count("| objective") == 14 - hidden
    verbose = terminal_text(made, verbose=True)
    assert all(name in verbose for name in objectives)
    assert "## Footnotes" in verbose
    assert " ".join(verbose.split()).endswith(made.verdict)


def test_runs_with_other_batch_sizes_are_named():
    """Of two models, one whose runs agree; a run of which the number is not known says nothing."""
    compared = results(*runs_of(), *runs_of(model="Other"))
    sizes = {("Tiny", "CE"): 8, ("Tiny", "TF-IDF"): 16, ("Other", "CE"): 8, ("Other", "TF-IDF"): 8}

    def verdict(sizes):
        checkpoints = [
            dataclasses.replace(one, num_sequences=sizes.get((one.model, one.objective)))
            for one in compared.checkpoints
        ]
        return comparison_report(
            dataclasses.replace(compared, checkpoints=tuple(checkpoints))
        ).verdict

    assert (
        "runs of Tiny had other numbers of sequences in a training step (CE 8 and TF-IDF 16)"
        in verdict(sizes)
    )
    assert "runs of Other" not in verdict(sizes)
    assert "numbers of sequences" not in verdict(sizes | {("Tiny", "TF-IDF"): None})
