"""Imports point down the layers only and never in a circle; the mathematics never sees torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "noshuffle"

#: Layer of every part; a part may import strictly lower layers, and itself.
LAYERS = {
    "errors": 0,
    "version": 0,
    "rounding": 0,
    "lazy_names": 0,
    "user_warnings": 0,
    "one_owner": 0,
    "triton_shim": 0,
    "c_library": 0,
    "user_cache": 0,
    "participation": 0,
    "strategies": 1,
    "accounting": 1,
    "plan": 2,
    "theory": 2,
    "noise": 3,
    "clipping": 3,
    "optim": 3,
    "release": 4,
    "training": 5,
    "features": 5,
    "datasets": 5,
    "budget": 6,
    "federated": 6,
    "convex": 6,
    "auditing": 6,
    "report": 7,
    "integrations": 7,
    "experiments": 8,
    "cli": 9,
    "__init__": 9,
    "__main__": 10,
}
#: Parts of one layer that belong together; all others of a layer never import each other.
TOGETHER = ({"errors", "participation", "one_owner", "triton_shim"},)
WITHOUT_TORCH = {
    "lazy_names",
    "rounding",
    "user_warnings",
    "errors",
    "participation",
    "strategies",
    "accounting",
    "plan",
    "theory",
}


def part_of(module: str) -> str:
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


#: What the checks below look at.
Node = ast.Import | ast.ImportFrom


def nodes_of(text: str) -> list[Node]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, Node)]


@cache
def nodes(path: Path) -> list[Node]:
    return nodes_of(path.read_text(encoding="utf8"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name}: relative import"
            if node.module == "noshuffle":
                found.update(f"noshuffle.{alias.name}" for alias in node.names)
            else:
                found.add(node.module)
    return found


def violations(path: Path, names: set[str], part: str) -> list[str]:
    out = []
    for name in names:
        top = name.split(".")[0]
        if top == "torch" and part in WITHOUT_TORCH:
            out.append(f"{path.name} imports torch")
        if top != "noshuffle":
            continue
        other = part_of(name)
        if other == part:
            continue
        same = any(part in group and other in group for group in TOGETHER)
        if LAYERS[other] > LAYERS[part] or (LAYERS[other] == LAYERS[part] and not same):
            out.append(f"{path.name} ({part}) imports {name}")
    return out


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert first in LAYERS, f"{first} has no layer"
    assert violations(path, imports(path), first) == []


def test_the_check_itself_can_fail() -> None:
    assert violations(Path("x.py"), {"noshuffle.plan"}, "strategies")
    assert violations(Path("x.py"), {"noshuffle.accounting.gaussian"}, "strategies")
    assert violations(Path("x.py"), {"torch.nn"}, "accounting")
    assert not violations(Path("x.py"), {"noshuffle.errors", "torch"}, "noise")


#: Imports that may close a circle: (who, whom) → why it cannot be otherwise. There is none.
NEEDED: dict[tuple[str, str], str] = {}


def module_of(path: Path) -> str:
    parts = ["noshuffle", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def graph() -> dict[str, set[str]]:
    """Whom every module names in an import: on top, in functions and for types alike.

    `from package import x` is an import of the module x, if there is one, else of `__init__`.
    That Python runs the `__init__` of a package before each of its modules is not counted.
    """
    files = {module_of(path): path for path in FILES}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        named = found.setdefault(module, set())
        for node in nodes(path):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wholes = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {whole if whole in files else node.module for whole in wholes}
    return {
        module: {name for name in named & set(files) if (module, name) not in NEEDED}
        for module, named in found.items()
    }


def circles(imported: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or by way of others."""

    def reach(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            new = imported[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reached = {module: reach(module) for module in imported}
    rings = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imported
    }
    return sorted(list(ring) for ring in rings if ring)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(graph()) == [], "let one of them take what it needs as an argument or a Protocol"


def test_the_check_for_circles_can_fail() -> None:
    pair = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": set()}
    assert circles(pair) == [["a", "b"]]
    ring = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}}
    assert circles(ring) == [["a", "b", "c"], ["e"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    read = graph()
    assert "noshuffle.training" in read["noshuffle.cli.job"]
    assert "noshuffle.noise.c_step" in read["noshuffle.noise.stream"]  # from package import module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf8")))
