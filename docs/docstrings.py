"""Docstrings for the reference: doctests become code, so that markdown leaves them alone."""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """The text with every doctest, up to the next empty line, as a block of code."""
    out: list[str] = []
    is_inside = False
    for line in [*text.split("\n"), ""]:
        if line.startswith(">>> ") and not is_inside:
            out += ["", "```pycon"]
            is_inside = True
        elif is_inside and not line.strip():
            out.append("```")
            is_inside = False
        out.append(line)
    return "\n".join(out[:-1])


class Doctests(griffe.Extension):
    """Fences the doctests of everything that is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
