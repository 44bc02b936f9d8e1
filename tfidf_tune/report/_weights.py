"""What TF-IDF does to a text: sentences, tables, a plot and colored tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tfidf_tune.analysis._token_weights import TERM_FREQUENCIES, TermFrequency, WeightedBlocks
from tfidf_tune.analysis._weight_statistics import (
    CONTINUATION,
    START,
    WEIGHTS,
    frequency_bands,
    most_weighted,
    part_statistics,
    position_table,
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
    ShownBlock,
    ShownToken,
    level_of,
    lines_of,
    on_white,
    readable,
    shown_block,
    weight_of,
)
from tfidf_tune.report._weight_figures import bands_figure, tokens_figure
from tfidf_tune.report._write import write_report

if TYPE_CHECKING:
    import pandas as pd

_TF_WORDS = {"count": "raw counts", "log": "1 + ln count", "binary": "idf alone"}
_WEIGHT_COLUMNS = tuple(Column(name, ".2f") for name in WEIGHTS.values())
_NEUTRAL = 0.02  # a change of share by less than 2 % is called none
_SHOWN_NUMBER = 2.0  # without colors, weights from here on are printed behind their token


@dataclass(frozen=True)
class WeightsReport:
    """All that is shown about the weights of a text.

    Args:
        form (TermFrequency): the TF form of colors and rankings.
        report (Report): findings, tables, the plot, settings.
        blocks (tuple[ShownBlock, ...]): blocks whose tokens are shown.
        tokens (Table): every token of the text, for a file.
    """

    form: TermFrequency
    report: Report
    blocks: tuple[ShownBlock, ...]
    tokens: Table


def weights_report(
    weighted: WeightedBlocks,
    texts: Mapping[int, str],
    decode: Callable[[list[int]], str],
    form: TermFrequency,
    rows: Sequence[int],
    *,
    min_count: int = 10,
    num_tokens: int = 20,
    provenance: Sequence[tuple[str, str]] = (),
) -> WeightsReport:
    """Make the report of a text.

    Args:
        weighted (WeightedBlocks): the weighted blocks.
        texts (Mapping[int, str]): token id -> text, see :func:`token_texts`.
        decode (Callable[[list[int]], str]): token ids -> text.
        form (TermFrequency): the TF form of colors and rankings.
        rows (Sequence[int]): which of the weighted blocks to show.
        min_count (int): tokens that occur less often are not ranked. Default: 10
        num_tokens (int): tokens in each ranking. Default: 20
        provenance (Sequence[tuple[str, str]]): names and values to show. Default: none
    """
    positions = position_table(weighted)
    statistics, bands = token_statistics(positions), frequency_bands(positions)
    statistics.insert(0, "token", [readable(texts[token], mark_spaces=True) for token in statistics["id"]])
    parts, splits = part_statistics(weighted, positions, texts), split_statistics(weighted, positions, texts)
    note = f"By mean weight under tf={form}, of tokens that occur {min_count} times or more."
    rankings = [
        tabulate(
            f"most_{name}_weighted",
            f"Most {name}-weighted tokens",
            _TOKEN_COLUMNS,
            most_weighted(statistics, form, min_count=min_count, limit=num_tokens, up=name == "up"),
            (note,),
        )
        for name in ("up", "down")
    ]
    caption = (
        "Above: the share of the tokens that each band holds, which is its share of a plain cross-entropy, and its "
        "share of the weight. Below: the mean weight of its tokens, in the same colors; the dashed line is plain "
        "cross-entropy."
    )
    plot = Figure("frequency_bands", "The weight by token frequency", bands_figure(bands), caption)
    report = Report(
        title="Token weights under TF-IDF",
        statements=findings(form, bands, parts, splits),
        tables=(*_band_tables(bands), *rankings, *_word_tables(parts, splits)),
        figures=(plot,),
        examples=(),
        provenance=(*provenance, *_method(weighted)),
    )
    blocks = tuple(shown_block(weighted, row, texts, decode) for row in rows)
    return WeightsReport(form, report, blocks, tabulate("tokens", "All tokens", _TOKEN_COLUMNS, statistics))


def write_weights(weights: WeightsReport, folder: Path) -> None:
    """Write the files of :func:`write_report`, with colored tokens, ``tokens.png`` and ``tables/tokens.csv``.

    Raises:
        ValueError: If the folder holds files but no report.
    """
    more: dict[str, Callable[[Path], object]] = {
        f"tables/{weights.tokens.name}.csv": partial(write_csv, weights.tokens),
        "tokens.png": tokens_figure(weights.blocks, weights.form).savefig,
    }
    write_report(weights.report, folder, more=more, **tokens_section(weights))


def tokens_section(weights: WeightsReport) -> dict[str, Any]:
    """Return what :func:`html_page` needs for colored tokens whose numbers are shown on pointing, touch and focus."""
    return {
        "section": "tokens",
        "blocks": weights.blocks,
        "form": weights.form,
        "forms": TERM_FREQUENCIES,
        "readable": readable,
        "class_of": _class_of,
        "details": _details,
        "legend": [(f"{weight_of(level):.2g}", _level_class(level)) for level in LEVELS],
        "colors": {
            _level_class(level): (
                UP_COLOR if level > 0 else DOWN_COLOR,
                round(100 * STRONGEST_SHARE * abs(level) / MAX_LEVEL),
                max(0, level - UNDERLINED_LEVEL + 1),
            )
            for level in LEVELS
            if level
        },
    }


def print_block(block: ShownBlock, form: TermFrequency, console: Console) -> None:
    """Print the tokens of a block on the colors of their weights; without colors, high weights as numbers."""
    colored = console.color_system is not None and not console.no_color
    shown = [readable(token.text) for token in block.tokens]
    text = Text(
        f"Block {block.index}, mini-batch {block.step}, {block.num_documents} blocks in the window, tf={form}\n\n"
    )
    if not colored:
        shown = [
            f"{part}({token.weights[form]:.2f})" if token.weights and token.weights[form] >= _SHOWN_NUMBER else part
            for part, token in zip(shown, block.tokens, strict=True)
        ]
    for line in lines_of(block.tokens, shown, console.width):
        for part, token in line:
            text.append(part, _style(level_of(token.weights[form])) if token.weights and colored else None)
        text.append("\n")
    if colored:
        text.append("\nweight: ")
        for level in LEVELS:
            text.append(f" {weight_of(level):.2g} ", _style(level)).append(" ")
        text.append("and more\n")
    else:
        text.append(f"\n(in parentheses: weights of {_SHOWN_NUMBER:g} and more; the mean is 1)\n")
    console.print(text, soft_wrap=True)


def _style(level: int) -> Style | None:
    """Black on the level's color, or the terminal's own colors for a weight of about 1."""
    if level == 0:
        return None
    return Style(color="black", bgcolor=Color.from_rgb(*on_white(level)), underline=level >= UNDERLINED_LEVEL)


def _level_class(level: int) -> str:
    return f"up{level}" if level > 0 else f"down{-level}" if level < 0 else "even"


def _class_of(token: ShownToken, form: TermFrequency) -> str:
    return _level_class(level_of(token.weights[form])) if token.weights else "unweighted"


def _details(token: ShownToken, block: ShownBlock) -> str:
    name = f"“{readable(token.text, mark_spaces=True)}” (id {token.token_id})"
    if not token.weights:
        return f"{name}: first of its block, never a label, no weight"
    weights = ", ".join(f"{weight:.2f} ({form})" for form, weight in token.weights.items())
    return (
        f"{name}: {token.count} in this block, in {token.document_frequency} of {block.num_documents} blocks, "
        f"idf {token.idf:.2f}; weight {weights}"
    )


_TOKEN_COLUMNS = (
    *(Column("token"), Column("id"), Column("count"), Column("blocks"), Column("mean tf", ".2f")),
    *(Column("mean idf", ".2f"), *_WEIGHT_COLUMNS),
)


def _band_tables(bands: "pd.DataFrame") -> tuple[Table, Table]:
    rank = Column("frequency rank")
    note = (
        "Rank 1 is the most frequent token of this text. A share of the weight above the share of tokens: these tokens "
        "count more than under plain cross-entropy."
    )
    shares = (rank, Column("% of tokens", ".1f"), *(Column(f"% of weight, {form}", ".1f") for form in TERM_FREQUENCIES))
    weights = (rank, *(Column(f"{mean}, {form}", ".2f") for mean in ("mean", "median") for form in TERM_FREQUENCIES))
    return (
        tabulate("frequency_bands", "Who holds the weight, by frequency in this text", shares, bands, (note,)),
        tabulate("frequency_band_weights", "Weight of a token, by frequency in this text", weights, bands),
    )


def _word_tables(parts: "pd.DataFrame", splits: "pd.DataFrame") -> tuple[Table, Table]:
    of_parts = (Column("token"), Column("% of tokens", ".1f"), Column("mean idf", ".2f"), *_WEIGHT_COLUMNS)
    idf = (Column("idf, tokens", ".2f"), Column("idf, word", ".2f"))
    of_splits = (Column("tokens of the word"), Column("words"), *idf, *_WEIGHT_COLUMNS)
    note = (
        "idf, tokens: mean over the word's tokens. idf, word: what the word would have if it were one token. A word is "
        "a run of letters and digits; words at the ends of a block are left out."
    )
    return (
        tabulate("word_parts", "Tokens that start a word and tokens that continue one", of_parts, parts),
        tabulate("split_words", "Words by their number of tokens", of_splits, splits, (note,)),
    )


def findings(
    form: TermFrequency, bands: "pd.DataFrame", parts: "pd.DataFrame", splits: "pd.DataFrame"
) -> tuple[str, ...]:
    """Say in words what was found, for the chosen TF form first; frames as in ``analysis._weight_statistics``."""
    forms = (form, *(other for other in TERM_FREQUENCIES if other != form))
    return (
        *(_band_sentence(bands.iloc[0], each) for each in forms),
        *_part_sentence(parts, form),
        *_split_sentence(splits, form),
    )


def _band_sentence(band: "pd.Series", form: TermFrequency) -> str:
    tokens, weight = band["% of tokens"], band[f"% of weight, {form}"]
    ratio = weight / tokens
    effect = "lift" if ratio > 1 + _NEUTRAL else "lower" if ratio < 1 - _NEUTRAL else "hardly change"
    verb = effect if form == "count" else f"{effect}s"
    last = band["frequency rank"].split()[-1]
    return (
        f"With tf={form}, the {last} most frequent tokens hold {tokens:.1f} % of the tokens and {weight:.1f} % of the "
        f"weight: {_TF_WORDS[form]} {verb} frequent tokens here."
    )


def _part_sentence(parts: "pd.DataFrame", form: TermFrequency) -> tuple[str, ...]:
    weights = dict(zip(parts["token"], parts[WEIGHTS[form]], strict=True))
    if not {START, CONTINUATION} <= weights.keys():
        return ()
    return (
        f"Tokens that start a word weigh {weights[START]:.2f} on average, tokens that continue one "
        f"{weights[CONTINUATION]:.2f} (tf={form}).",
    )


def _split_sentence(splits: "pd.DataFrame", form: TermFrequency) -> tuple[str, ...]:
    if not {1, 2} <= set(splits.index):
        return ()
    whole, split = splits.loc[1], splits.loc[2]
    rare = split["idf, word"] > split["idf, tokens"]
    effect = "the split hides that they are rare" if rare else "the split does not hide how rare they are"
    return (
        f"Words of two tokens would have a mean idf of {split['idf, word']:.2f} if they were one token; their tokens "
        f"have {split['idf, tokens']:.2f}: {effect}. These tokens weigh {split[WEIGHTS[form]]:.2f} on average, words "
        f"of one token {whole[WEIGHTS[form]]:.2f} (tf={form}).",
    )


def _method(weighted: WeightedBlocks) -> tuple[tuple[str, str], ...]:
    num_steps, largest = int(weighted.steps.max()), int(weighted.num_documents.max())
    if num_steps < weighted.num_batches:
        window = (
            f"never full: {num_steps} of {weighted.num_batches} mini-batches, {largest} blocks; idf spreads further "
            "with more text"
        )
    else:
        window = f"{largest} blocks; full from mini-batch {weighted.num_batches} of {num_steps} on"
    return (
        ("window", window),
        (
            "statistics",
            f"over {len(weighted.blocks)} blocks, {weighted.labels.size} label tokens, each with the weight of its own "
            "step; the first token of a block is never a label",
        ),
    )
