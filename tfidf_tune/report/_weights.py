"""What TF-IDF does to a text: sentences, tables, a plot and colored tokens."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfidf_tune.analysis._token_weights import WEIGHTS
from tfidf_tune.analysis._weight_statistics import (
    CONTINUATION,
    START,
    frequency_bands,
    part_statistics,
    split_statistics,
    token_statistics,
)
from tfidf_tune.report._document import Figure, Report, Table
from tfidf_tune.report._shown_tokens import ShownToken, readable, tokens_section
from tfidf_tune.report._weight_figures import bands_figure, tokens_figure
from tfidf_tune.report._write import write_report
from tfidf_tune.weighting import TermFrequency

if TYPE_CHECKING:
    import pandas as pd

_TF_WORDS = {"count": "raw counts", "log": "1 + ln count", "binary": "idf alone"}
_NUM_RANKED = 20
_NEUTRAL = 0.02  # a smaller relative change of the share counts as none


# Columns of numbers and their formats.
_IDF = {"mean idf": ".2f"}
_WEIGHTS = dict.fromkeys(WEIGHTS.values(), ".2f")
_SHARES = dict.fromkeys(("% of tokens", *(f"% of weight, {form}" for form in WEIGHTS)), ".1f")
_BANDS = dict.fromkeys((f"{average}, {form}" for average in ("mean", "median") for form in WEIGHTS), ".2f")
_TOKENS = {**dict.fromkeys(("token", "id", "count", "blocks"), ""), "mean tf": ".2f", **_IDF, **_WEIGHTS}
_PARTS = {"token": "", "% of tokens": ".1f", **_IDF, **_WEIGHTS}
_SPLITS = {"tokens of the word": "", "words": "", "idf, tokens": ".2f", "idf, word": ".2f", **_WEIGHTS}
_BAND_NOTE = (
    "Rank 1 is the most frequent token of this text. A share of the weight above the share of tokens: these tokens "
    "count more than under plain cross-entropy."
)
_SPLIT_NOTE = (
    "idf, tokens: mean over the word's tokens. idf, word: what the word would have if it were one token. A word is a "
    "run of letters and digits; words at the ends of a block are left out."
)
_PLOT_CAPTION = (
    "Above: the share of the tokens that each band holds, which is its share of a plain cross-entropy, and its share "
    "of the weight. Below: the mean weight of its tokens, in the same colors; the dashed line is plain cross-entropy."
)


def weights_report(
    tokens: "pd.DataFrame",
    texts: Mapping[int, str],
    form: TermFrequency,
    *,
    num_batches: int,
    min_count: int,
    provenance: Mapping[str, str],
) -> tuple[Report, Table]:
    """Make the report of a text, and a table of every token for a file.

    ``tokens`` are those of :func:`~tfidf_tune.analysis._weight_statistics.mark_words`, ``texts`` by token id; tokens
    that occur less often than ``min_count`` are not ranked.
    """
    labels = tokens[tokens["tf"] > 0]
    bands, parts, splits = frequency_bands(labels), part_statistics(labels), split_statistics(labels)
    statistics = token_statistics(labels)
    statistics["token"] = [readable(texts[token], mark_spaces=True) for token in statistics["id"]]
    weight, note = WEIGHTS[form], f"By mean weight under tf={form}, of tokens that occur {min_count} times or more."
    frequent = statistics[statistics["count"] >= min_count]
    up = frequent[frequent[weight] > 1].sort_values(weight, ascending=False, kind="stable")[:_NUM_RANKED]
    down = frequent[frequent[weight] < 1].sort_values(weight, kind="stable")[:_NUM_RANKED]
    rank = {"frequency rank": ""}
    tables = (
        _table("frequency_bands", "Share of the weight by token frequency", bands, rank | _SHARES, (_BAND_NOTE,)),
        _table("frequency_band_weights", "Weight of a token, by frequency in this text", bands, rank | _BANDS),
        _table("most_up_weighted", "Most up-weighted tokens", up, _TOKENS, (note,)),
        _table("most_down_weighted", "Most down-weighted tokens", down, _TOKENS, (note,)),
        _table("word_parts", "Tokens that start a word and tokens that continue one", parts, _PARTS),
        _table("split_words", "Words by their number of tokens", splits, _SPLITS, (_SPLIT_NOTE,)),
    )
    report = Report(
        "Token weights under TF-IDF",
        findings(form, bands, parts, splits),
        tables,
        [Figure("frequency_bands", "The weight by token frequency", bands_figure(bands), _PLOT_CAPTION)],
        provenance={**provenance, **_method(tokens, len(labels), num_batches)},
    )
    return report, _table("tokens", "All tokens", statistics, _TOKENS)


def _table(
    name: str, title: str, frame: "pd.DataFrame", formats: Mapping[str, str], notes: Sequence[str] = ()
) -> Table:
    return Table(name, title, frame[list(formats)], notes, formats)


def write_weights(
    report: Report, all_tokens: Table, blocks: Sequence[Sequence[ShownToken]], form: TermFrequency, folder: Path
) -> None:
    """Write the files of :func:`write_report`, with colored tokens, ``tokens.png`` and ``tables/tokens.csv``.

    Raises:
        ValueError: If the folder holds files but no report.
    """
    more: dict[str, Callable[[Path], object]] = {
        f"tables/{all_tokens.name}.csv": lambda path: path.write_text(all_tokens.csv(), encoding="utf-8", newline=""),
        "tokens.png": tokens_figure(blocks, form).savefig,
    }
    write_report(report, folder, more=more, **tokens_section(blocks, form))


def findings(
    form: TermFrequency, bands: "pd.DataFrame", parts: "pd.DataFrame", splits: "pd.DataFrame"
) -> tuple[str, ...]:
    """State what was found, for the chosen TF form first; data frames as of ``analysis._weight_statistics``."""
    first = bands.iloc[0]
    sentences = []
    for each in (form, *(other for other in WEIGHTS if other != form)):
        tokens, weight = first["% of tokens"], first[f"% of weight, {each}"]
        effect = (
            "lift" if weight / tokens > 1 + _NEUTRAL else "lower" if weight / tokens < 1 - _NEUTRAL else "hardly change"
        )
        sentences.append(
            f"With tf={each}, the {first['frequency rank'].split()[-1]} most frequent tokens hold {tokens:.1f} % of "
            f"the tokens and {weight:.1f} % of the weight: {_TF_WORDS[each]} {effect}{'' if each == 'count' else 's'} "
            "frequent tokens here."
        )
    of_parts = dict(zip(parts["token"], parts[WEIGHTS[form]], strict=True))
    if {START, CONTINUATION} <= of_parts.keys():
        sentences.append(
            f"Tokens that start a word weigh {of_parts[START]:.2f} on average, tokens that continue one "
            f"{of_parts[CONTINUATION]:.2f} (tf={form})."
        )
    if {1, 2} <= set(splits.index):
        uncut, split = splits.loc[1], splits.loc[2]
        is_hidden = split["idf, word"] > split["idf, tokens"]
        effect = "the split hides that they are rare" if is_hidden else "the split does not hide how rare they are"
        sentences.append(
            f"Words of two tokens would have a mean idf of {split['idf, word']:.2f} if they were one token; their "
            f"tokens have {split['idf, tokens']:.2f}: {effect}. These tokens weigh {split[WEIGHTS[form]]:.2f} on "
            f"average, words of one token {uncut[WEIGHTS[form]]:.2f} (tf={form})."
        )
    return tuple(sentences)


def _method(tokens: "pd.DataFrame", num_labels: int, num_batches: int) -> dict[str, str]:
    num_steps, largest = int(tokens["step"].max()), int(tokens["documents"].max())
    window = f"{largest} blocks; full from mini-batch {num_batches} of {num_steps} on"
    if num_steps < num_batches:
        filled = f"{num_steps} of {num_batches} mini-batches, {largest} blocks"
        window = f"never full: {filled}; idf spreads further with more text"
    statistics = (
        f"over {tokens['block'].nunique()} blocks, {num_labels} label tokens, each with the weight of its own step; "
        "the first token of a block is never a label"
    )
    return {"window": window, "statistics": statistics}
