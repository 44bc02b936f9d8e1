"""What the tests of reports share: one browser for the session."""

from browser import browser_fixture  # noqa: F401
