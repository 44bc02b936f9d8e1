"""What the tables of bad input share."""

from pathlib import Path

import pytest
from refusals import Site


@pytest.fixture
def site(tmp_path: Path, tiny_checkpoint: Path, text_file: Path) -> Site:
    """Where a row runs."""
    return Site(tmp_path / "row", tiny_checkpoint, text_file)
