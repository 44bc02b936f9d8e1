"""Hook of mkdocs: links to files outside of ``docs/``, which the site does not have, become the
path of the file.
"""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"!?\[[^\]]*\]\(([^):#]+)(#[^)]*)?\)")
_DOCS = Path(__file__).parent


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to folders and to files outside of ``docs/``; mkdocs checks the others.

    Raises:
        FileNotFoundError: If there is no such file in the repository.
    """
    folder = (_DOCS / page.file.src_uri).parent

    def replace(match: "re.Match[str]") -> str:
        target = (folder / match[1]).resolve()
        if target.is_relative_to(_DOCS) and not target.is_dir():
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: the link {match[1]} leads to no file")
        return f"`{target.relative_to(_DOCS.parent).as_posix()}`"

    return _LINK.sub(replace, markdown)
