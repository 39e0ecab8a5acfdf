"""Whether a number that was read from a batch decides what a loss is, by the source that reads it.

`x.max().item()` leaves torch: a log is harmless, `w = 30.0 if top > 3 else 1.0` is not. The place
of a read is followed in the syntax tree of its file, through arithmetic, calls, names of the same
function and `return`. A choice is a test, a comparison, an index, min or max; it counts if what it
gives, or what an `if` sets, leaves out or jumps over, comes to `backward` or out of the function.
Not: `assert` and `raise`, isnan, isfinite and isinf, `if loss < best: best = loss`, prints, lists.

Guarantees: none; attributes, containers and code without source are not followed, so that this is
good for warnings only. State: a cache of parsed files.

>>> bool(branch_of([(compile("x", "no such file", "eval"), 0)]))
False
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import NamedTuple

#: Where a call was made: code and instruction, of the innermost frame first.
CallSite = tuple[CodeType, int]
FINITE = ("isnan", "isfinite", "isinf")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
CHOICES = ("min", "max", "sorted", "clip", "clamp")
#: What is followed comes out of its function (a choice: minus its line).
RETURNED = -(1 << 30)


class ParsedFile(NamedTuple):
    """A file: its expressions by their places (the outermost), and what each is a part of."""

    by_position: dict[tuple[int | None, ...], ast.expr | ast.Assert]
    parents: dict[ast.AST, ast.AST]

    def followed(self, node: ast.AST, choice: int, ends: set[ast.AST], seen: set[ast.AST]) -> int:
        """The line of the choice by which a value comes to one of `ends`, 0 for none.

        `choice` is the line of one that was made before.
        """
        while node not in seen:
            seen.add(node)
            above = self.parents.get(node)
            is_call = isinstance(above, ast.Call) and node is not above.func
            name = _name(above) if is_call else getattr(above, "attr", "")
            if above is None or isinstance(node, ast.Assert) or (is_call and name in FINITE):
                return 0
            if isinstance(above, ast.FormattedValue) or _is_part(node, above):
                return 0
            if isinstance(above, ast.If | ast.While) and above.test is node:
                line = choice or above.lineno
                return line if self._decides(above, line, ends, seen) else 0
            if isinstance(above, ast.Return | ast.Lambda):
                return -choice if choice else RETURNED
            if choice and (above in ends or name == "backward"):
                return choice
            if isinstance(above, ast.stmt | ast.comprehension):
                found = self._from_names(above, _names(above), choice, ends, seen)
                if found or isinstance(above, ast.stmt):
                    return found
            if (is_call and name in CHOICES) or _is_choice(node, above):
                choice = choice or getattr(node, "lineno", 0)
            node = above
        return 0

    def _decides(
        self, test: ast.If | ast.While, line: int, ends: set[ast.AST], seen: set[ast.AST]
    ) -> bool:
        """Whether the loss is made by what a test does: names, attributes, the step itself."""
        names = set[str]()
        for one in (o for part in (*test.body, *test.orelse) for o in ast.walk(part)):
            if isinstance(one, ast.Return | ast.Continue | ast.Break):
                return True
            if isinstance(getattr(one, "ctx", None), ast.Store):
                if not isinstance(one, ast.Name):
                    return True
                names.add(one.id)
            if isinstance(one, ast.Expr):  # a method that may change its object
                held = getattr(getattr(one.value, "func", None), "value", None)
                names |= {held.id} if isinstance(held, ast.Name) else set()
        return self._from_names(test, names - {"self", "cls"}, line, ends, seen) != 0

    def _from_names(
        self, at: ast.AST, names: set[str], choice: int, ends: set[ast.AST], seen: set[ast.AST]
    ) -> int:
        """The same as `followed`, from where these names are used, if the function sets them."""
        while at in self.parents and not isinstance(at, FUNCTIONS):
            at = self.parents[at]
        every = [o for o in ast.walk(at) if isinstance(o, ast.Name)] if names else []
        own = {one.id for one in every if isinstance(one.ctx, ast.Store)} & names
        loads = (o for o in every if o.id in own and isinstance(o.ctx, ast.Load))
        return next(filter(None, (self.followed(one, choice, ends, seen) for one in loads)), 0)


def _is_part(node: ast.AST, above: ast.AST) -> bool:
    """Whether a name is handed on beside others, as `return loss, accuracy`."""
    return isinstance(node, ast.Name) and isinstance(above, ast.Tuple | ast.Dict)


def _is_choice(node: ast.AST, above: ast.AST) -> bool:
    """Whether a value is compared, tested, or an index."""
    is_index = isinstance(above, ast.Subscript) and above.slice is node
    is_if = isinstance(above, ast.IfExp) and above.test is node
    is_filter = isinstance(above, ast.comprehension) and node in above.ifs
    return is_index or is_if or is_filter or isinstance(above, ast.Compare)


def _names(stored: ast.AST) -> set[str]:
    """The names that a statement sets."""
    targets = getattr(stored, "targets", [getattr(stored, "target", None)])
    inside = (one for target in targets if target is not None for one in ast.walk(target))
    return {one.id for one in inside if isinstance(one, ast.Name)}


def _name(call: ast.AST | None) -> str:
    func = getattr(call, "func", None)
    return str(getattr(func, "attr", getattr(func, "id", "")))


@lru_cache(maxsize=16)
def _source(path: str) -> ParsedFile | None:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None
    by_position: dict[tuple[int | None, ...], ast.expr | ast.Assert] = {}
    parents: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(tree):
        parents.update((child, node) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.expr | ast.Assert):
            at = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            by_position.setdefault(at, node)
    return ParsedFile(by_position, parents)


def line_of(sites: Sequence[CallSite]) -> str:
    """File and line of a call, for people."""
    if not sites:
        return "?"
    code, at = sites[0]
    line = next(iter(_span(code, at)), None) or code.co_firstlineno
    return f"{Path(code.co_filename).name}:{line}"


def branch_of(
    sites: Sequence[CallSite],
    to: Sequence[CallSite] = (),
    *,
    is_test: bool = False,
    choice: str = "",
) -> str:
    """The line of a test that what was read here decides, and that the loss is made by; or "".

    `to`: where the gradient of the loss is asked for; `is_test`: torch was asked for a truth value,
    which is a test unless it is seen to be none; `choice`: a comparison that it came from.
    """
    if not sites:
        return choice
    file = sites[0][0].co_filename
    source = _source(file)
    node = source.by_position.get(_span(*sites[0])) if source is not None else None
    if source is None or node is None:
        return choice or (line_of(sites) if is_test else "")
    own = (source.by_position.get(_span(*site)) for site in to if site[0].co_filename == file)
    ends: set[ast.AST] = {one for one in own if one is not None}
    found = source.followed(node, node.lineno if is_test or choice else 0, ends, set())
    line = choice or f"{Path(file).name}:{abs(found)}"
    if found == RETURNED:
        return branch_of(sites[1:], to)
    return branch_of(sites[1:], to, choice=line) if found < 0 else line if found else ""


def _span(code: CodeType, at: int) -> tuple[int | None, ...]:
    positions = list(code.co_positions())
    return tuple(positions[at // 2]) if 0 <= at // 2 < len(positions) else ()
