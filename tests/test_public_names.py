"""The root has few names, all of them listed, all of them there."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import noshuffle

ROOT = Path(__file__).parents[1]
#: Every way to a module of the mathematics, in a process that has imported none of them.
LATE = """
import sys
import noshuffle.accounting as accounting

names = accounting.__all__
assert "scipy" not in sys.modules
assert set(names) <= set(dir(accounting))
try:
    accounting.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError
from noshuffle.accounting import renyi
assert renyi is sys.modules["noshuffle.accounting.renyi"] is accounting.renyi
found = {}
exec("from noshuffle.accounting import *", found)
for name in names:
    assert found[name] is getattr(accounting, name) is sys.modules[f"noshuffle.accounting.{name}"]
"""


def test_all_is_what_is_there() -> None:
    for name in noshuffle.__all__:
        assert getattr(noshuffle, name) is not None
    assert set(noshuffle.__all__) == set(noshuffle._HOMES)
    assert len(noshuffle.__all__) <= 20


def test_unknown_names_are_refused() -> None:
    assert not hasattr(noshuffle, "no_such_name")


def test_dir_lists_public_names() -> None:
    assert set(noshuffle.__all__) <= set(dir(noshuffle))


def test_accounting_is_imported_on_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["fit", "epsilon", "positions"])
def test_types_of_a_plan_can_be_asked_for(name: str) -> None:
    assert "return" in typing.get_type_hints(getattr(noshuffle.Plan, name))


def has(path: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        try:
            for part in parts[end:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def test_names_that_texts_and_errors_give_are_there() -> None:
    """Whoever follows "pass ids= (noshuffle.training.with_ids)" finds it there."""
    texts = {path: path.read_text("utf8") for path in (ROOT / "docs").rglob("*.md")}
    texts[ROOT / "README.md"] = (ROOT / "README.md").read_text("utf8")
    for path in (ROOT / "src").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf8")))
        constants = (node.value for node in nodes if isinstance(node, ast.Constant))
        texts[path] = "\n".join(value for value in constants if isinstance(value, str))
    named = {
        (name.replace("ns.", "noshuffle.", 1) if name.startswith("ns.") else name, path.name)
        for path, text in texts.items()
        for name in re.findall(r"\b(?:noshuffle|ns)(?:\.[A-Za-z_]\w*)+", text)
    }
    assert len(named) > 100
    assert [(name, path) for name, path in sorted(named) if not has(name)] == []
