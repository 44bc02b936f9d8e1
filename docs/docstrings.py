"""Extension of griffe: shows the reStructuredText of our docstrings, roles and equations, on pages
in Markdown.
"""

import re
from typing import Any

from griffe import Extension, Object
from latex2mathml.converter import convert

_EQUATION = re.compile(r"^\.\. math::\n\n?((?:    .*(?:\n|$))+)", re.MULTILINE)
_INLINE_EQUATION = re.compile(r":math:`([^`]*)`")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=`)")


def _block(match: re.Match[str]) -> str:
    return f"\n<div>{convert(match[1], display='block')}</div>\n\n"


class ReStructuredText(Extension):
    """Turns equations into MathML, which browsers show without scripts, and roles into code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            text = _EQUATION.sub(_block, obj.docstring.value)
            text = _INLINE_EQUATION.sub(lambda match: convert(match[1]), text)
            obj.docstring.value = _ROLE.sub("", text).replace("`~tfidf_tune.", "`tfidf_tune.")
