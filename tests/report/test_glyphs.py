"""Names of columns and classes in any script: no box in a page, and not a warning for each."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from noshuffle.errors import ProbablyNotMeant
from noshuffle.report import glyphs
from noshuffle.report.fit import _coefficients
from noshuffle.report.plots import save_picture

MODEL: dict[str, Any] = {
    "coef": [[0.1, -0.2], [0.3, 0.1], [0.0, 0.2]],
    "columns": ["年龄", "income"],
    "classes": ["はい", "いいえ", "other"],
}


@pytest.fixture
def no_font(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glyphs, "_family_with", lambda _: None)


@pytest.mark.usefixtures("no_font")
def test_names_stay_text_in_a_page_where_no_font_has_them() -> None:
    before = matplotlib.rcParams["svg.fonttype"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = _coefficients(MODEL, None)
    for name in ("年龄", "いいえ", "income", "other"):
        assert f">{name}</text>" in page
    assert matplotlib.rcParams["svg.fonttype"] == before


@pytest.mark.usefixtures("no_font")
def test_a_long_name_has_room_to_the_left() -> None:
    name = "年龄" * 14
    page = _coefficients({**MODEL, "columns": [name, "income"]}, None)
    (end,) = re.findall(rf'text-anchor: end" x="([0-9.]+)"[^>]*>{name}<', page)
    assert float(end) >= 28 * 8  # so many characters of eight points


def test_other_names_are_drawn_as_before() -> None:
    model = {**MODEL, "columns": ["Größe", "ε"], "classes": ["a", "b", "c"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "<text" not in _coefficients(model, None)


@pytest.mark.usefixtures("no_font")
def test_a_picture_of_points_warns_once_and_says_what_helps(tmp_path: Path) -> None:
    with pytest.warns(ProbablyNotMeant, match=r"no installed font has 年龄.*\.svg") as told:
        save_picture(lambda axes: axes.set_title("年龄") and None, tmp_path / "a.png")
    assert len(told) == 1
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_an_installed_font_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: what the usual font has, another one has not."""
    usual = glyphs.lacking("ж") == ""
    monkeypatch.setattr(glyphs, "lacking", lambda text: "ж" if "ж" in text else "")
    assert usual
    assert glyphs._family_with("ж") is not None
    families: list[list[str]] = []
    with matplotlib.rc_context():
        from matplotlib import pyplot

        figure, axes = pyplot.subplots()
        title = axes.set_title("ж")
        with glyphs.every_glyph(figure, is_svg=True):
            families.append(title.get_fontfamily())
        pyplot.close(figure)
    assert families[0][-1] == glyphs._family_with("ж")
    assert len(families[0]) == 2
