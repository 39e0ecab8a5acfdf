"""Every code block of docs/convex.md runs, in order, as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "convex.md"


def test_code_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf8"), flags=re.DOTALL)
    assert len(blocks) >= 5
    space: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), space)
    model = space["model"]
    assert model.score(space["frame"], space["y"]) > 0.85  # type: ignore[attr-defined]
    assert space["again"].n_rows_ == 4000  # type: ignore[attr-defined]


def test_the_table_names_every_solver() -> None:
    from noshuffle.convex import solvers

    text = PAGE.read_text(encoding="utf8")
    files = set(solvers.__all__) - {"Solution"}
    files -= {"phased_sgd", "phased_mirror_descent"}
    missing = sorted(name for name in files | {"phased"} if f"`{name}`" not in text)
    assert missing == []
