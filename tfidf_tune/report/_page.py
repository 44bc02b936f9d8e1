"""The frame of every HTML page: our style and scripts inlined, nothing fetched from anywhere."""

import base64
import hashlib
import re

import jinja2
from markupsafe import Markup, escape

from tfidf_tune._printing import visible

_TOGETHER = re.compile(r"\S*-\S*(?: %)?|\S+ %")


def _inert(value: object) -> object:
    """Make text visible, whether it gets escaped after this or is Markup."""
    return type(value)(visible(value)) if isinstance(value, str) else value


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tfidf_tune.report"),
    autoescape=True,
    finalize=_inert,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""The templates; what they are given is text and gets escaped, unless it is Markup; control characters are shown."""


def _together(text: str) -> Markup:
    """Keep a short word with a hyphen (TF-IDF) and a number with its per cent sign on one line."""
    parts, end = [], 0
    for match in _TOGETHER.finditer(text):
        if len(match[0]) <= 20:
            parts += [escape(text[end : match.start()]), Markup('<span class="together">{}</span>').format(match[0])]
            end = match.end()
    return Markup("").join([*parts, text[end:]])


TEMPLATES.filters["together"] = _together


def page(title: str, body: str, *, script: str = "") -> str:
    """Make a page that is whole in one file: it works offline, on a phone, in the dark and on paper.

    Tables of class ``sortable`` get headers that sort. The page's policy lets a browser run no script but these two
    and load nothing from outside, so that a text that slipped through unescaped stays inert.

    Args:
        title (str): plain text, shown as the heading too.
        body (str): trusted HTML for ``<main>``, headings from ``<h2>`` on, colours by the variables at the top of
            ``templates/style.css``. ``<script>`` elements and ``on...`` attributes in it are blocked.
        script (str): trusted JavaScript, run when the body is there.

    Returns:
        str: the page.
    """
    scripts = [TEMPLATES.get_template("sort.js").render(), *([script] if script else [])]
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return TEMPLATES.get_template("page.html").render(
        title=title, body=Markup(body), scripts=[Markup(text) for text in scripts], policy=policy
    )


def _digest(text: str) -> str:
    """Give the SHA-256 of a script as a content security policy writes it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
