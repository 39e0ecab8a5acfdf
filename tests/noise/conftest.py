"""Triton's kernel language on NumPy, for machines without Triton: slow, small, and enough to run.

A kernel file without Triton holds plain functions of a language `tl`. Here `tl` is a few functions
of NumPy arrays; a pointer is an address and a type, and programs run one after the other. It knows
what the noise kernels use, no more. NumPy's rules for numbers of mixed types agree with Triton's
there: a plain Python number takes the type of its partner.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from noshuffle.noise import fused, triton_kernels


class Pointer:
    """Addresses of numbers of one type."""

    def __init__(self, address: Any, kind: type) -> None:
        self.address, self.kind = np.asarray(address, dtype=np.int64), np.dtype(kind)

    def __add__(self, offset: Any) -> Pointer:
        offset = np.asarray(unwrapped(offset), dtype=np.int64)
        return Pointer(self.address + offset * self.kind.itemsize, self.kind.type)

    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """The memory between the least and the largest address, and where each number lies."""
        low, high = int(self.address.min()), int(self.address.max())
        raw = (ctypes.c_char * (high - low + self.kind.itemsize)).from_address(low)
        return np.frombuffer(raw, dtype=self.kind), (self.address - low) // self.kind.itemsize


class Value:
    """A number, or an array of them, of one type."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    @property
    def dtype(self) -> Any:
        return self.array.dtype.type

    def to(self, kind: Any, bitcast: bool = False) -> Any:
        if isinstance(kind, tuple):
            return Pointer(self.array, kind[1])
        return Value(self.array.view(kind) if bitcast else self.array.astype(kind))

    def __index__(self) -> int:
        return int(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __neg__(self) -> Value:
        return Value(-self.array)


def unwrapped(value: Any) -> Any:
    return value.array if isinstance(value, Value) else value


def _operator(name: str) -> Callable[[Value, Any], Any]:
    def apply(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return other + self
        found = getattr(self.array, name)(unwrapped(other))
        assert found is not NotImplemented
        return Value(found)

    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "ror", "xor"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(f"__{_name}__"))


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    is_read = np.broadcast_to(True if mask is None else unwrapped(mask), pointer.address.shape)
    found = np.zeros(pointer.address.shape, dtype=pointer.kind)
    if is_read.any():
        memory, at = Pointer(pointer.address[is_read], pointer.kind.type).memory()
        found[is_read] = memory[at]
    return Value(found)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    is_written = np.broadcast_to(True if mask is None else unwrapped(mask), pointer.address.shape)
    if is_written.any():
        memory, at = Pointer(pointer.address[is_written], pointer.kind.type).memory()
        assert unwrapped(value).dtype == pointer.kind
        memory[at] = np.broadcast_to(unwrapped(value), pointer.address.shape)[is_written]


def fma(a: Any, b: Any, c: Any) -> Value:
    """For products that are exact in float64, as those of the kernels are."""
    wide = [np.asarray(unwrapped(x), dtype=np.float32).astype(np.float64) for x in (a, b, c)]
    return Value((wide[0] * wide[1] + wide[2]).astype(np.float32))


def language(program: list[int]) -> SimpleNamespace:
    """What kernels know as `tl`; `program` holds the number of the one that runs."""
    kinds = ("int32", "int64", "uint32", "uint64", "float32", "float64")
    return SimpleNamespace(
        **{kind: getattr(np, kind) for kind in kinds},
        constexpr=int,
        load=load,
        store=store,
        fma=fma,
        program_id=lambda axis: Value(np.int32(program[axis])),
        arange=lambda low, high: Value(np.arange(low, high, dtype=np.int32)),
        static_range=range,
        zeros=lambda shape, kind: Value(np.zeros(shape, dtype=kind)),
        pointer_type=lambda kind: ("pointer", kind),
        where=lambda c, a, b: Value(np.where(*(unwrapped(x) for x in (c, a, b)))),
        minimum=lambda a, b: Value(np.minimum(unwrapped(a), unwrapped(b))),
        maximum=lambda a, b: Value(np.maximum(unwrapped(a), unwrapped(b))),
        sqrt_rn=lambda x: Value(np.sqrt(unwrapped(x))),
    )


class Launcher:
    """kernel[(programs,)](…) of a plain kernel function."""

    def __init__(self, function: Callable[..., None], program: list[int]) -> None:
        self.function, self.program = function, program

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **settings: Any) -> None:
            options = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
            settings = {k: v for k, v in settings.items() if k not in options}
            passed = [
                Pointer(a.data_ptr(), getattr(np, str(a.dtype).removeprefix("torch.")))
                if isinstance(a, torch.Tensor)
                else a
                for a in arguments
            ]
            for number in range(grid[0]):
                self.program[0] = number
                with np.errstate(all="ignore"):
                    self.function(*passed, **settings)

        return launch


@contextmanager
def numpy_triton() -> Iterator[None]:
    """The noise kernels by the language above."""
    program = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "tl", language(program))
        patch.setattr(triton_kernels, "add_noise", Launcher(triton_kernels.add_noise, program))
        names = {torch.float32: np.float32, torch.float64: np.float64}
        patch.setattr(fused, "_element", lambda dtype: names[dtype])
        yield


@pytest.fixture(scope="session")
def without_triton() -> Callable[[], Any]:
    """A context in which the noise kernels run on NumPy."""
    return numpy_triton
