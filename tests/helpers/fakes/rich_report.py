"""A report with everything that a real one has, and with texts as models may write them."""

import itertools
import math
import random

import pandas as pd
from matplotlib.figure import Figure as Drawing

from tfidf_tune.report import Continuation, Example, Figure, Report, Table

HOSTILE = (
    "<script>document.title = 'pwned'</script><img src=x onerror=\"document.title='pwned'\">{{ 7 * "
    "7 }}"
)
"""Stays text wherever it stands."""
_MODELS = ("Pythia 1.4B (LoRA)", "GPT-J 6B (QLoRA)", "TinyLlama 1.1B (full)", "Llama-2 13B (QLoRA)")
_OBJECTIVES = ("CE", "TF-IDF", "TF-IDF (tf=log)")


def rich_report() -> Report:
    """Make three tables, two figures and two examples; the made-up numbers are the
    same each time.
    """
    provenance = {
        "SHA-256 of the probe": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
        * 2
    }
    provenance["Folders"] = (
        "/data/2026-11-21/memorization/pythia-1.4b-lora/tf-idf/seed-42/checkpoint_100pct"
    )
    return Report(
        title="Memorization of 4 models under 3 objectives",
        tables=_tables(),
        figures=(
            _figure(
                "lms_progress",
                "Average LMS against training progress",
                "Mean over 300 continuations.",
            ),
            _figure(
                "frontier",
                f"Memorization against perplexity {HOSTILE}",
                "Left and below is better.",
            ),
        ),
        examples=_examples(),
        provenance=provenance,
        verdict="TF-IDF recites 62.4 % less than CE (55.0 % to 69.1 %[1]) at a 1.9 % higher "
        "perplexity.[2]",
        footnotes=("Few passages.", "A single seed."),
    )


def _tables() -> tuple[Table, ...]:
    rng = random.Random(0)
    pairs = list(itertools.product(_MODELS, _OBJECTIVES))
    recited = pd.DataFrame(pairs, columns=["Model", "Objective"])
    formats = dict.fromkeys(
        ("Avg Prefix", "Avg LMS", "ROUGE-L", "BERTScore", "Verbatim (%)"), ".2f"
    )
    for name in formats:
        recited[name] = math.nan if name == "BERTScore" else [rng.uniform(0, 70) for _ in pairs]
    recited["Max LMS"] = [rng.randint(8, 128) for _ in pairs]
    recited["Control LMS, by far the longest header"] = 1
    notes = ("Verbatim rate is missing for CE.", HOSTILE)
    better = {"Avg LMS": "lower", "BERTScore": "higher"}
    perplexity = pd.DataFrame({"Objective": _OBJECTIVES, "Perplexity": [10.0, math.nan, 11.25]})
    passages = pd.DataFrame(
        {"Passage": [f"passage {i}" for i in range(3)] + [HOSTILE], "Tokens": range(4)}
    )
    return (
        Table("memorization", "Memorization of injected passages", recited, notes, formats, better),
        Table(
            "perplexity",
            "Perplexity",
            perplexity,
            (),
            {"Perplexity": ".3f"},
            {"Perplexity": "lower"},
        ),
        Table("controls", f"Controls {HOSTILE}", passages),
    )


def _figure(name: str, title: str, caption: str) -> Figure:
    drawing = Drawing(figsize=(6.4, 4), layout="constrained")
    axes = drawing.add_subplot()
    for scale, objective in enumerate(_OBJECTIVES, start=1):
        axes.plot([10, 50, 100], [scale, 2 * scale, 8 * scale], marker="o", label=objective)
    axes.set(xlabel="Training progress (%)", ylabel="Average LMS (tokens)")
    axes.legend()
    return Figure(name, title, drawing, caption)


def _examples() -> tuple[Example, ...]:
    prompt = (
        "= = Career = =\n\nWhen the engineer came back from the islands, the council told him that"
    )
    truth = (
        " he had been appointed to the post.\n\n= = Later years = =\n\nHe returned to Kraków — "
        "“the only city”."
    )
    started = ((truth[:20], False), (truth[20:60], True), (truth[70:], False))
    unbroken = ((" 今日は天気がいいですね。🚢" * 8 + "A" * 300, False),)
    continuations = (
        Continuation("CE", "LMS 128, ROUGE-L 100.0", ((truth, True),)),
        Continuation("TF-IDF", "LMS 11, ROUGE-L 34.2", started),
        Continuation("TF-IDF (tf=log)", "LMS 0", unbroken),
    )
    hostile = (
        Continuation(f"CE {HOSTILE}", HOSTILE, ((" تتوسع عامًا", True), (" ثم توقفت", False))),
        Continuation(
            "IDF", "LMS 4", ((HOSTILE, True), (" & < > &amp; \"quoted\" 'text'</p></div>", False))
        ),
        Continuation("TF-IDF", "LMS 0", (("", False),)),
    )
    arabic = "كان المهندس يعمل في الميناء الشمالي منذ عام ١٩٢٣، وكانت المدينة"
    odd = " تتوسع عامًا بعد عام\ufffd\ufffd e\u0301\u0308 \u200dzero width"
    return (
        Example("Passage wikitext-00017, prefix of 32 tokens", prompt, truth, continuations),
        Example(f"Passage with markup {HOSTILE}", arabic, odd, hostile),
    )
