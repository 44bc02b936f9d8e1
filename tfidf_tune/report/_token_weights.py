"""What TF-IDF does to a text: sentences, tables, a plot and coloured tokens, as text and as files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tfidf_tune.analysis import (
    TermFrequency,
    WeightedBlocks,
    frequency_bands,
    most_weighted,
    part_statistics,
    split_statistics,
    token_statistics,
)
from tfidf_tune.report._document import Figure, Report, Table
from tfidf_tune.report._shown_tokens import ShownBlock, shown_block
from tfidf_tune.report._weight_figures import bands_figure, tokens_figure
from tfidf_tune.report._weight_page import weights_page
from tfidf_tune.report._weight_tables import band_tables, findings, token_table, word_tables
from tfidf_tune.report._write import write_csv, write_report


@dataclass(frozen=True)
class WeightsReport:
    """All that is shown about the weights of a text.

    Args:
        form (TermFrequency): the TF form that colours and rankings are for.
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
        texts (Mapping[int, str]): token id -> text, see :func:`tfidf_tune.analysis.token_texts`.
        decode (Callable[[list[int]], str]): token ids -> text.
        form (TermFrequency): the TF form that colours and rankings are for.
        rows (Sequence[int]): which of the weighted blocks to show.
        min_count (int): tokens that occur less often are not ranked. Default: 10
        num_tokens (int): tokens in each ranking. Default: 20
        provenance (Sequence[tuple[str, str]]): names and values to show. Default: none

    Returns:
        WeightsReport: the report.
    """
    statistics = token_statistics(weighted)
    bands = frequency_bands(weighted)
    parts, splits = part_statistics(weighted, texts), split_statistics(weighted, texts)

    def ranking(name: str, title: str, *, up: bool) -> Table:
        ranked = most_weighted(statistics, form, min_count=min_count, limit=num_tokens, up=up)
        note = f"By mean weight under tf={form}, of tokens that occur {min_count} times or more."
        return token_table(name, title, ranked, texts, (note,))

    shares, weights = band_tables(bands)
    report = Report(
        title="Token weights under TF-IDF",
        statements=findings(form, bands, parts, splits),
        tables=(
            shares,
            weights,
            ranking("most_up_weighted", "Most up-weighted tokens", up=True),
            ranking("most_down_weighted", "Most down-weighted tokens", up=False),
            *word_tables(parts, splits),
        ),
        figures=(
            Figure(
                "frequency_bands",
                "The weight by token frequency",
                bands_figure(bands),
                "Above: the share of the tokens that each band holds, which is its share of a plain cross-entropy, "
                "and its share of the weight. Below: the mean weight of its tokens, in the same colours; the "
                "dashed line is plain cross-entropy.",
            ),
        ),
        examples=(),
        provenance=(*provenance, *_how_it_was_done(weighted)),
    )
    return WeightsReport(
        form=form,
        report=report,
        blocks=tuple(shown_block(weighted, row, texts, decode) for row in rows),
        tokens=token_table("tokens", "All tokens", statistics, texts),
    )


def write_weights(weights: WeightsReport, folder: Path) -> None:
    """Write the files of :func:`~tfidf_tune.report.write_report`, ``tokens.png`` and ``tables/tokens.csv``.

    ``index.html`` shows the tokens as well.

    Args:
        weights (WeightsReport): the report.
        folder (Path): where to; it is made.

    Raises:
        ValueError: If the folder holds files but no report.
    """
    drawing = tokens_figure(weights.blocks, weights.form)
    html = weights_page(weights.report, weights.blocks, weights.form)
    more: dict[str, Callable[[Path], object]] = {
        f"tables/{weights.tokens.name}.csv": partial(write_csv, weights.tokens),
        "tokens.png": drawing.savefig,
        "index.html": lambda path: path.write_text(html, encoding="utf-8"),
    }
    write_report(weights.report, folder, more)


def _how_it_was_done(weighted: WeightedBlocks) -> tuple[tuple[str, str], ...]:
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
