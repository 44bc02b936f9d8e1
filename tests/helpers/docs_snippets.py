"""Code blocks of the documentation, which the tests run as they are printed."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def snippet(page: str, heading: str, language: str = "python", number: int = 0) -> str:
    """Return a fenced block of a language below a ``##`` heading of a page, by
    default the first.
    """
    sections = dict(
        re.findall(
            r"^## ([^\n]+)\n(.*?)(?=^## |\Z)",
            (DOCS / page).read_text(encoding="utf-8"),
            re.M | re.S,
        )
    )
    assert heading in sections, f"{page} has no section '{heading}', only {[*sections]}"
    found = re.findall(rf"^```{language}\n(.*?)^```", sections[heading], re.M | re.S)
    assert len(found) > number, (
        f"the section '{heading}' of {page} has {len(found)} blocks of {language}"
    )
    return found[number]
