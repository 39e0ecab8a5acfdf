"""Norms from Gram matrices are never too small, however large or small the entries are."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from noshuffle.clipping import Flat, Ghost, gpu_kernels, gram
from noshuffle.clipping.forms import RowGradient

SCALES = [
    (1.0, 1.0),
    (1e-21, 1e15),
    (1e15, 1e-21),
    (1e-30, 1e17),
    (1e-19, 1e-19),
    (1e-25, 1.0),
    (3e-20, 1e17),
    (1e17, 1e-23),
]
needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() and gpu_kernels.HAS_TRITON), reason="needs CUDA and Triton"
)


def draw(kind, size_a, size_g, *, dtype, device="cpu", steps=40):
    """Inputs and output gradients of three examples; `kind` says how steps relate."""
    luck = torch.Generator().manual_seed(len(kind) + steps)
    a, g = torch.randn(3, steps, 72, generator=luck), torch.randn(3, steps, 65, generator=luck)
    if kind == "alike":
        a, g = a[:, :1].expand_as(a).clone(), g[:, :1].expand_as(g).clone()
    if kind == "mixed":  # one entry that is huge beside entries whose squares vanish
        a[:, :, 1:] *= 1e-12
        g[:, 1:] *= 1e-12
    return tuple((t * s).to(dtype).to(device) for t, s in ((a, size_a), (g, size_g)))


def exact(a, g):
    """The obvious twin, in double precision."""
    return torch.bmm(g.double().mT, a.double()).square().sum((1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "alike", "mixed"])
@pytest.mark.parametrize("scales", SCALES)
def test_the_plain_form_is_never_too_small(scales, kind, dtype):
    a, g = draw(kind, *scales, dtype=dtype)
    found, truth = gram.squares(a, g), exact(a, g)
    assert found.dtype == torch.float64
    is_fine = torch.isfinite(found)  # a square that overflows marks its example as bad
    assert bool((found >= truth * (1.0 - 1e-6))[is_fine].all())
    if scales == (1.0, 1.0):
        assert bool(is_fine.all())
        torch.testing.assert_close(found, truth, rtol=0.02, atol=0.0)


def test_a_zero_gradient_keeps_its_factor():
    a, g = torch.zeros(2, 5, 70), torch.randn(2, 5, 70)
    assert bool((gram.squares(a, g) < 1e-30).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_user_with_most_rows_does_not_change_the_norms_of_the_others(rows, dtype):
    """What is cheaper for all is decided by the longest: all others moved by up to a clip norm."""
    luck, users = torch.Generator().manual_seed(1), 300
    x = torch.randn(1, 24, generator=luck).expand(rows * users + 30, 24).clone()
    y = torch.randn(1, 24, generator=luck).expand_as(x).clone()
    if rows == 2:  # the rows of a user nearly cancel, so that the room for rounding matters
        y[: 2 * users : 2] *= -0.98
    of = torch.tensor([i // rows for i in range(rows * users)] + [users] * 30)
    model = torch.nn.Linear(24, 24, bias=False).to(dtype)
    torch.nn.init.zeros_(model.weight)

    def total(count):
        found = Ghost().clipped_sum(
            model,
            lambda out, target: (out - target).float().square().sum(1).mean(),
            (x[:count].to(dtype), y[:count].to(dtype)),
            clip=Flat(1e-2),
            units=of[:count],
        )
        return found.values["weight"].double()

    moved = float((total(len(x)) - total(rows * users)).norm()) / 1e-2
    assert moved < 1.2


def test_nan_and_infinity_are_not_hidden():
    a, g = draw("random", 1.0, 1.0, dtype=torch.float32)
    a[0, 3, 2], g[1, 2, 1] = torch.nan, torch.inf
    assert torch.isfinite(gram.squares(a, g)).tolist() == [False, False, True]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "alike", "mixed"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("steps", [150, 64, 33, 16, 5, 2])
def test_the_kernels_are_never_too_small(steps, scales, kind, dtype):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        a, g = draw(kind, *scales, dtype=dtype, device="cuda", steps=steps)
        assert gram.has_kernel(a, g)
        tolerance = gram.rounding_tolerance(a, g)
        found, plain = gpu_kernels.squares(a, g, tolerance), gram.bounded(a, g, tolerance)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(torch.isfinite(found), torch.isfinite(plain))
    is_fine = torch.isfinite(found)
    # TF32 cuts both factors of a product at their tenth bit; `slack` aims below the bound for it.
    cut = 4 * 2.0**-10 if dtype == torch.float32 else 1e-6
    assert bool((found >= exact(a, g) * (1.0 - cut))[is_fine].all())
    torch.testing.assert_close(found[is_fine], plain[is_fine], rtol=4e-3, atol=1e-32)


@needs_kernels
def test_the_kernels_do_not_hide_nan_and_infinity():
    a, g = draw("random", 1.0, 1.0, dtype=torch.bfloat16, device="cuda", steps=150)
    a[0, 3, 2], g[1, 2, 1] = torch.nan, torch.inf
    assert gram.has_kernel(a, g)
    assert torch.isfinite(gram.squares(a, g)).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_inner_products_are_those_of_each_example_alone(dtype):
    x = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[2, 3, :2] = torch.tensor([torch.inf, torch.nan])
    found = gram.inner(x)  # without a warning of NumPy's, which would be an error here
    others = [0, 1, 3]
    wide = x[others].double()
    assert torch.allclose(found[others].double(), wide @ wide.mT, rtol=1e-5, atol=1e-5)
    assert torch.isnan(found[2, 3]).all()
    assert torch.equal(found[others], gram.inner(x[others]))


def test_many_examples_are_scaled_in_several_launches(monkeypatch):
    """A grid ends at 65,535 on its second axis; a factor for every example, or none is read."""

    class Scale:
        def __getitem__(self, grid):
            assert grid[1] < 2**16

            def run(x, factors, out, size, **how):
                assert len(x) == len(factors) == grid[1]
                out.copy_(x * factors[:, None])

            return run

    monkeypatch.setattr(gpu_kernels, "scale", Scale())
    x, factors = torch.randn(70_000, 2), torch.rand(70_000)
    assert torch.equal(gpu_kernels.rescale(x, factors), x * factors[:, None])
    with pytest.raises(RuntimeError):
        gpu_kernels.rescale(x, factors[:-1])


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_norms_of_long_embeddings_equal_those_written_out(kind: torch.dtype) -> None:
    g = torch.Generator().manual_seed(11)
    for length, rows in ((65, 3), (200, 500), (130, 1)):  # longer than `max(64, d)`
        index = torch.randint(rows, (4, length), generator=g, dtype=kind)
        form = RowGradient(index, torch.randn(4, length, 5, generator=g), (rows, 5))
        wanted = form.dense().double().square().flatten(1).sum(1)
        torch.testing.assert_close(form.squares(), wanted, rtol=1e-4, atol=0.0)
        assert bool((form.squares() >= wanted * (1 - 1e-6)).all())


@pytest.mark.parametrize("length", [8, 200])
def test_norms_of_embeddings_ask_nothing_of_the_data(length: int) -> None:
    # A sum that waits for an answer of the device cannot be captured; fake tensors have none.
    with FakeTensorMode():
        index, g = torch.empty(4, length, dtype=torch.int64), torch.empty(4, length, 5)
        assert RowGradient(index, g, (30, 5)).squares().shape == (4,)
