"""Norms from inner products of steps in C against torch, and against the forms without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from noshuffle.c_library import text_of
from noshuffle.clipping import Flat, Ghost, PerLayer, gram, native_rows, native_steps
from noshuffle.clipping.forms import GradientForm, OuterGradient
from noshuffle.clipping.native_steps import LONGEST, StepMap, fits, squares
from noshuffle.clipping.products import weighted
from noshuffle.clipping.rowwise import Rowwise
from noshuffle.clipping.rules import StepSums, bias_of
from noshuffle.clipping.units import finish, members

needs_loops = pytest.mark.skipif(
    native_steps.library() is None, reason="no C compiler: there is one form only"
)
SIZES = st.tuples(
    st.integers(1, 5), st.integers(2, 13), st.integers(1, 150), st.integers(1, 150), st.booleans()
)


def drawn(luck: torch.Generator, many: int, steps: int, width: int, *, first: bool) -> Tensor:
    """Examples of several steps; `first`: steps first in memory, as recurrent layers have them."""
    if first:
        return torch.randn(steps, many, width, generator=luck).transpose(0, 1)
    return torch.randn(many, steps, width, generator=luck)


@needs_loops
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    scale=st.sampled_from([1e-25, 1e-3, 1.0, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_norms_are_those_of_torch_and_never_too_small(
    sizes: list[tuple[int, int, int, int, bool]], scale: float, seed: int
) -> None:
    luck, maps = torch.Generator().manual_seed(seed), []
    for many, steps, inputs, outputs, first in sizes:
        a = drawn(luck, many, steps, inputs, first=first)
        maps.append(StepMap(a, drawn(luck, many, steps, outputs, first=False) * scale, not first))
    for (a, g, is_summed), found in zip(maps, squares(maps)):
        assert fits(a, g)
        torch.testing.assert_close(found.squares, gram.squares(a, g), rtol=3e-6, atol=0.0)
        truth = (g.double().mT @ a.double()).square().sum((1, 2))
        assert (found.squares >= truth).all()
        assert (found.sums is None) != is_summed
        if found.sums is not None:
            sums = g.double().sum(1)
            torch.testing.assert_close(found.sums, sums.float(), rtol=1e-6, atol=0.0)
            lengths = found.sums.double().square().sum(1)
            torch.testing.assert_close(found.sum_squares, lengths, rtol=1e-12, atol=0.0)


@needs_loops
@pytest.mark.parametrize("steps", [2, 5, 20, LONGEST - 1, LONGEST])
@pytest.mark.parametrize("width", [1, 7, 8, 15, 16, 17, 63, 65, 255, 256, 257, 530])
def test_columns_that_fill_no_lane_or_chunk(steps: int, width: int) -> None:
    luck = torch.Generator().manual_seed(width)
    beside = torch.randn(3, steps, width + 5, generator=luck)  # what is no part of g
    a, g = torch.randn(3, steps, 33, generator=luck), beside[..., 2 : width + 2]
    (found,) = squares([StepMap(a, g, True)])
    torch.testing.assert_close(found.squares, gram.squares(a, g), rtol=3e-6, atol=0.0)
    assert found.sums is not None
    torch.testing.assert_close(found.sums, g.double().sum(1).float(), rtol=1e-6, atol=1e-7)


@needs_loops
@pytest.mark.parametrize("steps", [2, 3, 20, LONGEST])
def test_steps_that_cancel_have_a_norm_that_is_not_too_small(steps: int) -> None:
    luck = torch.Generator().manual_seed(steps)
    a, g = (torch.randn(4, 1, n, generator=luck).expand(4, steps, n).clone() for n in (700, 900))
    g *= torch.tensor([1.0, -1.0]).repeat(steps)[:steps].reshape(1, -1, 1)
    a += 1e-4 * torch.randn(a.shape, generator=luck)
    (found,) = squares([StepMap(a, g, True)])
    truth = (g.double().mT @ a.double()).square().sum((1, 2))
    assert (found.squares >= truth).all()
    torch.testing.assert_close(found.squares, gram.squares(a, g), rtol=0.1, atol=0.0)


@needs_loops
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [3, 68])
def test_a_bad_example_is_bad_alone(value: float, at: int) -> None:
    a, g = torch.ones(5, 6, 9), torch.ones(5, 6, 69)
    g[2, 5, at] = value
    (found,) = squares([StepMap(a, g, True)])
    others = torch.arange(5) != 2
    assert found.sums is not None
    assert found.sum_squares is not None
    for part in (found.squares, found.sums.sum(1), found.sum_squares):
        assert torch.equal(part.isfinite(), others)


@needs_loops
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    maps = [StepMap(torch.randn(17, 9, 130), torch.randn(17, 9, 1100), True) for _ in range(2)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([t for own in squares(maps) for t in own if t is not None])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other))


def test_what_the_loops_cannot_read() -> None:
    a, g = torch.randn(4, 6, 8), torch.randn(4, 6, 3)
    assert fits(a, g)
    assert fits(a.transpose(0, 1), g.transpose(0, 1))
    for one, two in ((a.double(), g), (a, g.half()), (a[..., ::2], g), (a[:0], g[:0])):
        assert not fits(one, two)
    assert not fits(a[:, :1], g[:, :1])
    assert not fits(torch.zeros(1, LONGEST + 1, 2), torch.zeros(1, LONGEST + 1, 2))


def maps_of(size: int, luck: torch.Generator) -> dict[str, list[GradientForm]]:
    """A map and its bias, one stored by input, two with the same g, steps first, a bias alone."""
    draw = {k: drawn(luck, size, 5, w, first=k in "xyz") for k, w in zip("agbhxyz", range(20, 34))}
    a, g, b, h, x, y, z = (draw[k] for k in "agbhxyz")
    return {
        "plain.weight": [OuterGradient(a, g, (21, 20))],
        "plain.bias": [bias_of(g, is_kept=True)],
        "stored.weight": [OuterGradient(h, b, (22, 23))],
        "stored.bias": [bias_of(h, is_kept=True)],
        "ih": [OuterGradient(x, z, (26, 24))],
        "hh": [OuterGradient(y, z, (26, 25))],
        "bias_ih": [bias_of(z, is_kept=True)],
        "bias_hh": [bias_of(z, is_kept=True)],
        "alone.bias": [bias_of(drawn(luck, size, 5, 12, first=False), is_kept=True)],
    }


@needs_loops
@pytest.mark.parametrize("size", [1, 6])
def test_forms_find_the_same_with_and_without(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_rows, "LEAST", 0)
    slow, fast = (maps_of(size, torch.Generator().manual_seed(5)) for _ in range(2))
    rows = Rowwise(fast)
    rows.take_squares()
    assert all("square" in own[0].__dict__ for own in fast.values())
    for name, (form,) in fast.items():
        torch.testing.assert_close(
            form.square.double(), slow[name][0].squares().double(), rtol=1e-5, atol=0.0
        )
    factors = torch.rand(size, dtype=torch.float64)
    found = rows.totals(tuple(fast), factors)
    for name, (form,) in slow.items():
        got = found[name] if name in found else fast[name][0].total(factors)
        torch.testing.assert_close(got, form.total(factors), rtol=1e-5, atol=1e-5)


def test_sums_are_made_at_once_where_g_is_not_kept() -> None:
    g = torch.randn(3, 4, 5)
    assert isinstance(bias_of(g, is_kept=True), StepSums)
    assert not isinstance(bias_of(g, is_kept=False), StepSums)
    assert not isinstance(bias_of(g[:, :1], is_kept=True), StepSums)
    assert torch.equal(bias_of(g, is_kept=True).grads, bias_of(g, is_kept=False).grads)


def test_weighted_products_of_steps_that_come_first_in_memory() -> None:
    luck = torch.Generator().manual_seed(1)
    factors = torch.rand(6, dtype=torch.float64, generator=luck)
    for widths in ((9, 4), (4, 9)):
        x, y = (drawn(luck, 6, 5, n, first=True) for n in widths)
        truth = torch.einsum("b,bto,bti->oi", factors, x.double(), y.double())
        torch.testing.assert_close(weighted(x, y, factors), truth.float(), rtol=1e-5, atol=1e-5)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inside, self.head = kind(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inside(x)[0])
        return out


MODELS: dict[str, Any] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), nn.Linear(6, 4)
    ),
}


def token_loss(scores: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


@needs_loops
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("case", ["plain", "bad", "users", "frozen"])
def test_a_clipped_sum_is_the_same_with_and_without(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x, y = MODELS[name](), torch.randn(7, 5, 6), torch.randint(4, (7, 5))
    if case == "frozen":  # biases alone are trained
        for key, parameter in model.named_parameters():
            parameter.requires_grad_("bias" in key)
    if case == "bad":
        x[3, 2, 1] = float("inf")
    units = torch.tensor([0, 1, 0, 2, 2, 2, 3]) if case == "users" else None
    engines = {1 << 60: Ghost(), 0: Ghost()}  # each of which looks at the model once
    for clip in (Flat(0.3), PerLayer(0.3)):
        found = []
        for least, engine in engines.items():
            monkeypatch.setattr(native_rows, "LEAST", least)
            found.append(engine.clipped_sum(model, token_loss, (x, y), clip=clip, units=units))
        plain, fast = found
        assert torch.equal(plain.bad, fast.bad)
        assert plain.nonfinite == int(case == "bad")
        norms = (own.norms.nan_to_num() for own in (fast, plain))
        torch.testing.assert_close(*norms, rtol=1e-4, atol=0)
        for key, value in plain.values.items():
            torch.testing.assert_close(fast.values[key], value, rtol=1e-4, atol=1e-6)


@needs_loops
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_the_bound_holds_for_one_unit(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_rows, "LEAST", 0)
    luck = torch.Generator().manual_seed(3)
    a, g = (torch.randn(4, 20, n, generator=luck) * size for n in (70, 300))
    for unit in range(4):
        own = slice(unit, unit + 1)
        one: dict[str, list[GradientForm]] = {
            "w": [OuterGradient(a[own], g[own], (300, 70))],
            "b": [StepSums(g[own])],
        }
        like = {"w": torch.zeros(300, 70), "b": torch.zeros(300)}
        who = members(None, None, size=1, device=torch.device("cpu"))
        got = finish(one, like, torch.zeros(1), who, clip=Flat(0.7))
        norm = torch.cat([v.double().flatten() for v in got.values.values()]).norm()
        assert float(norm) <= 0.7
        assert size < 1.0 or float(norm) > 0.699


@needs_loops
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("+ 2 * off", "+ off"),
        ("part[i][k] += x * y[k]", "part[i][k] = x * y[k]"),
        ("memset(last, 0, ", "memset(last, 64, "),
        ("example * of->example", "0"),
        ("add_eight((Double *)(all + j), row[t]", "add_eight((Double *)(all + j), row[0]"),
        ("t * of->step + at, real", "t * of->step, real"),
        ("unit * (2 +", "0 * (2 +"),
    ],
)
def test_a_wrong_build_is_not_used(right: str, wrong: str) -> None:
    text = text_of("steps.c")
    assert text.count(right) == 1
    built = native_steps.library.build(text.replace(right, wrong))
    assert built is not None
    assert not native_steps._agrees(built)
