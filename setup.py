"""A wheel holds the C libraries of `noshuffle/native` where a compiler is present when it is built.

Everything else of the build is in pyproject.toml. Without a compiler the wheel is pure Python, and
libraries are built at first use where there is one then (`noshuffle/c_library.py`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


def ship(folder: Path) -> int:
    """`noshuffle.c_library.ship`, from the file itself: the package may lack what it needs here."""
    source = Path(__file__).parent / "src" / "noshuffle" / "c_library.py"
    spec = importlib.util.spec_from_file_location("c_library", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ship(folder)


class BuildWithLoops(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            made = ship(Path(self.build_lib) / "noshuffle" / "native" / "built")
            self.announce(f"{made} C libraries built in", level=2)


class WheelOfThisProcessor(bdist_wheel):
    """py3-none-PLATFORM where libraries are inside, py3-none-any where they are not."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = False
        _, _, platform = super().get_tag()
        has_loops = any(Path("build").glob("**/native/built/*.so"))
        return "py3", "none", platform if has_loops else "any"


setup(cmdclass={"build_py": BuildWithLoops, "bdist_wheel": WheelOfThisProcessor})
