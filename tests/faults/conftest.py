"""What tables of bad input and broken runs share."""

from pathlib import Path

import pytest
from helpers.processes.recipes import ALL
from helpers.refusals import SEEN, Site


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each fault and the message that it gives, for ``make faults``."""
    if ALL and SEEN:
        terminalreporter.section("messages")
        terminalreporter.write_line(
            "\n".join(f"{what}\n    {sentence}" for what, sentence in sorted(SEEN.items()))
        )


@pytest.fixture
def site(tmp_path: Path, tiny_checkpoint: Path, text_file: Path) -> Site:
    """Where a row runs."""
    return Site(tmp_path / "row", tiny_checkpoint, text_file)


@pytest.fixture(scope="session")
def inputs(tiny_checkpoint: Path, text_file: Path) -> tuple[Path, Path]:
    """The checkpoint and the documents that all jobs share."""
    return tiny_checkpoint, text_file
