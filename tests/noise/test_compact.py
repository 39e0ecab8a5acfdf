"""Buffers of 16 bits: what rounding adds is uniform, independent of draws, and as small as said.

`test_triton` holds the kernel against these operations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import NoiseStream, Source, compact, native, test_source
from noshuffle.noise.compact import CompactPlans, Dithering, added, spacings
from noshuffle.noise.source import Drawer
from noshuffle.noise.step_plan import StepPlans, fingerprint
from noshuffle.strategies.blt import Blt
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, InPhases, Recipe, Recursive
from noshuffle.strategies.recipe import stream as stream_of

TAPS = ((0, 1.0), (3, 0.4), (5, -0.2))
RECIPE = Buffered((0.97, 0.8, 0.3), (-0.004, -0.05, -0.4), TAPS)
GAINS = tuple(1.0 + 0.1 * (t % 3) for t in range(40))
SCALED = Buffered((0.9, 0.5), (-0.1, -0.2), scale=GAINS, draw_scale=GAINS[::-1])
SHAPES = {"w": (3, 700), "b": (5,)}
STEPS = 40


def stream(recipe: Recipe = RECIPE, *, memory: str = "compact", **more: Any) -> NoiseStream:
    own: dict[str, Any] = {"source": test_source(seed="compact"), "scale": 1.0, "steps": STEPS}
    return NoiseStream(recipe, shapes=SHAPES, memory=memory, **own | more)


def noise(made: NoiseStream, steps: int = 1) -> Tensor:
    """The noise of w in the next steps."""
    rows = []
    for _ in range(steps):
        values = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        made.add_(values)
        rows.append(values["w"])
    return torch.stack(rows)


def drawn(recipe: Buffered, step: int, source: Source) -> Tensor:
    """u of a step from the source's own rows."""
    u = torch.zeros(SHAPES["w"])
    for row, weight in StepPlans.of(recipe).at(step).draws:
        z = torch.empty(SHAPES["w"])
        source.normal_(z, row=row, name="w")
        u += weight * z
    return u


def errors(source: Source, *, steps: int = STEPS) -> Tensor:
    """What rounding adds to each buffer in every step, in spacings: steps × buffers × w."""
    made, before, found = stream(source=source), torch.zeros(3, *SHAPES["w"]), []
    theta = torch.tensor(RECIPE.decays)[:, None, None]
    q = torch.tensor(spacings(RECIPE))[:, None, None]
    for step in range(steps):
        noise(made)
        after = made.state_dict()["buffers"]["w"]
        found.append((after - (theta * before + drawn(RECIPE, step, source))) / q)
        before = after
    return torch.stack(found)


def keyed(seed: int) -> Source:
    return test_source(seed=seed)


def test_errors_are_uniform_and_no_function_of_the_draws() -> None:
    """Of two runs with the same draws and other dithers the errors have nothing in common; without
    dithers they would be equal."""
    source = keyed(3)
    one = errors(source)
    assert float(one.abs().max()) < 0.502  # half a spacing, and the rounding of float32
    for b in range(3):
        sample = one[:, b].flatten().numpy()
        assert stats.kstest(sample[::5], stats.uniform(-0.5, 1.0).cdf).pvalue > 1e-4
        assert abs(sample.std() - 12**-0.5) < 0.005
        steps = one[:, b].flatten(1)
        assert abs(float((steps[1:] * steps[:-1]).mean())) < 4 / 12 / sample.size**0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dithering, "row", lambda self, draw: 2**31 + 5000 + draw * self.rows)
        other = errors(source)
    assert abs(float((one * other).mean())) * 12 < 4 / one.numel() ** 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        patch.setattr(compact, "dither", lambda words, buffer: torch.zeros(words.shape))
        plain = errors(source)
        patch.setattr(Dithering, "row", lambda self, draw: 2**31 + 5000 + draw * self.rows)
        assert torch.equal(plain, errors(source))


