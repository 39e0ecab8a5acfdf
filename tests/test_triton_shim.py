"""Launches of kernels that were seen before: the same compiled kernel, or Triton's own way.

Stand-ins for Triton's kernels: what they are given is compared, whichever way it came.
"""

from __future__ import annotations

import ast
import gc
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from noshuffle import triton_shim
from noshuffle.errors import Unsupported
from noshuffle.triton_shim import KernelTest, LaunchCache


def kernel(x: Any, out: Any, count: Any, WIDTH: Any, IS_TOTAL: Any) -> None:
    """The signature of a kernel."""


class Chain:
    """Several hooks, as Triton has had them since 3.5."""

    def __init__(self, *calls: Any) -> None:
        self.calls = list(calls)

    def __call__(self, *args: Any) -> None:
        for call in self.calls:
            call(*args)


class Hooks:
    """Where launch hooks are set."""

    def __init__(self) -> None:
        self.launch_enter_hook: Any = Chain()
        self.launch_exit_hook: Any = None

    def leave(self) -> None:
        if self.launch_exit_hook is not None:
            self.launch_exit_hook({})


class Compiled:
    """What a kernel is compiled to: launched with all arguments in order."""

    def __init__(self, log: list[Any], hooks: Hooks, *, refuses: bool = False) -> None:
        self.log, self.hooks, self.refuses = log, hooks, refuses

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any) -> None:
            if self.refuses:
                raise TypeError("function takes exactly 3 arguments")
            self.log.append(("known", grid, args))
            self.hooks.leave()

        return launch


class Jitted:
    """A kernel as Triton gives it."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.log: list[Any] = []
        self.pre_run_hooks: list[Any] = []
        self.refuses, self.hooks = refuses, Hooks()
        self.known = LaunchCache(self, kernel, self.hooks)

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.log.append(("plain", grid, args, options))
        self.hooks.leave()
        return Compiled(self.log, self.hooks, refuses=self.refuses)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.known(*args, grid=grid, warmup=False, **kwargs)

    def ways(self) -> list[str]:
        return [entry[0] for entry in self.log]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    return current


def aligned(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Eight numbers that begin where memory of a GPU does."""
    spare = torch.zeros(512, dtype=torch.uint8)
    first = -spare.data_ptr() % 128
    return spare[first : first + 8 * dtype.itemsize].view(dtype)


X, OUT = aligned(), aligned(torch.float64)
OPTIONS = {"WIDTH": 16, "IS_TOTAL": False, "num_warps": 4}


def test_the_second_launch_has_all_arguments_in_order() -> None:
    own = Jitted()
    first = own[(3, 2)](X, OUT, 5, **OPTIONS)
    other = aligned()  # numbers and places are not what a kernel is compiled for
    again = own[(4,)](other, OUT, 5, **OPTIONS)
    assert own.log[0] == ("plain", (3, 2), (X, OUT, 5), OPTIONS)
    assert again is first
    assert own.log[1][:2] == ("known", (4, 1, 1))
    assert own.log[1][2][0] is other
    assert own.log[1][2][1] is OUT
    assert own.log[1][2][2:] == (5, 16, False)


def test_options_come_in_any_order() -> None:
    own = Jitted()
    for _ in range(2):
        own[(1,)](X, OUT, num_warps=4, IS_TOTAL=True, WIDTH=16, count=7)
    assert own.log[1][2][2:] == (7, 16, True)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": aligned(torch.int32)},
        {"x": X[1:]},  # begins elsewhere behind a border of 16 bytes
        {"x": 3},
        {"count": 6},
        {"count": True},
        {"count": 1.0},
        {"WIDTH": 32},
        {"IS_TOTAL": 0},
        {"num_warps": 8},
        {"num_stages": 1},
    ],
)
def test_what_a_kernel_may_be_compiled_for_goes_triton_s_own_way(changed: dict[str, Any]) -> None:
    own = Jitted()
    usual = {"x": X, "out": OUT, "count": 1, **OPTIONS}
    for given in (usual, {**usual, **changed}):
        own[(1,)](given.pop("x"), given.pop("out"), given.pop("count"), **given)
    assert own.ways() == ["plain", "plain"]


class Image(torch.Tensor):
    """A kind of its own, as images of torchvision are."""


@pytest.mark.parametrize("kind", [torch.nn.Parameter, Image, torch.Tensor])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_tensor_of_any_kind_may_move_and_is_not_kept(kind: Any, by_name: bool) -> None:
    own, held = Jitted(), aligned()
    x: Any = torch.nn.Parameter(held) if kind is torch.nn.Parameter else held.as_subclass(kind)
    for moved in (held, held, held[1:]):
        x.data = moved
        if by_name:
            own[(1,)](x=x, out=OUT, count=5, **OPTIONS)
        else:
            own[(1,)](x, OUT, 5, **OPTIONS)
    assert own.ways() == ["plain", "known", "plain"]
    own.log.clear()
    end = weakref.ref(x)
    del x
    gc.collect()
    assert end() is None


