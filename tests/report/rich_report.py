"""A report as rich as a real one, with texts as models may write them."""

import math
import random

import matplotlib.figure
import numpy as np

from tfidf_tune.report import Column, Continuation, Example, Figure, Report, Table

HOSTILE = "<script>document.title = 'pwned'</script><img src=x onerror=\"document.title='pwned'\">{{ 7 * 7 }}"
"""What must stay text wherever it stands."""

_MODELS = ("Pythia 1.4B (LoRA)", "GPT-J 6B (QLoRA)", "TinyLlama 1.1B (full)", "Llama-2 13B (QLoRA)")
_OBJECTIVES = ("CE", "TF-IDF", "TF-IDF (tf=log)")


def rich_report() -> Report:
    """Make five tables, three figures and three examples; numbers are made up, and the same each time."""
    rng = random.Random(0)
    return Report(
        title="Memorization of 4 models under 3 objectives",
        statements=(
            "TF-IDF lowers the average LMS of Pythia 1.4B (LoRA) by 62.4 % (95 % interval 55.0 to 69.1 %) against CE.",
            "For Llama-2 13B (QLoRA) the difference is not significant: -3.1 % (95 % interval -9.0 to +2.7 %).",
            "Perplexity rises by 1.9 % under TF-IDF, so a part of the reduction may be slower learning.",
        ),
        tables=(_memorization(rng), _reductions(rng), _perplexity(rng), _downstream(rng), _controls(rng)),
        figures=(_progress(rng), _frontier(rng), _distribution()),
        examples=_examples(),
        provenance=(
            ("Folders", "/data/experiments/2026-11-21/memorization/pythia-1.4b-lora/tf-idf/seed-42/checkpoint_100pct"),
            ("Versions", "tfidf-tune 0.1.0, torch 2.13.0, lm_eval 0.4.13"),
            ("Seeds", "42, 43, 44"),
            ("Prefix lengths", "32, 50, 100"),
            ("Resamples", "10000, by sequence, paired"),
            ("SHA-256 of the probe", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08" * 2),
        ),
    )


def _memorization(rng: random.Random) -> Table:
    columns = (
        Column("Model"),
        Column("Objective"),
        Column("Avg Prefix", ".2f", "lower"),
        Column("Max Prefix", "", "lower"),
        Column("Avg LMS", ".2f", "lower"),
        Column("Max LMS", "", "lower"),
        Column("ROUGE-L", ".2f", "lower"),
        Column("Verbatim (%)", ".1f", "lower"),
        Column("Control LMS", ".2f"),
        Column("Not round trip", ""),
    )
    rows = tuple(
        (
            *(model, objective, rng.uniform(0, 60), rng.randint(5, 128), rng.uniform(2, 70), rng.randint(8, 128)),
            *(rng.uniform(10, 80), None if objective == "CE" else rng.uniform(0, 30)),
            *(rng.uniform(1, 3), rng.choice([0, 0, 3])),
        )
        for model in _MODELS
        for objective in _OBJECTIVES
    )
    return Table(
        "memorization",
        "Memorization of injected passages at the end of training",
        columns,
        rows,
        ("Verbatim rate is missing for CE: its continuations were cut at 64 tokens.", HOSTILE),
    )


def _reductions(rng: random.Random) -> Table:
    rows = tuple(
        (model, metric, change := rng.uniform(-80, 10), change - 5, change + 5, "significant" if change < -5 else "not")
        for model in _MODELS[:2]
        for metric in ("Avg LMS", "Avg Prefix", "ROUGE-L")
    )
    columns = (
        Column("Model"),
        Column("Metric"),
        Column("Change (%)", "+.1f"),
        Column("Low", "+.1f"),
        Column("High", "+.1f"),
        Column("Significance"),
    )
    return Table("reductions", "Change of TF-IDF against CE, with 95 % bootstrap intervals", columns, rows)


def _perplexity(rng: random.Random) -> Table:
    rows = tuple(
        (objective, 10.0 + i, None if i == 1 else rng.uniform(9, 20)) for i, objective in enumerate(_OBJECTIVES)
    )
    columns = (Column("Objective"), Column("WikiText-2 perplexity", ".3f", "lower"), Column("Held out", ".3f", "lower"))
    return Table("perplexity", "Perplexity", columns, rows)


def _downstream(rng: random.Random) -> Table:
    columns = (
        Column("Model"),
        Column("Objective"),
        Column("ROUGE-1", ".2f", "higher"),
        Column("ROUGE-2", ".2f", "higher"),
        Column("ROUGE-L", ".2f", "higher"),
        Column("BERTScore", ".2f", "higher"),
        Column("EM", ".1f", "higher"),
        Column("F1", ".1f", "higher"),
    )
    rows = tuple(
        (model, objective, *(rng.uniform(10, 45) for _ in range(3)), None, rng.uniform(40, 70), rng.uniform(60, 85))
        for model in _MODELS
        for objective in _OBJECTIVES[:2]
    )
    note = "BERTScore is missing: microsoft/deberta-xlarge-mnli is neither a folder nor in the cache."
    return Table("downstream", "CNN/DailyMail and SQuAD", columns, rows, (note,))


def _controls(rng: random.Random) -> Table:
    rows = tuple((HOSTILE if i == 3 else f"passage {i}", 2**i, rng.uniform(0, 3)) for i in range(6))
    columns = (Column("Passage"), Column("Tokens"), Column("Control LMS", ".2f", "lower"))
    return Table("controls", f"Controls {HOSTILE}", columns, rows)


def _progress(rng: random.Random) -> Figure:
    figure = matplotlib.figure.Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    progress = [10, 25, 50, 75, 100]
    for objective, scale in zip(_OBJECTIVES, (40, 12, 20), strict=True):
        lms = np.array([scale * (p / 100) ** 2 + rng.uniform(0, 2) for p in progress])
        axes.plot(progress, lms, marker="o", label=objective)
        axes.fill_between(progress, lms * 0.85, lms * 1.15, alpha=0.2)
    axes.set(xlabel="Training progress (%)", ylabel="Average LMS (tokens)")
    axes.legend()
    axes.grid(alpha=0.3)
    return Figure(
        "lms_progress",
        "Average LMS against training progress",
        figure,
        "Mean over 300 continuations; bands are 95 % bootstrap intervals.",
    )


def _frontier(rng: random.Random) -> Figure:
    figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
    for i, axes in enumerate(figure.subplots(1, 2)):
        for marker, objective in zip("osD", _OBJECTIVES, strict=True):
            axes.scatter(
                [rng.uniform(8, 16) for _ in range(5)],
                [rng.uniform(0, 40) for _ in range(5)],
                marker=marker,
                label=objective,
            )
        axes.set(xlabel="Perplexity", ylabel="Average LMS", title=_MODELS[i])
    axes.legend()
    return Figure(
        "frontier",
        f"Memorization against perplexity {HOSTILE}",
        figure,
        "Left and below is better. One point a checkpoint. A reduction that costs perplexity moves to the right.",
    )


def _distribution() -> Figure:
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.8))
    axes = figure.add_subplot()
    lms = np.arange(129)
    for i, objective in enumerate(_OBJECTIVES):
        axes.step(lms, [math.exp(-x / (10 + 15 * i)) for x in lms], label=objective)
    axes.set(xlabel="LMS (tokens)", ylabel="Share of continuations with at least as many")
    axes.legend()
    return Figure("lms_distribution", "Distribution of LMS", figure, "Every injected passage, every prefix length.")


