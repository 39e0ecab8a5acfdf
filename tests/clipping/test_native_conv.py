"""The compiled gradients of convolutions against torch's own, one example at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from noshuffle.c_library import text_of
from noshuffle.clipping import (
    Flat,
    Ghost,
    PerExample,
    native_conv,
    native_norms,
    native_rows,
    native_steps,
)
from noshuffle.clipping.native_conv import Geometry, Gradients, fits_cache, is_fit
from noshuffle.clipping.rules_conv import Convolution, convolution

needs_loops = pytest.mark.skipif(
    native_conv.library() is None, reason="no C compiler: there is one form only"
)
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SEEDS = st.integers(0, 2**32 - 1)


def one_by_one(layer: nn.Module, x: Tensor, g: Tensor, size: int) -> Tensor:
    """The gradient of every example by autograd, in double precision: the slow twin."""
    found = []
    wide = layer.double()
    for rows, sent in zip(x.double().chunk(size), g.double().chunk(size)):
        weight = wide.weight
        (grad,) = torch.autograd.grad(wide(rows), weight, sent)
        found.append(grad)
    layer.float()
    return torch.stack(found)


@st.composite
def cases(draw: Any) -> tuple[nn.Module, Tensor, Tensor, int]:
    axes = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, outputs = (groups * draw(st.integers(1, most)) for most in (4, 13))
    numbers = st.tuples(*[st.integers(1, 4 if axes < 3 else 2)] * axes)
    kernel, stride, dilation = draw(numbers), draw(numbers), draw(numbers)
    space = [
        (k - 1) * d + 1 + draw(st.integers(0, 9 if axes < 3 else 3))
        for k, d in zip(kernel, dilation)
    ]
    torch.manual_seed(draw(SEEDS))
    layer = CONVS[axes](
        channels, outputs, kernel, stride=stride, dilation=dilation, groups=groups, bias=False
    )
    size, frames = draw(st.integers(1, 11)), draw(st.integers(1, 2))
    x = torch.randn(size * frames, channels, *space)
    g = torch.randn_like(layer(x).detach())
    return layer, x, g, size


def how_of(layer: Any) -> Geometry:
    return Geometry(layer.kernel_size, layer.stride, layer.dilation, layer.groups)


@needs_loops
@settings(max_examples=80, deadline=None)
@given(cases())
def test_norms_sums_and_gradients(case: tuple[Any, Tensor, Tensor, int]) -> None:
    layer, x, g, size = case
    truth = one_by_one(layer, x, g, size)
    own = Gradients(x, g, size=size, how=how_of(layer))
    squares = truth.flatten(1).square().sum(1)
    torch.testing.assert_close(own.squares(), squares, rtol=2e-6, atol=1e-9)
    written = own.dense()
    assert written.shape == truth.shape
    torch.testing.assert_close(written, truth.float(), rtol=1e-4, atol=1e-4)
    factors = torch.rand(size, dtype=torch.float64)
    total = torch.tensordot(factors, truth, 1)
    torch.testing.assert_close(own.total(factors), total.float(), rtol=1e-4, atol=2e-4)


@needs_loops
def test_more_positions_than_the_room_holds() -> None:
    layer = nn.Conv2d(8, 9, 3, bias=False)
    x = torch.randn(3, 8, 30, 30)
    g = torch.randn(3, 9, 28, 28)
    own = Gradients(x, g, size=3, how=how_of(layer))
    assert not own.is_small
    truth = one_by_one(layer, x, g, 3)
    squares = truth.flatten(1).square().sum(1)
    torch.testing.assert_close(own.squares(), squares, rtol=1e-5, atol=0)
    torch.testing.assert_close(own.dense(), truth.float(), rtol=1e-4, atol=1e-3)


@needs_loops
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("length", range(1, 20))
def test_rows_of_a_kernel_of_every_length(length: int, dilation: int) -> None:
    """Each is copied in pieces of eight, four and two numbers."""
    torch.manual_seed(length)
    layer = nn.Conv2d(3, 5, (2, length), dilation=(1, dilation), bias=False)
    x = torch.randn(2, 3, 6, 45)
    g = torch.randn_like(layer(x)).detach()
    own, truth = Gradients(x, g, size=2, how=how_of(layer)), one_by_one(layer, x, g, 2)
    torch.testing.assert_close(own.dense(), truth.float(), rtol=1e-4, atol=1e-4)
    squares = truth.flatten(1).square().sum(1)
    torch.testing.assert_close(own.squares(), squares, rtol=2e-6, atol=0.0)
    total = own.total(torch.tensor([0.5, -2.0]))
    torch.testing.assert_close(
        total, (0.5 * truth[0] - 2.0 * truth[1]).float(), rtol=1e-4, atol=1e-4
    )


@needs_loops
@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_a_border_of_zeros_may_be_left_to_the_loops(case: Any, data: Any) -> None:
    layer, x, _, size = case
    numbers = st.tuples(st.integers(0, 3), st.integers(0, 3))
    sides = tuple(data.draw(numbers) for _ in layer.kernel_size)
    whole = nn.functional.pad(x, [n for pair in reversed(sides) for n in pair])
    g = torch.randn_like(layer(whole).detach())
    how, factors = how_of(layer), torch.rand(size)
    assert fits_cache(x, how, sides)
    own = Gradients(x, g, size=size, how=how, sides=sides)
    twin = Gradients(whole, g, size=size, how=how)
    assert torch.equal(own.squares(), twin.squares())
    assert torch.equal(own.dense(), twin.dense())
    assert torch.equal(own.total(factors), twin.total(factors))


@needs_loops
@pytest.mark.parametrize("padding", [2, (0, 3), "same", "valid"])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("side", [14, 120])  # with a border that fits the cache, and one too large
def test_padded_layers(padding: Any, mode: str, side: int) -> None:
    layer = nn.Conv2d(2, 6, (3, 5), padding=padding, padding_mode=mode)
    x, size = torch.randn(6, 2, side, side), 6
    g = torch.randn_like(layer(x).detach())
    truth = one_by_one(layer, x, g, size)
    form = convolution(layer, x, g, size)["weight"]
    squares = truth.flatten(1).square().sum(1)
    torch.testing.assert_close(form.squares().double(), squares, rtol=1e-3, atol=0)  # with room
    factors = torch.rand(size, dtype=torch.float64)
    total = torch.tensordot(factors, truth, 1).float()
    torch.testing.assert_close(form.total(factors), total, rtol=1e-3, atol=2e-3)
    keep = torch.arange(size) != 1
    torch.testing.assert_close(
        form.kept(keep).squares().double(), squares * keep, rtol=1e-3, atol=1e-25
    )


@needs_loops
def test_threads_do_not_change_a_bit() -> None:
    before = torch.get_num_threads()
    x, g = torch.randn(21, 3, 12, 12), torch.randn(21, 10, 10, 10)
    how = Geometry((3, 3), (1, 1), (1, 1), 1)
    found = []
    try:
        for threads in (1, 2, 3, 12):
            torch.set_num_threads(threads)
            own = Gradients(x, g, size=21, how=how)
            squares, tolerated = own.squares(), own.tolerated
            assert tolerated is not None
            found.append((squares, tolerated, own.dense(), own.total(torch.linspace(0, 1, 21))))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@needs_loops
def test_strides_of_the_tensors_do_not_matter() -> None:
    x, g = torch.randn(4, 3, 12, 12), torch.randn(4, 10, 10, 10)
    how = Geometry((3, 3), (1, 1), (1, 1), 1)
    plain = Gradients(x, g, size=4, how=how)
    last = torch.channels_last
    odd = Gradients(x.to(memory_format=last), g.to(memory_format=last), size=4, how=how)
    assert torch.equal(plain.squares(), odd.squares())


@needs_loops
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_its_own_norm_only(value: float) -> None:
    x, g = torch.randn(4, 1, 12, 12), torch.randn(4, 8, 10, 10)
    g[2, 3, 4, 5] = value
    squares = Gradients(x, g, size=4, how=Geometry((3, 3), (1, 1), (1, 1), 1)).squares()
    assert torch.isfinite(squares).tolist() == [True, True, False, True]


@needs_loops
@pytest.mark.parametrize("power", [58, 64, 66])
def test_of_one_frame_and_of_several_the_same_norms_overflow(power: int) -> None:
    """A row that all others are padded to must not change theirs."""
    torch.manual_seed(0)
    x, g = torch.randn(4, 3, 12, 12) * 2.0**power, torch.randn(4, 8, 10, 10) / 16.0
    how = Geometry((3, 3), (1, 1), (1, 1), 1)
    padded = (torch.stack([t, torch.zeros_like(t)], 1).flatten(0, 1) for t in (x, g))
    alone, beside = Gradients(x, g, size=4, how=how), Gradients(*padded, size=4, how=how)
    found = alone.squares()
    torch.testing.assert_close(beside.squares(), found, rtol=1e-5, atol=0.0)
    alone.dense()
    torch.testing.assert_close(alone.lengths, found, rtol=1e-5, atol=0.0)
    assert bool(torch.isfinite(found).all()) == (power == 58)


@needs_loops
@pytest.mark.parametrize("wide", [(1, 16, 8, 2, 34), (16, 32, 4, 2, 13), (3, 8, 5, 1, 20)])
def test_the_rule_is_the_same_with_and_without(
    wide: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    channels, outputs, kernel, stride, space = wide
    layer = nn.Conv2d(channels, outputs, kernel, stride=stride)
    a = torch.randn(9, channels, space, space)
    g = torch.randn_like(layer(a).detach())
    factors = torch.rand(9, dtype=torch.float64)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        form = convolution(layer, a, g, 9)["weight"]
        assert isinstance(form, Convolution)
        return form.squares().double(), form.total(factors), form.dense()

    assert is_fit(a, g, how_of(layer))
    fast = run()
    with monkeypatch.context() as patch:
        patch.setattr(native_conv, "library", lambda: None)
        assert not is_fit(a, g, how_of(layer))
        slow = run()
    for one, other in zip(fast, slow):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


@needs_loops
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("own[k] * g[o", "own[k] * 1.01f * g[o"),
        ("place[r]", "place[0]"),
        ("job->factors[b]", "1"),
        ("counts[j] += own[r + j] > 0", "counts[j]++"),
        ("sqrt((double)count)", "0"),
        ("of_x[j] += (double)x[i + j]", "of_x[j] += 1.01 * (double)x[i + j]"),
        ("both = of_x * of_g", "both = of_x"),
        ("outputs * tiny", "outputs"),
        ("(double)job->covered", "1"),
        ("if (sums.count) few", "few"),
        ("root * root + few", "root * root"),
    ],
)
def test_a_wrong_build_is_not_used(right: str, wrong: str) -> None:
    text = text_of("convolution.c")
    assert text.count(right) == 1
    built = native_conv.library.build(text.replace(right, wrong))
    assert built is not None
    assert not native_conv._agrees(built)


def test_other_types_and_empty_batches_are_left_to_torch() -> None:
    how = Geometry((3,), (1,), (1,), 1)
    x, g = torch.randn(2, 3, 9), torch.randn(2, 4, 7)
    assert not is_fit(x.double(), g.double(), how)
    assert not is_fit(x[:0], g[:0], how)
    assert not is_fit(x[:, :, :3], g[:, :, :1], how)


@needs_loops
@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_sums_of_channels_come_along(case: tuple[Any, Tensor, Tensor, int]) -> None:
    layer, x, g, size = case
    truth = g.double().reshape(size, -1, *g.shape[1:]).flatten(3).sum((1, 3)).float()
    for measure in ("squares", "dense"):
        own = Gradients(x, g, size=size, how=how_of(layer))
        assert own.channels is None
        found = getattr(own, measure)()
        assert own.channels is not None
        assert own.lengths is not None
        torch.testing.assert_close(own.channels, truth, rtol=1e-6, atol=1e-6)
        written = found if measure == "dense" else own.dense()
        norms = written.double().flatten(1).square().sum(1)
        torch.testing.assert_close(own.lengths, norms, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_bias_of_a_convolution(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_compiled and native_conv.library() is None:
        pytest.skip("no C compiler: there is one form only")
    if not is_compiled:
        monkeypatch.setattr(native_conv, "library", lambda: None)
    layer = nn.Conv2d(2, 6, 3, padding=1)
    x, g = torch.randn(5, 2, 12, 12), torch.randn(5, 6, 12, 12)
    forms = convolution(layer, x, g, 5)
    assert (forms["weight"]._loops is not None) == is_compiled
    truth, factors = g.sum((2, 3)), torch.rand(5)
    torch.testing.assert_close(forms["bias"].dense(), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(forms["bias"].total(factors), factors @ truth, rtol=1e-5, atol=1e-5)
    keep = torch.tensor([True, False, True, True, False])
    kept = forms["bias"].kept(keep)
    torch.testing.assert_close(kept.square.sqrt(), (truth.norm(dim=1) * keep), rtol=1e-5, atol=1e-9)
    weight = forms["weight"]
    exact = weight.dense().double().flatten(1).square().sum(1)
    torch.testing.assert_close(weight.square.double(), exact, rtol=1e-5, atol=0.0)


@needs_loops
@pytest.mark.parametrize("without", [(), ("__AVX512F__",), ("__AVX512F__", "__AVX__")])
def test_vectors_of_every_processor_give_the_gradients(without: tuple[str, ...]) -> None:
    """Sixteen, eight and four numbers at a time; a processor lacks what the text is not told of."""
    lines = "".join(f"#undef {name}\n" for name in without)
    built = native_conv.library.build(lines + text_of("convolution.c"))
    assert built is not None
    assert native_conv._agrees(built)
    torch.manual_seed(4)
    x, g = torch.randn(5, 3, 11, 9), torch.randn(5, 23, 9, 7)  # blocks of all sizes, and a rest
    how = Geometry((3, 3), (1, 1), (1, 1), groups=1)
    own = Gradients(x, g, size=5, how=how, built=built)
    each = torch.stack(
        [nn.grad.conv2d_weight(x[b : b + 1], (23, 3, 3, 3), g[b : b + 1]) for b in range(5)]
    )
    factors = torch.tensor([0.5, 0.0, 1.0, 0.25, 0.125])
    assert torch.allclose(own.squares(), each.double().square().sum((1, 2, 3, 4)), rtol=1e-5)
    assert torch.allclose(own.dense(), each, rtol=1e-4, atol=1e-4)
    assert torch.allclose(own.total(factors), torch.tensordot(factors, each, 1), atol=1e-4)


def test_a_view_with_the_other_sign_keeps_it() -> None:
    """Loops read memory, where a negative view (of a conjugate's imaginary part) has no sign."""

    class Negative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8 * 64, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.conv(torch._neg_view(x))).flatten(1))
            return out

    torch.manual_seed(0)
    model, engine = Negative(), Ghost()
    batch = torch.randn(300, 4, 8, 8), torch.randint(3, (300,))
    want = PerExample().clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=Flat(0.5)).values
    got = engine.clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=Flat(0.5)).values
    assert not engine.fallbacks
    for name, value in want.items():
        assert torch.allclose(got[name], value, atol=1e-3), name


@needs_loops
def test_loops_are_compared_with_torch_in_full_precision() -> None:
    """Whoever asks first may be under autocast, where a product of torch is none in float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for own in (native_conv, native_norms, native_rows, native_steps):
            own.library.cache_clear()
            assert own.library() is not None, own
