"""Triton where it is, and a stand-in where it is not, so that kernel files can always be read.

    jit         triton.jit, launched by `LaunchCache`; or a decorator that changes nothing
    constant    tl.constexpr, or the plain number
    tl          triton.language, or None: kernel texts name it, and only launched ones use it
    KernelTest  whether kernels are good here: they are used only where that was found

Triton looks at every argument of every launch to find what it compiled for such arguments, which
takes the host longer than most of these kernels run. `LaunchCache` remembers that for launches it
has seen: the same numbers, types and options, and tensors of the same types that begin as far
behind a border of 128 bytes (Triton asks about 16). All else goes Triton's own way, and so does
every launch while somebody has hooks around it (a profiler).

A launch is none of torch's operations: where those are written down to be compiled (make_fx), its
results would be memory that nobody fills, so it is refused there.

State: what each kernel was compiled to, and what tests found. Nothing of a kernel runs without
Triton; whoever launches one asks HAS_TRITON first.

>>> callable(jit), constant(3) == 3
(True, True)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from noshuffle.errors import Unsupported

jit: Callable[[Any], Any]
constant: Callable[[Any], Any]
tl: Any

#: Versions that launch what they compiled with all arguments in order, constants included.
_FIRST, _NEXT = (3, 3), (4, 0)
#: Different launches of a kernel that are remembered; one that changes with every call is none.
MOST = 64
_ALIGNED = 127


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, so that nothing may wait for the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class KernelTest:
    """Decorates a test of kernels, which is made once for every kind of arguments.

    A test waits for the device. While a CUDA graph is captured the answer is no for what was not
    tested by then, and nothing is remembered.
    """

    def __init__(self, test: Callable[..., bool]) -> None:
        self._test = test
        self._found: dict[tuple[Any, ...], bool] = {}

    def __call__(self, device: torch.device, *kind: Any) -> bool:
        key = (device, *kind)
        if key not in self._found:
            if is_capturing(device):
                return False
            self._found[key] = self._test(*key)
        return self._found[key]

    def cache_clear(self) -> None:
        """Test anew when next asked."""
        self._found.clear()


class LaunchCache:
    """Launches of one kernel, in the place of its `run`.

    Guarantees: a launch is by the kernel that Triton itself has chosen for arguments which agree in
    all that it chooses by, on the same device; where that cannot be told, or a version of Triton
    does not take such a launch, it is Triton's own. A kernel is never launched twice: without hooks
    nothing but the look at its arguments, which comes before, raises a TypeError.
    """

    def __init__(
        self,
        kernel: Any,
        function: Callable[..., Any],
        hooks: Any = None,
        *,
        is_on: bool = True,
    ) -> None:
        self._kernel, self._plain, self._hooks = kernel, kernel.run, hooks
        self._names = tuple(inspect.signature(function).parameters)
        self._known: dict[Any, Any] = {}
        self._is_on = is_on

    def __call__(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() and _is_traced():
            raise Unsupported("a kernel leaves no trace")
        is_usual = self._is_on and not warmup and type(grid) is tuple
        if not is_usual or self._kernel.pre_run_hooks or _are_set(self._hooks):
            return self._plain(*args, grid=grid, warmup=warmup, **options)
        given: list[Any] = [torch.cuda.current_device(), len(args), *options]
        for value in (*args, *options.values()):
            if isinstance(value, torch.Tensor):  # itself, it would move under its key, and be held
                given += (value.dtype, value.data_ptr() & _ALIGNED)
            else:
                given += (type(value), value)  # 1 is True, and 1.0, but not for a compiler
        key = tuple(given)
        try:
            compiled = self._known.get(key)
        except TypeError:  # no key can be made of one of them
            return self._plain(*args, grid=grid, warmup=warmup, **options)
        if compiled is not None:
            try:
                more = map(options.__getitem__, self._names[len(args) :])
                compiled[(*grid, 1, 1)[:3]](*args, *more)
                return compiled
            except (TypeError, KeyError):  # refused before anything is launched
                self._is_on = False
        found = self._plain(*args, grid=grid, warmup=warmup, **options)
        if len(self._known) < MOST and hasattr(type(found), "__getitem__"):
            self._known[key] = found
        return found


def _is_traced() -> bool:
    """Whether operations are written down to be compiled."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def _are_set(hooks: Any) -> bool:
    """Whether there are launch hooks: functions in Triton 3.3, chains of them in later versions."""
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(hooks, name, None)
        if getattr(hook, "calls", hook):
            return True
    return False


def _is_known(version: str) -> bool:
    """Whether this version is one of those.

    >>> [_is_known(v) for v in ("3.2.0", "3.3.1", "3.10.0+git1", "4.0.0", "main")]
    [False, True, True, False, False]
    """
    try:
        major, minor = version.split(".")[:2]
        return _FIRST <= (int(major), int(minor)) < _NEXT
    except ValueError:
        return False


try:
    import triton
    import triton.language

    constant, tl, HAS_TRITON = triton.language.constexpr, triton.language, True
    #: What has the launch hooks.
    _HOOKS: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    _HOOKS = _HOOKS or getattr(triton.compiler, "CompiledKernel", None)

    def jit(function: Any) -> Any:
        """`triton.jit`; an interpreted kernel, and one for other devices, stays as it is."""
        kernel: Any = triton.jit(function)
        is_compiled = type(kernel) is triton.runtime.JITFunction and torch.version.cuda is not None
        if is_compiled:
            is_known = _is_known(triton.__version__)
            kernel.run = LaunchCache(kernel, function, _HOOKS, is_on=is_known)
        return kernel

except ImportError:
    tl, HAS_TRITON = None, False

    def jit(function: Any) -> Any:
        """The text as it is."""
        return function

    def constant(value: Any) -> Any:
        """A plain number."""
        return value
