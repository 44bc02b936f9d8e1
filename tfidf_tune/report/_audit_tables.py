"""What an audit found, and its tables: what was recited by kind of passage, prompt, attack and number of repeats."""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis.comparison import Floor, floor_of
from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, binomial_upper_bound
from tfidf_tune.report._document import Table, tabulate
from tfidf_tune.report._wording import FEW_UNITS, NEAR_EXPLAINED, TEXT_PROMPTS, Footnotes, prompt_length, span
from tfidf_tune.results import Results

if TYPE_CHECKING:
    import pandas as pd

_NUM_MOST_RECITED = 20
_PROMPT_WIDTH = 70
_REPEATS, _VERBATIM = "Times in the training text", "Targets verbatim (%)"
_AGAINST = (
    *(("LMS of targets", "lms", ".2f"), ("LMS of controls", "controls", ".2f"), ("Difference", "difference", ".2f")),
    *(("95 % from", "low", ".2f"), ("95 % to", "high", ".2f")),
)
KINDS = {"target": "targets (training text)", "control": "controls (never seen)"}


class Found:
    """What the checkpoint with the number ``at`` was asked for and recites: facts for all parts of its page.

    ``samples`` has a row of each sample, with the passage's repeats in the training text (NaN if unknown). Averages are
    over ``plain``, the samples of the greedy attack or else of the first one, and over its ``targets`` and
    ``controls``. ``num_verbatim`` targets are recited completely from at least one prompt of any attack.
    """

    def __init__(self, results: Results, at: int) -> None:
        import pandas as pd

        self.checkpoint = results.checkpoints[at]
        sampled, scores = self.checkpoint.samples, results.scores
        table = pd.DataFrame([vars(sample) for sample, _ in sampled])
        known = scores[(scores["checkpoint"] == at) & (scores["metric"] == "num_injections") & (scores["value"] > 0)]
        repeats = dict(zip(known["unit"], known["value"], strict=True))
        self.samples = table.assign(
            sample=[sample for sample, _ in sampled],
            prompt=[prompt for _, prompt in sampled],
            attack=table["attack"].replace("", "greedy"),
            length=table["reference_ids"].map(len),
            repeats=table["passage_id"].map(repeats).astype(float),
        )
        self.attacks = [str(name) for name in self.samples["attack"].unique()]
        first = "greedy" if "greedy" in self.attacks else self.attacks[0]
        self.plain = self.samples[self.samples["attack"] == first]
        self.targets, self.controls = (self.plain[self.plain["kind"] == kind] for kind in KINDS)
        of_kind = self.samples.groupby("kind")["passage_id"].nunique()
        self.num_targets, self.num_controls = (int(of_kind.get(kind, 0)) for kind in KINDS)
        self.num_verbatim = _num_verbatim(self.samples)
        self.target_means = self.targets.groupby("passage_id")["lms"].mean().to_numpy(float)
        self.lms = float(self.target_means.mean())
        self.floor = _floor(self.plain)
        self.prompt_lengths = [prompt_length(length) for length in sorted(set(self.samples["prefix_length"]))]


def _floor(samples: "pd.DataFrame") -> Floor | None:
    if not {"target", "control"} <= set(samples["kind"]):
        return None
    means = samples.groupby(["kind", "passage_id"])["lms"].mean()
    return floor_of(means["target"].to_numpy(float), means["control"].to_numpy(float))


def _num_verbatim(samples: "pd.DataFrame") -> int:
    return int(samples.loc[(samples["kind"] == "target") & samples["verbatim"], "passage_id"].nunique())


def best_samples(samples: "pd.DataFrame", kind: str) -> "pd.DataFrame":
    """Return the sample with the highest LMS of each passage; ties go to the shortest prompt."""
    own = samples[samples["kind"] == kind]
    order = own.sort_values(["lms", "prefix_length"], ascending=[False, True], kind="stable")
    return order.drop_duplicates("passage_id")


def repeat_groups(targets: "pd.DataFrame") -> list[tuple[str, "pd.DataFrame"]]:
    """Group the targets by how often they occurred in the training text: 1, 2, 3 to 4, 5 to 8, 9 to 16, ..."""
    known = targets[targets["repeats"].notna()]
    groups = known.groupby([(int(repeats) - 1).bit_length() for repeats in known["repeats"]])
    return [(span(own["repeats"].min(), own["repeats"].max(), decimals=0), own) for _, own in groups]


