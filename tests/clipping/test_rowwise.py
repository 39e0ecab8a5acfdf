"""Rows in C against torch, and against the forms that are their slow twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from noshuffle.c_library import text_of
from noshuffle.clipping import Flat, Ghost, PerLayer, native_rows, rowwise
from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient
from noshuffle.clipping.native_rows import Matrix, Weighing, matrix, squares, weighted
from noshuffle.clipping.rowwise import Rowwise
from noshuffle.clipping.units import finish, members

needs_loops = pytest.mark.skipif(
    native_rows.library() is None, reason="no C compiler: there is one form only"
)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops for tensors of any size."""
    monkeypatch.setattr(native_rows, "LEAST", 0)


def read(t: Tensor) -> Matrix:
    found = matrix(t, t.shape[0])
    assert found is not None
    return found


@needs_loops
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    widths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e15]),
    seed=SEEDS,
)
def test_squares_are_those_of_double_precision(
    rows: int, widths: list[int], scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    own = [torch.randn(rows, width) * scale for width in widths]
    pairs = [(t, None if k % 2 else own[k - 1]) for k, t in enumerate(own)]
    found = squares([(read(x), None if y is None else read(y)) for x, y in pairs])
    for (x, y), got in zip(pairs, found):
        truth = x.double().square().sum(1)
        torch.testing.assert_close(got[0], truth, rtol=1e-13, atol=0.0)
        if y is not None:
            both = truth * y.double().square().sum(1)
            torch.testing.assert_close(got[1], both, rtol=1e-13, atol=0.0)


@needs_loops
@settings(max_examples=60, deadline=None)
@given(
    many=st.integers(1, 30),
    wanted=st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 4), st.booleans(), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    seed=SEEDS,
)
def test_weighted_rows_and_their_sums(
    many: int, wanted: list[tuple[int, int, bool, bool]], seed: int
) -> None:
    torch.manual_seed(seed)
    factors = torch.rand(many, dtype=torch.float64)
    own = [torch.randn(many * span, width) for width, span, _, _ in wanted]
    asked = [Weighing(read(t), keep or not add, add) for t, (_, _, keep, add) in zip(own, wanted)]
    for t, one, (kept, summed) in zip(own, asked, weighted(asked, factors)):
        each = factors.float().repeat_interleave(len(t) // many).unsqueeze(1)
        assert (kept is None) != one.is_kept
        assert (summed is None) != one.is_summed
        if kept is not None:
            assert torch.equal(kept, t * each)
        if summed is not None:
            truth = (t.double() * each.double()).sum(0)
            torch.testing.assert_close(summed, truth.float(), rtol=1e-6, atol=1e-7)


@needs_loops
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    t, f = torch.randn(257, 500), torch.rand(257, dtype=torch.float64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            kept, summed = weighted([Weighing(read(t), True, True)], f)[0]
            found.append((kept, summed, squares([(read(t), read(t))])[0]))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@needs_loops
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_bad_row_is_bad_alone(value: float) -> None:
    t = torch.ones(9, 70)
    t[4, 66] = value
    found = squares([(read(t), None)])[0][0]
    assert torch.equal(found.isfinite(), torch.arange(9) != 4) or value == 3e38
    assert torch.equal(found[torch.arange(9) != 4], torch.full((8,), 70.0, dtype=torch.float64))
    assert not found[4] < 1e30


def test_tensors_that_cannot_be_read_in_place() -> None:
    t = torch.randn(6, 8)
    assert matrix(t, 6) == Matrix(t.data_ptr(), 6, 8)
    assert matrix(t, 12) == Matrix(t.data_ptr(), 12, 4)
    for other in (t.double(), t.half(), t.mT, t[:, ::2], t[:0]):
        assert matrix(other, len(other)) is None
    assert matrix(t, 5) is None
    assert matrix(t, 0) is None


def mixed(size: int, luck: torch.Generator) -> dict[str, list[GradientForm]]:
    """Linear maps with one step and several, biases that share g and that do not, a written one."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=luck)

    a, g, b, h = draw(size, 1, 30), draw(size, 1, 12), draw(size, 3, 8), draw(size, 3, 20)
    wide = OuterGradient(draw(size, 1, 5), draw(size, 1, 40), (40, 5), (40, 5))
    written = OuterGradient(draw(size, 4, 3), draw(size, 4, 2), (2, 3), (2, 3))
    _ = written.square  # small: writes its gradients out
    assert written.written
    return {
        "one.weight": [OuterGradient(a, g, (12, 30), (12, 30))],
        "one.bias": [DenseGradient(g[:, 0])],
        "twin.weight": [
            OuterGradient(draw(size, 1, 6), g, (12, 6), (12, 6))
        ],  # outputs added: the same g
        "twin.bias": [DenseGradient(g[:, 0])],
        "many.weight": [OuterGradient(b, h, (20, 8), (20, 8))],
        "many.bias": [DenseGradient(h.sum(1))],
        "wide.weight": [wide],
        "norm.weight": [DenseGradient(draw(size, 4, 7))],
        "odd.weight": [DenseGradient(draw(7, size).mT)],  # not contiguous
        "written.weight": [written],
        "two": [DenseGradient(draw(size, 3)), DenseGradient(draw(size, 3))],
        "none": [],
    }


@needs_loops
@pytest.mark.parametrize("held", [1, 1 << 20])
@pytest.mark.parametrize("size", [2, 5, 37])
def test_norms_and_sums_are_those_of_the_forms(
    size: int, held: int, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise, "HELD", held)
    luck = torch.Generator().manual_seed(size)
    forms = mixed(size, luck)
    norms = {n: [f.squares().double() for f in own] for n, own in forms.items()}
    factors = torch.rand(size, dtype=torch.float64, generator=luck)
    sums = {n: sum(f.total(factors) for f in own) for n, own in forms.items() if own}
    rows = Rowwise(forms)
    rows.take_squares()
    for name, truth in norms.items():
        for form, own in zip(forms[name], truth):
            torch.testing.assert_close(form.square.double(), own, rtol=1e-5, atol=0.0)
    assert "square" in forms["one.weight"][0].__dict__
    assert "square" in forms["one.bias"][0].__dict__
    found = rows.totals([n for n in forms if n != "norm.weight"], factors)
    assert set(forms) == {"norm.weight", "odd.weight", "two", "none"}  # the others are used up
    assert set(found) == set(sums) - set(forms)
    for name, value in found.items():
        torch.testing.assert_close(value, sums[name], rtol=1e-5, atol=1e-5)
    (rest,) = rows.totals(["norm.weight"], factors).values()
    torch.testing.assert_close(rest, sums["norm.weight"], rtol=1e-5, atol=1e-5)


def test_little_work_is_left_to_the_forms() -> None:
    form = DenseGradient(torch.randn(3, 4))
    rows = Rowwise({"w": [form]})
    rows.take_squares()
    assert "square" not in form.__dict__
    assert rows.totals(["w"], torch.ones(3)) == {}


class Added(nn.Module):
    """Two layers whose outputs are added, so that both biases have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(9, 8), nn.Linear(9, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.left(x) + self.right(x.flip(1))))
        return out


MODELS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 4)),
    "added": Added,
    "norms": lambda: nn.Sequential(nn.Linear(9, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 9)), nn.Conv1d(1, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(35, 4)
    ),
}


