"""Copies that stand for several readers: of the same numbers only, held by nobody else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping import Ghost, conv_halves, conv_kernels, rules_conv
from noshuffle.clipping.factor import Flat
from noshuffle.clipping.forms import OuterGradient
from noshuffle.clipping.shared_copies import COPIES, copy_of


@contextmanager
def sharing() -> Iterator[None]:
    token = COPIES.set({})
    try:
        yield
    finally:
        COPIES.reset(token)


def doubled(t: Tensor) -> tuple[Tensor, ...]:
    return (t * 2,)


def test_a_copy_is_made_once_for_the_same_numbers() -> None:
    x = torch.randn(4, 6)
    with sharing():
        (first,) = copy_of(x, "a", doubled)
        assert copy_of(x.detach(), "a", doubled)[0] is first
        assert copy_of(x.view(4, 6), "a", doubled)[0] is first
        assert copy_of(x, "b", doubled)[0] is not first
        for other in (x.clone(), x[:2], x[1:3], x.view(6, 4), x.view(6, 4).T, x.view(torch.int32)):
            assert copy_of(other, "a", doubled)[0] is not first


def test_what_was_written_to_is_copied_anew() -> None:
    x = torch.randn(3)
    with sharing():
        (first,) = copy_of(x, "a", doubled)
        x.detach().mul_(3)
        assert torch.equal(copy_of(x, "a", doubled)[0], x * 2)
        assert not torch.equal(first, x * 2)


def test_a_storage_that_takes_the_place_of_another_is_another() -> None:
    """Freed memory comes back at the same address, with other numbers in it."""
    with sharing():
        seen, held = set(), []
        for value in range(50):
            x = torch.full((1000,), float(value))
            seen.add(x.data_ptr())
            held += copy_of(x, "a", doubled)
            assert held[-1][0] == 2 * value
            del x
        assert len(seen) < 50  # else nothing was tried


def test_nothing_is_held_and_nothing_shared_outside() -> None:
    x, freed = torch.randn(3), []

    class Noted(Tensor):
        def __del__(self) -> None:
            freed.append(True)

    def noted(t: Tensor) -> tuple[Tensor, ...]:
        return ((t * 2).as_subclass(Noted),)

    assert copy_of(x, "a", doubled)[0] is not copy_of(x, "a", doubled)[0]
    with sharing():
        kept = copy_of(x, "a", noted)
        del kept
        gc.collect()
        assert freed == [True]
        (outer,) = copy_of(x, "a", doubled)
        with sharing():  # a graph that is captured inside must not read what lies outside
            assert copy_of(x, "a", doubled)[0] is not outer
        assert copy_of(x, "a", doubled)[0] is outer


def test_what_comes_with_a_copy_is_kept_for_the_next() -> None:
    x = torch.randn(3)
    with sharing():
        first, second = copy_of(x, "a", lambda t: (t * 2, t * 3))
        del second
        again = copy_of(x, "a", lambda t: (t * 2, t * 3))
        assert again[0] is first
        assert torch.equal(again[1], x * 3)


class Block(nn.Module):
    """A residual block whose shortcut is a convolution of its own."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, inside)
        self.first = nn.Conv2d(inside, out, 3, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inside, out, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(x))
        out: Tensor = self.second(torch.relu(self.first(x))) + self.shortcut(x)
        return out


@pytest.mark.parametrize("is_half", [False, True])
def test_a_block_and_its_shortcut_share_input_and_gradient(
    monkeypatch: pytest.MonkeyPatch, is_half: bool
) -> None:
    """By stand-ins for the kernels of a GPU; the clipped sum is that without them."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Block(4, 6), Block(6, 6), nn.Flatten(), nn.Linear(150, 2)
    )
    if is_half:
        model = model.bfloat16()
    x, y = torch.randn(5, 3, 5, 5), torch.tensor([0, 1, 1, 0, 1])
    x = x.to(next(model.parameters()).dtype)

    def clipped() -> dict[str, Tensor]:
        found = Ghost().clipped_sum(
            model, nn.CrossEntropyLoss(reduction="none"), (x, y), clip=Flat(0.5)
        )
        return {name: value.float() for name, value in found.values.items()}

    plain = clipped()
    made: list[tuple[int, ...]] = []

    def halves(t: Tensor, *, pictures: int, is_pair: bool) -> tuple[Tensor, Tensor, Tensor]:
        made.append(tuple(t.shape))
        return t.clone(), torch.ones(len(t) // pictures), t.square().sum(1)

    def turned(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        made.append(tuple(t.shape))
        return t.to(dtype).clone(), t.square().sum(1)

    def outer(x: Tensor, g: Tensor, kernel: Any, how: Any, **_: Any) -> OuterGradient:
        stride, (pad, _), dilation = how
        layer = nn.Conv2d(x.shape[1], g.shape[1], kernel, stride, dilation=dilation)
        edge = rules_conv.padded(x.float(), ((pad, pad), (pad, pad)), mode="zeros")
        return rules_conv.Convolution(layer, edge, g.float(), len(x))._outer()

    def total(x: Tensor, g: Tensor, factors: Tensor, **how: Any) -> Tensor:
        full = outer(x, g, **how).dense().reshape(len(x), g.shape[1], x.shape[1], *how["kernel"])
        return torch.einsum("b,b...->...", factors.float(), full)

    monkeypatch.setattr(rules_conv, "_has_kernels", lambda *given: True)
    monkeypatch.setattr(rules_conv.Convolution, "is_fused", property(lambda self: True))
    monkeypatch.setattr(conv_halves, "halves", halves)
    monkeypatch.setattr(conv_halves, "turned", turned)
    monkeypatch.setattr(conv_kernels, "total", total)
    monkeypatch.setattr(
        conv_kernels,
        "squares",
        lambda x, g, **how: outer(x, g, **how).dense().flatten(1).norm(dim=1) ** 2,
    )
    found = clipped()
    # 7 convolutions, two of them shortcuts: 14 tensors, 4 of them twice, in every pass
    passes = sum(shape[1] == 3 for shape in made)
    assert len(made) == 10 * passes > 0
    for name, value in found.items():
        assert torch.allclose(value, plain[name], atol=1e-2 if is_half else 1e-5), name