def test_every_step_writes_with_dithers_of_its_own_and_the_next_reads_with_them() -> None:
    asked: list[tuple[int, int]] = []
    drawn_words = Drawer.words_

    def recorded(self: Drawer, out: Tensor, *, chunk: int, row: int, draw: int) -> None:
        asked.append((row, draw))
        drawn_words(self, out, chunk=chunk, row=row, draw=draw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drawer, "words_", recorded)
        noise(stream(), STEPS)
    steps = np.array(asked).reshape(STEPS, 2, 2, 2)  # read or written, row of two buffers
    read, written = steps[:, 0], steps[:, 1]
    assert len(np.unique(written[..., 0])) == 2 * STEPS
    assert (written[..., 0] >= 2**31).all()
    np.testing.assert_array_equal(read[1:], written[:-1])
    np.testing.assert_array_equal(written[:, 0, 1], np.arange(STEPS))  # under the key of its draw


def test_the_noise_is_that_of_the_buffers_as_they_are_read() -> None:
    made, source = stream(), test_source(seed="compact")
    for step in range(5):
        before = made.state_dict()["buffers"]["w"] if step else torch.zeros(3, *SHAPES["w"])
        y = drawn(RECIPE, step, source)
        for c, s in zip(RECIPE.scales, before):
            y += c * s
        assert float((noise(made)[0] - y).abs().max()) < 1.01 * 2**-10


@pytest.mark.parametrize("recipe", [RECIPE, SCALED], ids=["taps", "gains"])
def test_running_sums_are_off_by_what_is_said(recipe: Buffered) -> None:
    """Buffers beside those in float32; the released noise is on a grid that is coarser."""
    made, other = stream(recipe), stream(recipe, memory="device")
    off, total = torch.zeros(SHAPES["w"]), torch.zeros(SHAPES["w"])
    for step in range(STEPS):
        noise(made), (total := total + noise(other)[0])
        if made.step < STEPS:
            pair = [one.state_dict()["buffers"]["w"] for one in (made, other)]
            gain = recipe.scale[step + 1] if recipe.scale else 1.0
            off += sum(gain * c * (s - t) for c, s, t in zip(recipe.scales, *pair))
    share = float(off.std() / total.std())
    assert share == pytest.approx(added(recipe, steps=STEPS), rel=0.1)


def test_added_noise_by_hand() -> None:
    recipe, steps = Buffered((0.9, 0.5), (-0.1, -0.2), ((0, 1.0), (2, 0.3))), 7
    weights = [np.array([c * sum(th**i for i in range(m)) for m in range(1, steps)])
               for th, c in zip(recipe.decays, recipe.scales)]  # fmt: skip
    rounding = sum(q**2 / 12 * (w**2).sum() for q, w in zip(spacings(recipe), weights))
    prefix, state = [], np.zeros(2)
    total = 0.0
    for t in range(steps):  # the response to one draw
        u = {0: 1.0, 2: 0.3}.get(t, 0.0)
        total += u + state @ recipe.scales
        prefix.append(total)
        state = state * recipe.decays + u
    expected = (rounding / np.square(prefix).sum()) ** 0.5
    assert added(recipe, steps=steps) == pytest.approx(expected, rel=1e-12)


def test_added_noise_with_gains_and_a_tap_beyond_the_end() -> None:
    """Gains of draws are in both: they widen the spacings as they widen the noise."""
    recipe, steps = replace(SCALED, taps=((0, 1.0), (3, 0.4), (90, 0.5))), 30
    noise_of_sum = np.linalg.norm(stream_of(recipe, np.eye(steps), steps=steps).sum(axis=0))
    rounding = 0.0
    for q, theta, c in zip(spacings(recipe), recipe.decays, recipe.scales):
        for t in range(steps):
            weight = sum(GAINS[s] * theta ** (s - t - 1) for s in range(t + 1, steps))
            rounding += q**2 / 12 * (c * weight) ** 2
    expected = rounding**0.5 / noise_of_sum
    assert added(recipe, steps=steps) == pytest.approx(expected, rel=1e-9)
    larger = replace(recipe, draw_scale=tuple(2.0**7 * d for d in recipe.draw_scale))
    assert added(larger, steps=steps) == pytest.approx(expected, rel=1e-9)
    assert added(recipe, steps=1) == 0.0


def test_half_the_bytes() -> None:
    assert stream()._state.nbytes * 2 == stream(memory="device")._state.nbytes


