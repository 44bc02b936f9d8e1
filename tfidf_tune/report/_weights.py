"""What TF-IDF does to a text: sentences, tables, a plot and colored tokens."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis._token_weights import WEIGHTS
from tfidf_tune.analysis._weight_statistics import (
    CONTINUATION,
    START,
    frequency_bands,
    part_statistics,
    split_statistics,
    token_statistics,
)
from tfidf_tune.report._document import Column, Figure, Report, Table, tabulate, write_csv
from tfidf_tune.report._shown_tokens import (
    DOWN_COLOR,
    LEVELS,
    MAX_LEVEL,
    STRONGEST_SHARE,
    UNDERLINED_LEVEL,
    UP_COLOR,
    ShownToken,
    heading,
    level_of,
    readable,
    weight_of,
)
from tfidf_tune.report._weight_figures import bands_figure, tokens_figure
from tfidf_tune.report._write import write_report
from tfidf_tune.weighting import TermFrequency

if TYPE_CHECKING:
    import pandas as pd

_TF_WORDS = {"count": "raw counts", "log": "1 + ln count", "binary": "idf alone"}
_NEUTRAL = 0.02  # a smaller relative change of the share counts as none


def _numbers(*names: str, decimals: int = 2) -> tuple[Column, ...]:
    return tuple(Column(name, f".{decimals}f") for name in names)


_WEIGHT_COLUMNS = _numbers(*WEIGHTS.values())
_TOKEN_COLUMNS = (*map(Column, ("token", "id", "count", "blocks")), *_numbers("mean tf", "mean idf"), *_WEIGHT_COLUMNS)
_SHARE_COLUMNS = _numbers("% of tokens", *(f"% of weight, {form}" for form in WEIGHTS), decimals=1)
_BAND_COLUMNS = _numbers(*(f"{average}, {form}" for average in ("mean", "median") for form in WEIGHTS))
_PART_COLUMNS = (Column("token"), *_numbers("% of tokens", decimals=1), *_numbers("mean idf"), *_WEIGHT_COLUMNS)
_SPLIT_COLUMNS = (Column("tokens of the word"), Column("words"), *_numbers("idf, tokens", "idf, word"))
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
    min_count: int = 10,
    num_ranked: int = 20,
    provenance: Sequence[tuple[str, str]] = (),
) -> tuple[Report, Table]:
    """Make the report of a text.

    Args:
        tokens (pandas.DataFrame): all tokens, see :func:`~tfidf_tune.analysis._weight_statistics.mark_words`.
        texts (Mapping[int, str]): token id -> text.
        form (TermFrequency): the TF form of colors and rankings.
        num_batches (int): mini-batches in the window.
        min_count (int): tokens that occur less often are not ranked. Default: 10
        num_ranked (int): tokens in each ranking. Default: 20
        provenance (Sequence[tuple[str, str]]): names and values to show. Default: none

    Returns:
        tuple[Report, Table]: the report, and a table of every token for a file.
    """
    labels = tokens[tokens["tf"] > 0]
    bands, parts, splits = frequency_bands(labels), part_statistics(labels), split_statistics(labels)
    statistics = token_statistics(labels)
    statistics["token"] = [readable(texts[token], mark_spaces=True) for token in statistics["id"]]
    weight, note = WEIGHTS[form], f"By mean weight under tf={form}, of tokens that occur {min_count} times or more."
    frequent = statistics[statistics["count"] >= min_count]
    up = frequent[frequent[weight] > 1].sort_values(weight, ascending=False, kind="stable")[:num_ranked]
    down = frequent[frequent[weight] < 1].sort_values(weight, kind="stable")[:num_ranked]
    rank = Column("frequency rank")
    tables = (
        tabulate(
            "frequency_bands",
            "Share of the weight by token frequency",
            (rank, *_SHARE_COLUMNS),
            bands,
            (_BAND_NOTE,),
        ),
        tabulate(
            "frequency_band_weights", "Weight of a token, by frequency in this text", (rank, *_BAND_COLUMNS), bands
        ),
        tabulate("most_up_weighted", "Most up-weighted tokens", _TOKEN_COLUMNS, up, (note,)),
        tabulate("most_down_weighted", "Most down-weighted tokens", _TOKEN_COLUMNS, down, (note,)),
        tabulate("word_parts", "Tokens that start a word and tokens that continue one", _PART_COLUMNS, parts),
        tabulate(
            "split_words",
            "Words by their number of tokens",
            (*_SPLIT_COLUMNS, *_WEIGHT_COLUMNS),
            splits,
            (_SPLIT_NOTE,),
        ),
    )
    report = Report(
        title="Token weights under TF-IDF",
        statements=findings(form, bands, parts, splits),
        tables=tables,
        figures=(Figure("frequency_bands", "The weight by token frequency", bands_figure(bands), _PLOT_CAPTION),),
        examples=(),
        provenance=(*provenance, *_method(tokens, len(labels), num_batches)),
    )
    return report, tabulate("tokens", "All tokens", _TOKEN_COLUMNS, statistics)


def write_weights(
    report: Report, all_tokens: Table, blocks: Sequence[Sequence[ShownToken]], form: TermFrequency, folder: Path
) -> None:
    """Write the files of :func:`write_report`, with colored tokens, ``tokens.png`` and ``tables/tokens.csv``.

    Raises:
        ValueError: If the folder holds files but no report.
    """
    more: dict[str, Callable[[Path], object]] = {
        f"tables/{all_tokens.name}.csv": partial(write_csv, all_tokens),
        "tokens.png": tokens_figure(blocks, form).savefig,
    }
    write_report(report, folder, more=more, **tokens_section(blocks, form))


def tokens_section(blocks: Sequence[Sequence[ShownToken]], form: TermFrequency) -> dict[str, Any]:
    """Return what :func:`html_page` needs for colored tokens whose numbers are shown on pointing, touch and focus."""
    return {
        "section": "tokens",
        "blocks": [
            (heading(tokens), [(token, _details(token), _classes(token)) for token in tokens]) for tokens in blocks
        ],
        "form": form,
        "forms": [*WEIGHTS],
        "readable": readable,
        "legend": [(f"{weight_of(level):.2g}", _class_of(level)) for level in LEVELS],
        "colors": {
            _class_of(level): (
                UP_COLOR if level > 0 else DOWN_COLOR,
                round(100 * STRONGEST_SHARE * abs(level) / MAX_LEVEL),
                max(0, level - UNDERLINED_LEVEL + 1),
            )
            for level in LEVELS
            if level
        },
    }


def _classes(token: ShownToken) -> dict[str, str]:
    return {form: _class_of(level_of(token, form)) for form in WEIGHTS}


def _class_of(level: int | None) -> str:
    if level is None:
        return "unweighted"
    return f"up{level}" if level > 0 else f"down{-level}" if level < 0 else "even"


def _details(token: ShownToken) -> str:
    name = f"“{readable(token['text'], mark_spaces=True)}” (id {token['id']})"
    if not token["tf"]:
        return f"{name}: first of its block, never a label, no weight"
    weights = ", ".join(f"{token[column]:.2f} ({form})" for form, column in WEIGHTS.items())
    return (
        f"{name}: {token['tf']} in this block, in {token['df']} of {token['documents']} blocks, "
        f"idf {token['idf']:.2f}; weight {weights}"
    )


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


def _method(tokens: "pd.DataFrame", num_labels: int, num_batches: int) -> tuple[tuple[str, str], ...]:
    num_steps, largest = int(tokens["step"].max()), int(tokens["documents"].max())
    window = f"{largest} blocks; full from mini-batch {num_batches} of {num_steps} on"
    if num_steps < num_batches:
        filled = f"{num_steps} of {num_batches} mini-batches, {largest} blocks"
        window = f"never full: {filled}; idf spreads further with more text"
    statistics = (
        f"over {tokens['block'].nunique()} blocks, {num_labels} label tokens, each with the weight of its own step; "
        "the first token of a block is never a label"
    )
    return ("window", window), ("statistics", statistics)
