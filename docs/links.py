"""Hook of mkdocs: links that only the repository resolves become the path of the file."""

import re
from typing import Any

_OUTSIDE = re.compile(r"!?\[[^\]]*\]\((?:\.\./([^)]*)|([^):#]*/))\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside of ``docs/`` and to folders, which are not part of the site."""
    return _OUTSIDE.sub(lambda match: f"`{match[1] or 'docs/' + match[2]}`", markdown)