@pytest.mark.parametrize("recipe", [RECIPE, SCALED, Buffered((0.9999,), (-1e-4,))])
def test_sixteen_deviations_are_in_reach(recipe: Buffered) -> None:
    made = stream(recipe, steps=STEPS)
    noise(made, STEPS)
    k = made._state.float()
    assert float(k.abs().max()) < compact.MOST / 2
    assert float(k.std()) > 4  # and it is not all rounding


@pytest.mark.parametrize("recipe", [RECIPE, SCALED], ids=["taps", "gains"])
@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_a_resumed_stream_has_the_same_bits(recipe: Buffered, kind: str) -> None:
    source = test_source(seed=4, kind=kind)
    made = stream(recipe, source=source)
    noise(made, 7)
    saved = made.state_dict()
    again = stream(recipe, source=source)
    again.load_state_dict(saved)
    assert torch.equal(noise(made, 9), noise(again, 9))


def test_the_torch_form_has_the_bits_of_the_c_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = noise(stream(), 12)
    monkeypatch.setattr(native, "library", lambda: None)
    assert torch.equal(noise(stream(), 12), expected)


def test_a_run_goes_on_with_either_kind_of_buffers() -> None:
    for first, then in (("device", "compact"), ("compact", "device")):
        made, whole = stream(memory=first), stream(memory="device")
        noise(made, 7), noise(whole, 7)
        again = stream(memory=then)
        again.load_state_dict(made.state_dict())
        far = noise(again, 9) - noise(whole, 9)
        assert 0 < float(far.abs().max()) < 0.02


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    """A dither that stood in the saved state would be in what the first step writes with it."""
    begun = stream().state_dict()
    assert not any(kept.any() for kept in begun["buffers"].values())
    other, whole = stream(memory="device"), stream(memory="device")
    other.load_state_dict(begun)
    assert torch.equal(noise(other, 3), noise(whole, 3))


def test_one_dither_for_two_numbers_tells_nothing_of_a_draw() -> None:
    """Two lives round what they have in float32 and in 16 bits with the dithers of one draw: the
    numbers differ by an earlier error, the new errors by no more than by that."""
    source, q = keyed(8), torch.tensor(spacings(RECIPE))[:, None, None]
    whole = stream(source=source)
    noise(whole, 5)
    at_five = whole.state_dict()
    noise(whole)
    plain = stream(source=source, memory="device")
    plain.load_state_dict(at_five)
    noise(plain)
    # A device run from step 4 is in float32 at step 5 already: it lacks the error of that step.
    early = stream(source=source)
    noise(early, 4)
    device = stream(source=source, memory="device")
    device.load_state_dict(early.state_dict())
    noise(device, 2)
    again = stream(source=source)
    again.load_state_dict(device.state_dict())
    one, two = (made.state_dict()["buffers"]["w"] for made in (whole, again))
    exact = (plain.state_dict()["buffers"]["w"], device.state_dict()["buffers"]["w"])
    errors = [(found - s) / q for found, s in zip((one, two), exact)]
    moved = (exact[0] - exact[1]) / q
    apart = torch.remainder(errors[0] - errors[1] + moved + 0.5, 1.0) - 0.5
    assert float(apart.abs().max()) < 0.01
    position = torch.remainder(exact[1] / q, 1.0)  # of the number between two multiples of q
    for error in errors:
        for wave in (torch.cos, torch.sin):
            product = float((error * wave(2 * torch.pi * position)).mean())
            assert abs(product) < 4 * (24 * error.numel()) ** -0.5


def saved_for(made: NoiseStream, recipe: Recipe, steps: int) -> dict[str, Any]:
    """The state as an extension of the run writes it (`release.extension`)."""
    state, count = made.state_dict(), StepPlans.of(recipe).buffers - made.buffers
    more = {n: torch.zeros(count, *SHAPES[n]) for n in SHAPES}
    buffers = {n: torch.cat([own, more[n]]) for n, own in state["buffers"].items()}
    return {**state, "recipe": fingerprint(recipe), "horizon": steps, "buffers": buffers}


