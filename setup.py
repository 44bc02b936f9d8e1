"""What pyproject.toml cannot state: the packages of three folders, and a README without relative
links.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

# A package index does not serve the other files of the repository: a link to one becomes its text.
_RELATIVE_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?://|#)[^)]*\)")

setup(
    packages=[
        *find_packages(include=["tfidf_tune", "tfidf_tune.*"]),
        "tfidf_tune.recipes",
        "tfidf_tune.configs",
    ],
    long_description=_RELATIVE_LINK.sub(r"\1", Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