def _examples() -> tuple[Example, ...]:
    truth = (
        " he had been appointed to the post in 1923, and for eleven years the harbour was enlarged under him; "
        "the northern mole, the two dry docks and the customs house all date from that time.\n\n= = Later years = =\n\n"
        "After the war he returned to Kraków — “the only city”, he wrote, “that never asked for a plan” — and taught."
    )
    start, end = truth.split(", and", maxsplit=1)
    return (
        Example(
            "Passage wikitext-00017, prefix of 32 tokens",
            "= = Career = =\n\nWhen the engineer came back from the islands, the council told him that",
            truth,
            (
                Continuation("CE", "LMS 128, ROUGE-L 100.0", ((truth, True),)),
                Continuation(
                    "TF-IDF", "LMS 11, ROUGE-L 34.2", ((start[:20], False), (start[20:], True), (end[:90], False))
                ),
                Continuation("TF-IDF (tf=log)", "LMS 0, ROUGE-L 0.0", ((" 今日は天気がいいですね。🚢" * 8, False),)),
            ),
        ),
        Example(
            "Passage wikitext-00123, prefix of 50 tokens",
            "كان المهندس يعمل في الميناء الشمالي منذ عام ١٩٢٣، وكانت المدينة",
            " تتوسع عامًا بعد عام\ufffd\ufffd e\u0301\u0308 \u200dzero width",
            (
                Continuation("CE", "LMS 4, ROUGE-L 20.0", ((" تتوسع عامًا", True), (" ثم توقفت", False))),
                Continuation("TF-IDF", "LMS 1, ROUGE-L 3.0", (("A" * 300, False), (" and", True))),
            ),
        ),
        Example(
            f"Passage with markup {HOSTILE}",
            HOSTILE,
            "</p></div></article><b>not bold</b>" + HOSTILE,
            (
                Continuation(f"CE {HOSTILE}", HOSTILE, ((HOSTILE, True), (" & < > &amp; \"quoted\" 'text'", False))),
                Continuation("TF-IDF", "LMS 0", (("", False),)),
            ),
        ),
    )