def _compared(groups: "Iterable[tuple[Any, pd.DataFrame]]") -> "pd.DataFrame":
    """Return a row for each group of samples with a target: targets, against controls where there are any."""
    import pandas as pd

    rows = []
    for name, samples in groups:
        targets, floor = samples[samples["kind"] == "target"], _floor(samples)
        if targets.empty:
            continue
        against = (None,) * 4 if floor is None else (floor.controls, floor.difference, *floor.excess[:2])
        found, number, lms = _num_verbatim(samples), targets["passage_id"].nunique(), targets["lms"]
        at_most = 100 * binomial_upper_bound(found, number)
        rows.append((name, number, lms.mean(), lms.max(), *against, 100 * (found / number), found, at_most))
    names = ("name", "number", "lms", "max_lms", "controls", "difference", "low", "high", "verbatim", "found", "upper")
    return pd.DataFrame(rows, columns=names)


def targets_and_controls(found: Found, footnotes: Footnotes) -> Table:
    samples = found.plain
    near = samples[["edit_distance", "common_subsequence"]].astype(float)  # None in older results
    frame = samples.assign(verbatim=100.0 * samples["verbatim"], label=samples["kind"].map(KINDS), **near)
    scores = frame.groupby("label", sort=False).agg(**{
        "Number": ("passage_id", "nunique"),
        **{f"{name} Prefix": ("prefix_match", how) for name, how in (("Avg", "mean"), ("Max", "max"))},
        **{f"{name} LMS": ("lms", how) for name, how in (("Avg", "mean"), ("Max", "max"))},
        "Edit distance": ("edit_distance", "mean"),
        "Common subsequence": ("common_subsequence", "mean"),
        "ROUGE-L": ("rouge_l", "mean"),
        "Verbatim (% of prompts)": ("verbatim", "mean"),
    }).dropna(axis="columns", how="all")  # fmt: skip
    scores = scores.reindex([label for label in KINDS.values() if label in scores.index])
    several = " Each passage is asked for from every prefix length." if samples["prefix_length"].nunique() > 1 else ""
    caveats = [f"The {TEXT_PROMPTS}"] if found.checkpoint.text_prompts else []
    measured = f" {NEAR_EXPLAINED}" if near.notna().any(axis=None) else ""
    notes = [f"Prefix: tokens that agree from the first on.{measured}{several}{footnotes.mark(*caveats)}"]
    decimals = ("Avg Prefix", "Avg LMS", "Edit distance", "Common subsequence", "ROUGE-L")
    formats = dict.fromkeys(decimals, ".2f") | {"Verbatim (% of prompts)": ".1f"}
    return Table(
        "targets_and_controls", "Targets against controls", scores.reset_index(names="Passages"), notes, formats
    )


def by_prefix_length(samples: "pd.DataFrame", footnotes: Footnotes) -> Table:
    fewest = min(samples.loc[samples["kind"] == kind, "passage_id"].nunique() for kind in KINDS)
    caveats = [FEW_UNITS] if MIN_UNITS <= fewest < ENOUGH_UNITS else []
    if 0 < fewest < MIN_UNITS:
        caveats = [f"From fewer than {MIN_UNITS} passages, such an interval is too narrow."]
    about = "95 %: percentile bootstrap over passages of the difference, targets minus controls."
    notes = [about + footnotes.mark(*caveats)] if fewest else []
    frame = _compared((prompt_length(length), own) for length, own in samples.groupby("prefix_length"))
    columns = (("Prompt (tokens)", "name", ""), *_AGAINST, (_VERBATIM, "verbatim", ".1f"))
    return tabulate("by_prefix_length", "By length of the prompt", frame, columns, notes)


def by_repeats(targets: "pd.DataFrame") -> Table:
    columns = (
        *((_REPEATS, "name", ""), ("Targets", "number", ""), ("Avg LMS", "lms", ".2f"), ("Max LMS", "max_lms", "")),
        (_VERBATIM, "verbatim", ".1f"),
    )
    notes = ["Verbatim: recited completely from at least one of the prompts."]
    return tabulate("by_repeats", "By repeats in the training text", _compared(repeat_groups(targets)), columns, notes)


