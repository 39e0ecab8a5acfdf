"""Gradients of layer norms in C against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from noshuffle.c_library import text_of
from noshuffle.clipping import native_norms
from noshuffle.clipping.native_norms import WIDEST, fits, layer_sums
from noshuffle.clipping.rules import layer_norm

needs_loops = pytest.mark.skipif(
    native_norms.library() is None, reason="no C compiler: there is one form only"
)


@needs_loops
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 150)),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e15]),
    shift=st.sampled_from([0.0, 1.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_are_those_of_torch(
    sizes: tuple[int, int, int], scale: float, shift: float, seed: int
) -> None:
    luck = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(sizes, generator=luck) for _ in range(2))
    x = (x + shift) * scale
    found = layer_sums(x, g, size=sizes[0], eps=1e-5)
    unit = nn.functional.layer_norm(x.double(), sizes[2:], eps=1e-5)
    for own, truth in zip(found, ((unit * g.double()).sum(1), g.double().sum(1))):
        torch.testing.assert_close(own, truth.float(), rtol=1e-5, atol=1e-5)


@needs_loops
def test_the_rule_takes_them_and_finds_what_it_found_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x, g = nn.LayerNorm(32), torch.randn(6 * 50, 32), torch.randn(6 * 50, 32)
    assert fits(x, g, 32)
    fast = layer_norm(layer, x, g, 6)
    monkeypatch.setattr(native_norms, "LEAST", 1 << 60)
    slow = layer_norm(layer, x, g, 6)
    for name, form in slow.items():
        found = fast[name].dense()
        assert found.shape == (6, 32)
        torch.testing.assert_close(found, form.dense(), rtol=1e-5, atol=1e-5)


@needs_loops
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["x", "g"])
def test_a_bad_example_is_bad_alone(value: float, which: str) -> None:
    both = {"x": torch.randn(5, 4, 40), "g": torch.randn(5, 4, 40)}
    both[which][2, 1, 7] = value
    scales, shifts = layer_sums(**both, size=5, eps=1e-5)
    others = torch.arange(5) != 2
    assert torch.equal(scales.isfinite().all(1), others)
    assert torch.equal(shifts.isfinite().all(1), others | (which == "x"))


@needs_loops
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    x, g = torch.randn(2, 17, 30, 70)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.stack(layer_sums(x, g, size=17, eps=1e-5)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_what_the_loops_cannot_read() -> None:
    x, g = torch.randn(2, 64, 8, 16)
    for one, two in ((x.double(), g), (x, g.half()), (x, g[:32]), (x.mT, g.mT), (x[:2], g[:2])):
        assert not fits(one, two, one.shape[-1])
    wide = torch.zeros(2, WIDEST + 1)
    assert not fits(wide, wide, WIDEST + 1)


@needs_loops
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(double)width + eps", "(double)width"),
        ("scale[j] +=", "scale[j] ="),
        ("part[j - whole] += (double)x[j]", "part[0] = (double)x[j]"),
        ("const float *g = job->g + (at * job->steps + t)", "const float *g = job->g + (t)"),
    ],
)
def test_a_wrong_build_is_not_used(right: str, wrong: str) -> None:
    text = text_of("norms.c")
    assert text.count(right) == 1
    built = native_norms.library.build(text.replace(right, wrong))
    assert built is not None
    assert not native_norms._agrees(built)
