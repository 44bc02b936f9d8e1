"""Token weights as one HTML page."""

from collections.abc import Sequence

from tfidf_tune.analysis import TERM_FREQUENCIES, TermFrequency
from tfidf_tune.report._document import Report
from tfidf_tune.report._html_figure import figure_html
from tfidf_tune.report._html_table import csv_uri, table_html
from tfidf_tune.report._page import TEMPLATES, page
from tfidf_tune.report._shown_tokens import (
    DOWN_COLOUR,
    LEVELS,
    MAX_LEVEL,
    STRONGEST_SHARE,
    UNDERLINED_LEVEL,
    UP_COLOUR,
    ShownBlock,
    ShownToken,
    level_of,
    readable,
    weight_of,
)


def weights_page(report: Report, blocks: Sequence[ShownBlock], form: TermFrequency) -> str:
    """Make a page of the whole report with the tokens of blocks coloured, for each TF form.

    A token that is pointed at, focused or touched tells its numbers; the arrow keys go from token to token.

    Args:
        report (Report): findings, tables, figures, settings.
        blocks (Sequence[ShownBlock]): the blocks to show.
        form (TermFrequency): the TF form that is shown first.

    Returns:
        str: the page, whole in one file.
    """
    body = TEMPLATES.get_template("token_weights.html").render(
        report=report,
        blocks=blocks,
        form=form,
        forms=TERM_FREQUENCIES,
        readable=readable,
        class_of=_class_of,
        details=_details,
        legend=[(f"{weight_of(level):.2g}", _level_class(level)) for level in LEVELS],
        colours={
            _level_class(level): (
                UP_COLOUR if level > 0 else DOWN_COLOUR,
                round(100 * STRONGEST_SHARE * abs(level) / MAX_LEVEL),
                max(0, level - UNDERLINED_LEVEL + 1),
            )
            for level in LEVELS
            if level
        },
        table_html=table_html,
        csv_uri=csv_uri,
        figure_html=figure_html,
    )
    return page(report.title, body, script=TEMPLATES.get_template("token_weights.js").render())


def _level_class(level: int) -> str:
    return f"up{level}" if level > 0 else f"down{-level}" if level < 0 else "even"


def _class_of(token: ShownToken, form: TermFrequency) -> str:
    return _level_class(level_of(token.weights[form])) if token.weights else "unweighted"


def _details(token: ShownToken, block: ShownBlock) -> str:
    """What is told of a token."""
    name = f"“{readable(token.text, mark_spaces=True)}” (id {token.token_id})"
    if not token.weights:
        return f"{name}: first of its block, never a label, no weight"
    weights = ", ".join(f"{weight:.2f} ({form})" for form, weight in token.weights.items())
    return (
        f"{name}: {token.count} in this block, in {token.document_frequency} of {block.num_documents} blocks, "
        f"idf {token.idf:.2f}; weight {weights}"
    )
