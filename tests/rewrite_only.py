"""A plugin of pytest that compiles all test modules, imports none and runs nothing.

    python -m pytest --noconftest -p tests.rewrite_only

Every process of a run finds what was compiled. To collect instead would do the same, and take three
times as long: what the modules import takes longer than they do. The names with underscores are
those of pytest 9.2; where others changed them this fails, and every process compiles for itself.
"""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name.startswith("test_") or path.name == "conftest.py":
            folder = rewrite.get_cache_dir(path)
            rewrite.try_makedirs(folder)
            file = folder / (path.stem + rewrite.PYC_TAIL)
            if rewrite._read_pyc(path, file) is None:
                source, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, file)
        else:
            compileall.compile_file(path, quiet=2)
    compileall.compile_dir(ROOT / "src", quiet=2)
    return 0
