"""A figure as HTML: drawn into the page, on the page's own ground."""

import base64
import io

import matplotlib
import matplotlib.figure
from markupsafe import Markup

from tfidf_tune.report._document import Figure
from tfidf_tune.report._page import TEMPLATES


def figure_html(figure: Figure) -> Markup:
    """Render a figure with its caption, in a container of its own that scrolls where there is too little room.

    Args:
        figure (Figure): the figure; ``figure-NAME`` is the id of its heading, which is not part of the result.

    Returns:
        Markup: the HTML; it needs the style of :func:`page`.
    """
    width, height = _size(figure.figure)
    return Markup(
        TEMPLATES.get_template("figure.html").render(
            figure=figure, uri=_svg_uri(figure.figure), width=width, height=height
        )
    )


def _size(figure: matplotlib.figure.Figure) -> tuple[int, int]:
    """Width and height in CSS pixels, 96 of which are an inch."""
    width, height = figure.get_size_inches()
    return round(96 * width), round(96 * height)


def _svg_uri(figure: matplotlib.figure.Figure) -> str:
    """Draw a figure as a data URI: as an image of its own, its ids cannot clash with another's."""
    buffer = io.BytesIO()
    # A fixed salt and no date: the same report makes the same page.
    with matplotlib.rc_context({"svg.hashsalt": "tfidf-tune"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