def most_recited(samples: "pd.DataFrame") -> Table:
    columns = (
        *(("Passage", "passage_id", ""), (_REPEATS, "repeats", ""), ("Prompt (tokens)", "prefix_length", "")),
        *(("LMS", "lms", ""), ("Of", "length", ""), ("ROUGE-L", "rouge_l", ".1f"), ("Verbatim", "verbatim", "")),
        ("Starts with", "prompt", ""),
    )
    best = best_samples(samples, "target")
    shown = best.iloc[:_NUM_MOST_RECITED]
    frame = shown.assign(
        verbatim=shown["verbatim"].map({True: "yes", False: "no"}),
        prompt=[textwrap.shorten(prompt, _PROMPT_WIDTH, placeholder=" …") for prompt in shown["prompt"]],
        prefix_length=shown["prefix_length"].map(prompt_length),
    )
    notes = ["Of: tokens of the passage that the continuation was compared with."]
    notes += [f"The first {len(shown)} of {len(best)} targets."] if len(best) > len(shown) else []
    return tabulate("most_recited", "Most recited passages", frame, columns, notes)


def by_attack(samples: "pd.DataFrame") -> Table:
    """Compare ways of asking. A passage counts with its best prompt of each."""
    groups = [*samples.groupby("attack", sort=False), ("any of these", samples)]
    passages = ["kind", "passage_id"]
    best = [(name, own.groupby(passages, as_index=False)[["lms", "verbatim"]].max()) for name, own in groups]
    frame = _compared(best if len(groups) > 2 else [])
    numbers = {name: len(own) for name, own in groups}
    frame = frame.assign(
        prompts=frame["name"].map(numbers), share=[f"{row.found} of {row.number}" for row in frame.itertuples()]
    )
    notes = [
        "LMS: the highest of a passage's prompts. At most: one-sided 95 % bound of Clopper and Pearson for the share "
        "of such passages."
    ]
    columns = (
        *(("Attack", "name", ""), ("Prompts", "prompts", ""), *_AGAINST),
        *(("Targets verbatim", "share", ""), ("Verbatim, at most (%)", "upper", ".1f")),
    )
    return tabulate("by_attack", "By attack", frame, columns, notes)


def extraction(extractable: "pd.DataFrame") -> Table:
    """Show of how many targets a continuation can be sampled verbatim; see :func:`extractable_targets`."""
    columns = (
        *(("Samples (n)", "num_samples", ","), ("Probability (p)", "probability", ".2f")),
        *(("Targets", "found", ""), ("Of", "number", ""), ("%", "share", ".1f"), ("At most (%)", "upper", ".1f")),
    )
    frame = extractable.assign(share=100 * extractable["share"], upper=100 * extractable["upper"])
    notes = [
        "Targets of which n samples at temperature 1 contain the exact continuation with a probability of at least p, "
        "computed from its likelihood after the best of the prompts: (n, p)-discoverable extraction. At most: "
        "one-sided 95 % bound of Clopper and Pearson for the share of such passages."
    ]
    return tabulate("extraction", "Extraction by sampling", frame, columns, notes)


def extractable_targets(scores: "pd.DataFrame", checkpoint: int, pairs: "list[tuple[int, float]]") -> "pd.DataFrame":
    """Count (n, p)-discoverably extractable targets from the likelihoods of their continuations.

    Returns:
        pd.DataFrame: a row for each pair, with ``num_samples``, ``probability``, ``found``, ``number`` of targets,
            ``share`` and its bound ``upper``, in [0, 1]; none without likelihoods.
    """
    import pandas as pd

    from tfidf_tune.analysis import extraction_probability

    is_known = (scores["metric"] == "continuation_nll") & (scores["kind"] == "target")
    known = scores[is_known & (scores["checkpoint"] == checkpoint)]
    lowest = known.groupby("unit", observed=True)["value"].min()
    rows, number = [], len(lowest)
    for num_samples, probability in pairs if number else []:
        found = int((extraction_probability(lowest, num_samples) >= probability).sum())
        rows.append((num_samples, probability, found, number, found / number, binomial_upper_bound(found, number)))
    return pd.DataFrame(rows, columns=["num_samples", "probability", "found", "number", "share", "upper"])