def test_so_does_another_device(device: list[int]) -> None:
    own = Jitted()
    for device[0] in (0, 1, 0, 1):
        own[(1,)](X, OUT, 5, **OPTIONS)
    assert own.ways() == ["plain", "plain", "known", "known"]


def test_so_do_grids_that_are_functions_hooks_warmups_and_what_is_no_key() -> None:
    own = Jitted()
    for _ in range(2):
        own[lambda meta: (1,)](X, OUT, 5, **OPTIONS)
        own[(1,)](X, OUT, 5, **OPTIONS, extra={})
        own.known(X, OUT, 5, grid=(1,), warmup=True, **OPTIONS)
    own[(1,)](X, OUT, 5, **OPTIONS)
    own.pre_run_hooks.append(print)
    own[(1,)](X, OUT, 5, **OPTIONS)
    assert set(own.ways()) == {"plain"}


def test_a_version_that_refuses_such_a_launch_is_asked_once() -> None:
    own = Jitted(refuses=True)
    for _ in range(3):
        own[(1,)](X, OUT, 5, **OPTIONS)
    assert own.ways() == ["plain"] * 3


@pytest.mark.parametrize("chained", [False, True])
def test_a_hook_that_raises_does_not_have_a_kernel_run_twice(chained: bool) -> None:
    """A TypeError of a hook behind a launch was taken for one that came before it."""
    own, fails = Jitted(), [False]

    def hook(_: Any) -> None:
        if fails[0]:
            raise TypeError("a number was expected")

    for _ in range(2):
        own[(1,)](X, OUT, 5, **OPTIONS)
    own.hooks.launch_exit_hook = Chain(hook) if chained else hook
    own[(1,)](X, OUT, 5, **OPTIONS)
    fails[0] = True
    own.log.clear()
    with pytest.raises(TypeError, match="a number"):
        own[(1,)](X, OUT, 5, **OPTIONS)
    assert own.ways() == ["plain"]
    own.hooks.launch_exit_hook = Chain() if chained else None
    own[(1,)](X, OUT, 5, **OPTIONS)
    assert own.ways() == ["plain", "known"]


def test_an_argument_with_a_default_is_left_to_triton() -> None:
    own = Jitted()
    for _ in range(2):
        own[(1,)](X, OUT, 5, WIDTH=16)
    assert own.ways() == ["plain", "plain"]


def test_a_kernel_with_ever_other_arguments_takes_no_more_memory() -> None:
    own = Jitted()
    for count in range(3 * triton_shim.MOST):
        own[(1,)](X, OUT, count, **OPTIONS)
    assert len(own.known._known) == triton_shim.MOST


@pytest.mark.parametrize("is_on", [True, False])
def test_no_launch_is_written_down_by_a_tracer(is_on: bool) -> None:
    """What it fills would be memory that nobody fills when the trace is run."""
    own = Jitted()
    own.known = LaunchCache(own, kernel, is_on=is_on)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        own[(1,)](x, out, 5, **OPTIONS)
        return out

    with pytest.raises(Unsupported, match="no trace"):
        make_fx(run)(X)
    assert not own.log
    run(X)
    assert own.ways() == ["plain"]


def test_the_interpreter_is_chosen_for_all_tests_at_once() -> None:
    """By `conftest`, before any file is imported: one that came later would change nothing."""
    chosen = re.compile(r'environ[^#\n]*"TRITON_INTERPRET"(\]\s*=[^=]|,)')
    files = sorted(Path(__file__).parent.rglob("*.py"))
    found = [file.name for file in files if chosen.search(file.read_text(encoding="utf-8"))]
    assert found == ["conftest.py"]


def test_no_two_kernels_have_one_name() -> None:
    """A profile names them alone, and a module that takes both would take one for the other."""
    found: Counter[str] = Counter()
    for file in Path(triton_shim.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                made = [d.id for d in node.decorator_list if isinstance(d, ast.Name)]
                found[node.name] += "jit" in made and not node.name.startswith("_")
    assert sum(found.values()) > 20
    assert [name for name, times in found.items() if times > 1] == []


def test_no_kernel_is_tested_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tested for one kind of numbers says nothing of another."""
    tested: list[Any] = []

    @KernelTest
    def is_good(device: torch.device, dtype: torch.dtype) -> bool:
        tested.append(dtype)
        return dtype is not torch.float64

    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert is_good(device, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_good(device, torch.float32)
    assert not is_good(device, torch.float16)
    assert tested == [torch.float32]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert is_good(device, torch.float16)
    assert not is_good(device, torch.float64)
    assert not is_good(device, torch.float64)
    assert tested == [torch.float32, torch.float16, torch.float64]