def test_a_run_that_is_extended_by_more_buffers_uses_no_dither_twice() -> None:
    """Four buffers and, from step 20 on, six: those that are kept are read as they were written.

    They would be rounded again, by dithers that others of the same step were rounded with.
    """
    four = Buffered((0.9, 0.8, 0.7, 0.6), (-0.01,) * 4)
    six = Buffered((0.9, 0.8, 0.7, 0.6, 0.5, 0.4), (-0.01,) * 6)
    longer = InPhases(((four, 20, 1.0), (six, 20, 1.0)))
    made = stream(four, steps=20)
    noise(made, 2)
    extended = stream(longer, steps=40)
    extended.load_state_dict(saved_for(made, longer, 40))
    kept, found = (one.state_dict()["buffers"]["w"] for one in (made, extended))
    assert torch.equal(found[:4], kept)
    assert torch.equal(noise(extended, 5), noise(made, 5))
    rows = {Dithering((1.0,) * count, 0, 0).row(7) for count in range(1, 33)}
    assert len(rows) == 1


def test_noise_that_goes_on_over_more_steps_keeps_its_spacing() -> None:
    """Another spacing would round what has a dither in it by the same dither, and the error would
    follow the draws."""
    strategy = Blt((0.9, 0.5), (0.2, 0.1), taps=(0.6, 0.5), lag=25)
    short, long = strategy.recipe(20), strategy.recipe(60)
    made, extended = stream(short, steps=20), stream(long, steps=60)
    noise(made, 5)
    extended.load_state_dict(saved_for(made, long, 60))
    assert torch.equal(extended.state_dict()["buffers"]["w"], made.state_dict()["buffers"]["w"])
    assert torch.equal(noise(extended, 5), noise(made, 5))


def test_a_fresh_key_leaves_what_was_written_readable() -> None:
    first = Source(bytes(32))
    made = stream(source=first)
    noise(made, 6)
    before = made.state_dict()
    again = stream(source=first.rekeyed(6, bytes([7] * 32)))
    again.load_state_dict(before)
    assert torch.equal(again.state_dict()["buffers"]["w"], before["buffers"]["w"])
    assert not torch.equal(noise(made), noise(again))


def test_phases_have_spacings_of_their_own_and_forget() -> None:
    slow = Buffered((0.999,), (-0.001,))
    recipe = InPhases(((RECIPE, 4, 1.0), (slow, 6, 2.0), (FeedForward((1.0, -0.5)), 3, 1.0)))
    plans = CompactPlans.of(recipe, StepPlans.of(recipe))
    assert plans.dithering(3).spacing == spacings(RECIPE)
    assert plans.dithering(4).spacing[0] == spacings(slow)[0] > spacings(RECIPE)[0]
    whole, there = stream(recipe, steps=13), stream(recipe, memory="device", steps=13)
    assert float((noise(whole, 13) - noise(there, 13)).abs().max()) < 0.02
    begun = stream(recipe, steps=13)
    begun.begin_at(4)
    later = stream(recipe, steps=13)
    noise(later, 4)
    assert torch.equal(noise(begun, 6), noise(later, 6))


def test_buffers_that_a_phase_lacks_hold_draws_of_any_size() -> None:
    large = Buffered((0.9,), (-0.1,), draw_scale=(2.0**17,) * 6)
    found = noise(stream(InPhases(((large, 6, 1.0), (RECIPE, 4, 1.0))), steps=10), 10)
    assert bool(found.isfinite().all())


def test_beyond_the_range_is_nan_for_good() -> None:
    made = stream()
    noise(made, 2)
    saved = made.state_dict()
    saved["buffers"]["w"][0, 0, 0], saved["buffers"]["w"][1, 0, 1] = 1e9, float("nan")
    made.load_state_dict(saved)
    for _ in range(3):
        assert noise(made)[0].isnan().nonzero().tolist() == [[0, 0], [0, 1]]


def test_what_is_not_offered_says_so() -> None:
    for recipe in (Forest("honaker", STEPS), Recursive((0.8, -0.4))):
        with pytest.raises(Unsupported, match=r"compact.*blt"):
            stream(recipe)
    assert stream(FeedForward((1.0,))).buffers == 0
    with pytest.raises(InvalidInput, match="dithers"):
        Dithering((1.0, 1.0, 1.0), 0, 0).row(2**27)
    assert Dithering((1.0,) * 32, 0, 0).row(2**27 - 1) + 16 == 2**32
    many = Buffered(tuple(0.01 * b for b in range(33)), (-0.001,) * 33)
    with pytest.raises(Unsupported, match="at most 32 buffers"):
        stream(many)
