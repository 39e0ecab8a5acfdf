"""A privacy bug as a patch: the text it replaces, and the tests that must notice.

    Mutant("noise has the scale of the plan", "half of it", "noise/stream.py", old, new, by)

A mutant is applied to a copy of `src/`, never to the checkout. `old` must stand exactly once in its
file, so that a mutant cannot outlive the line it is about without being seen (test_mutants.py).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One fault: the promise that it breaks, what it is, where it stands, which tests kill it.

    `by` are pytest node ids or files.
    """

    promise: str
    name: str
    file: str
    old: str
    new: str
    by: tuple[str, ...]

    def changed(self) -> str:
        """The file's text with the fault in it."""
        text = (ROOT / "src/noshuffle" / self.file).read_text()
        if text.count(self.old) != 1:
            raise LookupError(f"{self.name}: its text stands {text.count(self.old)} times")
        return text.replace(self.old, self.new)

    def copy_to(self, folder: Path) -> Path:
        """A copy of src/ with the fault in it; returns what goes into PYTHONPATH."""
        source = folder / "src"
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / "src", source, ignore=ignore)
        (source / "noshuffle" / self.file).write_text(self.changed())
        return source
