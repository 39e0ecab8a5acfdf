"""Names in pictures that the font of matplotlib has no glyphs for: Chinese, Japanese, Korean, …

    an installed font has them           these texts are drawn with it
    none has, and the picture is an SVG  they stay text, which the reader's browser draws
    none has, otherwise                  boxes, and one warning that says what helps

matplotlib (3.9 to 3.11) looks into one font, draws a box for each other character, and warns of
every one of them, each time it measures or draws it. No state.

>>> lacking("age, ε"), lacking("年齢 age")
('', '年齢')
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from noshuffle.errors import ProbablyNotMeant
from noshuffle.user_warnings import warn_user

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_NO_FONT = (
    "no installed font has {found}, which are boxes in this picture; install one that has them "
    "(Noto Sans CJK), or have the picture as .svg"
)


def lacking(text: str) -> str:
    """The characters that the font of matplotlib has no glyph for, each once."""
    from matplotlib.font_manager import FontProperties, findfont

    return _not_in(findfont(FontProperties()), "".join(sorted(set(text))))


@lru_cache(maxsize=1024)
def _not_in(file: str, characters: str) -> str:
    from matplotlib.font_manager import get_font

    font = get_font(file)
    return "".join(c for c in characters if c.isprintable() and not font.get_char_index(ord(c)))


@lru_cache(maxsize=64)
def _family_with(characters: str) -> str | None:
    """An installed family that has all of them."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    for name in sorted({font.name for font in fontManager.ttflist}):
        try:
            if not _not_in(findfont(FontProperties(family=name)), characters):
                return str(name)
        except (OSError, RuntimeError, ValueError):  # a file that is no font, or a bitmap one
            continue
    return None


@contextmanager
def every_glyph(figure: Figure, *, is_svg: bool) -> Iterator[None]:
    """Around the writing of a picture whose texts are all there."""
    import matplotlib

    texts = [(text, found) for text in _texts(figure) if (found := lacking(text.get_text()))]
    if not texts:
        yield
        return
    found = "".join(sorted({c for _, own in texts for c in own}))
    family = _family_with(found)
    if family is not None:
        for text, _ in texts:
            text.set_fontfamily([*text.get_fontfamily(), family])
        yield
        return
    settings: Any = {"svg.fonttype": "none"} if is_svg else {}
    if not is_svg:
        warn_user(_NO_FONT.format(found=found), ProbablyNotMeant)
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        if is_svg:
            _leave_room(figure, texts)
        yield


def _texts(figure: Figure) -> list[Text]:
    """All texts; those of ticks are made when they are asked for."""
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.get_xticklabels(), axes.get_yticklabels()
    return [text for text in figure.findobj(Text) if isinstance(text, Text)]


def _leave_room(figure: Figure, texts: list[tuple[Text, str]]) -> None:
    """At both sides, for characters that will be wider than the boxes that they are measured by
    (matplotlib before 3.11)."""
    engine = figure.get_layout_engine()
    if engine is None:
        return
    probe = figure.text(0.0, 0.0, texts[0][1][0], fontsize=100)
    box = probe.get_window_extent().width * 72 / figure.dpi / 100
    probe.remove()
    sizes = [
        sum(c in own for c in text.get_text()) * float(text.get_fontsize()) for text, own in texts
    ]
    share = max(0.0, 1.0 - box) * max(sizes) / 72 / figure.get_figwidth()
    engine.set(rect=(share, 0.0, 1 - 2 * share, 1.0))  # type: ignore[call-arg]
