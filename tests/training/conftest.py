"""What several test files of training share."""

from collections.abc import Iterator

import pytest

from tfidf_tune import training


@pytest.fixture(scope="module")
def no_memory_plan() -> Iterator[None]:
    """Runs do not plan their memory, which takes longer than a few steps of a tiny model."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "check_resources", lambda *_: None)
        yield
