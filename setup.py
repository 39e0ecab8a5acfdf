"""Builds the C loop of the noise beside the package, where there is a compiler.

In place for this processor by `pip install -e`, for any recent processor of its kind in a wheel.
Everything else of the build is in pyproject.toml. Without a compiler the package is pure Python.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path(__file__).parent / "src" / "noshuffle"


def c_library() -> Any:
    """`noshuffle.c_library`, from the file itself: the package may lack what it needs here."""
    spec = importlib.util.spec_from_file_location("c_library", PACKAGE / "c_library.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithLoop(build_py):
    def run(self) -> None:
        super().run()
        package = PACKAGE if self.editable_mode else Path(self.build_lib) / "noshuffle"
        built = c_library().build(package / "native" / "built", is_portable=not self.editable_mode)
        self.announce(f"C loop of the noise: {built or 'no compiler'}", level=2)


class WheelOfThisProcessor(bdist_wheel):
    """py3-none-PLATFORM where the library is inside, py3-none-any where it is not."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = False
        _, _, platform = super().get_tag()
        has_loop = any(Path("build").glob("**/native/built/*.so"))
        return "py3", "none", platform if has_loop else "any"


setup(cmdclass={"build_py": BuildWithLoop, "bdist_wheel": WheelOfThisProcessor})
