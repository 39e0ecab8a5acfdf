"""Imports point down the layers only; the mathematics never sees torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "noshuffle"

#: Layer of every part; a part may import strictly lower layers, and itself.
LAYERS = {
    "errors": 0,
    "one_owner": 0,
    "triton_shim": 0,
    "c_library": 0,
    "participation": 0,
    "strategies": 1,
    "accounting": 1,
    "statement": 2,
    "guarantee": 2,
    "plan": 2,
    "comparison": 2,
    "noise": 3,
    "clipping": 3,
    "optim": 3,
    "training": 4,
    "datasets": 4,
    "federated": 5,
    "convex": 5,
    "auditing": 5,
    "report": 6,
    "cli": 7,
    "__init__": 7,
    "__main__": 8,
}
#: Parts of one layer that belong together; all others of a layer never import each other.
TOGETHER = (
    {"errors", "participation", "one_owner"},
    {"statement", "guarantee", "plan", "comparison"},
)
WITHOUT_TORCH = {"errors", "participation", "strategies", "accounting", "statement", "plan"}


def part_of(module: str) -> str:
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf8")))