@needs_loops
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("bad", [False, True])
def test_a_clipped_sum_is_the_same_with_and_without(
    name: str, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y = torch.randn(11, 9), torch.randint(4, (11,))
    if bad:
        x[3, 2] = float("inf")
    engines = {1 << 60: Ghost(), 0: Ghost()}  # each of which looks at the model once
    for clip in (Flat(0.3), PerLayer(0.3)):
        found = []
        for least, engine in engines.items():
            monkeypatch.setattr(native_rows, "LEAST", least)
            found.append(engine.clipped_sum(model, nn.CrossEntropyLoss(), (x, y), clip=clip))
        plain, fast = found
        assert torch.equal(plain.bad, fast.bad)
        assert plain.nonfinite == int(bad)
        norms = (own.norms.nan_to_num() for own in (fast, plain))
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for key, value in plain.values.items():
            assert torch.isfinite(fast.values[key]).all()
            torch.testing.assert_close(fast.values[key], value, rtol=1e-5, atol=1e-6)


@needs_loops
def test_the_bound_holds_for_one_unit(always: None) -> None:
    luck = torch.Generator().manual_seed(3)
    for size in (1e-20, 1.0, 1e17, 1e18):
        a, g = (torch.randn(6, 1, n, generator=luck) * size for n in (700, 300))
        forms: dict[str, list[GradientForm]] = {
            "w": [OuterGradient(a, g, (300, 700), (300, 700))],
            "b": [DenseGradient(g[:, 0])],
        }
        like = {"w": torch.zeros(300, 700), "b": torch.zeros(300)}
        for unit in range(6):
            marks = (torch.arange(6) == unit).long()
            who = members(None, marks, size=6, device=torch.device("cpu"))
            one = {n: [form.kept(marks.bool()) for form in own] for n, own in forms.items()}
            got = finish(one, like, torch.zeros(6), who, clip=Flat(0.7))
            norm = torch.cat([v.double().flatten() for v in got.values.values()]).norm()
            assert float(norm) <= 0.7
            if size == 1e18:  # 0.7/‖g‖ is below 2⁻¹²⁶ and counts as zero
                assert float(norm) == 0.0
            else:
                assert size < 1.0 or float(norm) > 0.6999


@needs_loops
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("own * square(m->y", "square(m->y"),
        ("r / m->span", "r"),
        ("all += m->slices[s", "all = m->slices[s"),
        ("out[j] = x[j] * f;\n        into", "out[j] = x[j];\n        into"),
    ],
)
def test_a_wrong_build_is_not_used(right: str, wrong: str) -> None:
    text = text_of("rows.c")
    assert text.count(right) == 1
    built = native_rows.library.build(text.replace(right, wrong))
    assert built is not None
    assert not native_rows._agrees(built)
