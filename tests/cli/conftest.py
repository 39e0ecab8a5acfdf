"""What tests of commands share: pictures that cost nothing, unless a test asks for real ones."""

from __future__ import annotations

import pytest


@pytest.fixture
def pictures() -> None:
    """Real ones: for tests that look at a page, or draw it again."""


@pytest.fixture(autouse=True)
def quick_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of modules are drawn as they are (before this); others have empty pictures.

    What is drawn is looked at in tests/report; a picture takes 0.15 s, a page has five.
    """
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("noshuffle.report.plots.rendered", lambda draw: "<svg></svg>")
