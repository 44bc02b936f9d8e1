"""Texts of the tests."""

import pytest


@pytest.fixture(scope="session")
def short_texts(text_file, tmp_path_factory):
    """Documents of one to three sentences, several of which fit into a packed row."""
    words = text_file.read_text().split(". ")
    file = tmp_path_factory.mktemp("short") / "texts.txt"
    lines = [". ".join(words[first : first + 1 + first % 3]) for first in range(0, 1200, 3)]
    file.write_text("\n".join(lines))
    return file
