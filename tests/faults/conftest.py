"""What tables of bad input and broken runs share."""

from pathlib import Path

import pytest
from refusals import Site


@pytest.fixture
def site(tmp_path: Path, tiny_checkpoint: Path, text_file: Path) -> Site:
    """Where a row runs."""
    return Site(tmp_path / "row", tiny_checkpoint, text_file)


@pytest.fixture(scope="session")
def inputs(tiny_checkpoint: Path, text_file: Path) -> tuple[Path, Path]:
    """The checkpoint and the documents that all jobs share."""
    return tiny_checkpoint, text_file
