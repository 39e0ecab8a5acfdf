"""Odd models: one example moves the clipped sum by its clip norm at most, or the model is refused.

On request (-m slow) by brute force: two runs whose data differ in one example of the last step.
Else the sum of the second batch is compared with that of examples one by one.
"""

from collections.abc import Callable

import pytest
import torch
from tests.clipping.odd_models import APART, MIXING, Odd, data
from tests.clipping.twin import flat

import noshuffle as ns
from noshuffle.clipping import Flat, Ghost, PerExample


@pytest.mark.parametrize("odd", MIXING, ids=str)
def test_examples_that_mix_are_found_in_the_first_batch(odd: Odd) -> None:
    torch.manual_seed(0)
    model, engine = odd.make(), Ghost()
    for seed in (0, 1):
        engine.clipped_sum(model, odd.loss, data(odd, seed), clip=Flat(0.2))
    assert any("whole model written out" in line for line in engine.fallbacks)


@pytest.mark.slow
def test_how_many_are_found_and_how_many_suspected() -> None:
    """Fifteen seeds each; the bounds are those of a prototype of the trial."""
    found, suspected = 0, 0
    for group in (MIXING, APART):
        for odd in group:
            for seed in range(15):
                torch.manual_seed(seed)
                engine, size = Ghost(), 24 if group is APART else None
                engine.clipped_sum(odd.make(), odd.loss, data(odd, seed, size), clip=Flat(0.2))
                is_told = any("whole model" in note for note in engine.fallbacks)
                found, suspected = (
                    (found + is_told, suspected)
                    if group is MIXING
                    else (found, suspected + is_told)
                )
    print(f"found {found} of 900 that mix, suspected {suspected} of 285 that do not")
    assert found >= 898
    assert suspected == 0


@pytest.mark.parametrize("odd", [*MIXING, *APART], ids=str)
def test_no_example_can_meet_another_one_in_isolation(odd: Odd) -> None:
    torch.manual_seed(0)
    model, found = odd.make(), []
    x, y = data(odd, 0)
    other = x.clone()
    other[0] = 1 if x.dtype == torch.long else 20 * x[0]
    for rows in (x, other):
        torch.manual_seed(1)
        engine = Ghost(isolate=True)
        found.append(engine.clipped_sum(model, odd.loss, (rows, y), clip=Flat(0.2)))
    if not any(word in odd.name for word in ("dropout", "noise", "mixup inside", "drawn")):
        a, b = (one.norms[1:] for one in found)  # NaN where an example has no deviation
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8, equal_nan=True)
    a, b = (flat(one.values).double() for one in found)
    is_drawn = any(word in odd.name for word in ("dropout", "noise"))
    assert is_drawn or float((a - b).norm()) <= 2 * 0.2 * 1.0001


@pytest.mark.parametrize("odd", APART, ids=str)
def test_examples_that_are_apart_are_taken_at_once(odd: Odd) -> None:
    torch.manual_seed(0)
    model, engine = odd.make(), Ghost()
    engine.clipped_sum(model, odd.loss, data(odd, 0), clip=Flat(0.2))
    batch = data(odd, 1)
    got = engine.clipped_sum(model, odd.loss, batch, clip=Flat(0.2))
    assert not any("whole model" in line for line in engine.fallbacks)
    if odd.name not in ("dropout", "noise"):
        want = PerExample().clipped_sum(model, odd.loss, batch, clip=Flat(0.2))
        torch.testing.assert_close(flat(got.values), flat(want.values), rtol=1e-4, atol=1e-6)


def last_sum(
    odd: Odd, steps: int, change: Callable[..., torch.Tensor] | None = None
) -> torch.Tensor:
    """The clipped sum of the last step of a run, where `change` is made to its batch."""
    torch.manual_seed(0)
    model, engine = odd.make(), Ghost()
    for step in range(steps - 1):
        torch.manual_seed(1000 + step)
        got = engine.clipped_sum(model, odd.loss, data(odd, step), clip=Flat(0.2)).values
        rng = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.requires_grad:
                    noise = 0.01 * torch.randn(p.shape, generator=rng)
                    p -= 0.5 * (got[name] / odd.size + noise)
    batch = data(odd, steps - 1)
    torch.manual_seed(1000 + steps)
    batch = batch if change is None else tuple(map(change, batch))
    return flat(engine.clipped_sum(model, odd.loss, batch, clip=Flat(0.2)).values).double()


@pytest.mark.slow
@pytest.mark.parametrize("odd", [*MIXING, *APART], ids=str)
def test_one_example_by_brute_force(odd: Odd) -> None:
    is_random = any(word in odd.name for word in ("dropout", "noise", "mixup inside"))
    for steps in (1, 5, 30):
        whole = last_sum(odd, steps)
        for i in range(4):

            def without(t: torch.Tensor, i: int = i) -> torch.Tensor:
                return torch.cat([t[:i], t[i + 1 :]])

            def other(t: torch.Tensor, i: int = i) -> torch.Tensor:
                far = t.clone()
                if t.dim() > 1:
                    far[i] = 20 * t[i] if t.is_floating_point() else 1
                return far

            gaps = [(last_sum(odd, steps, other) - whole).norm() / 2]  # two contributions
            if not is_random:  # with a row less, others have other masks
                gaps.append((last_sum(odd, steps, without) - whole).norm())
            assert max(map(float, gaps)) <= 0.2 * 1.0001, (steps, i)


@pytest.mark.parametrize("isolate", [False, True])
def test_a_statement_says_how_examples_were_kept_apart(isolate: bool) -> None:
    torch.manual_seed(0)
    model = MIXING[1].make() if isolate else APART[0].make()
    plan = ns.Plan.fit(ns.SinglePass(steps=2), mechanism="tree", noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = ns.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=6, isolate=isolate)
    private.step(torch.nn.CrossEntropyLoss(), *data(APART[0], 0, 6))
    said = private.statement().assumptions
    apart = "Examples were kept apart by construction"
    tried = "Only the first batch of each kind was tested for examples that influence each other."
    assert any(apart in sentence for sentence in said) is isolate
    assert (tried in said) is not isolate
