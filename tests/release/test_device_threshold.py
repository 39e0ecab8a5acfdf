"""A clip norm that a device moves itself: its host twin, step by step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from noshuffle.clipping.adaptive import QuantileClip, shifted_count
from noshuffle.errors import NoshuffleError
from noshuffle.noise import test_source
from noshuffle.noise.grid import grid_step
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.release.device_threshold import DeviceThreshold
from noshuffle.release.keys import KeyRing
from noshuffle.release.threshold import AdaptiveThreshold
from noshuffle.strategies import identity, tree

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
UNITS, STEPS = 40, 24


def host(config, strategy=None):
    rule = Epochs(epochs=1, steps_per_epoch=STEPS)
    plan = Plan(participation=rule, strategy=strategy or identity(), noise_multiplier=1.0)
    return AdaptiveThreshold(config, plan, KeyRing.new(test_source(seed=3)))


def on(device, threshold, divisor=7.0):
    made = DeviceThreshold(threshold, divisor=divisor, device=torch.device(device))
    made.stage()
    return made


def batches():
    """Norms, and who is present; NaN and infinity among them."""
    g = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        norms = torch.exp(torch.randn(UNITS, generator=g))
        norms[torch.rand(UNITS, generator=g) < 0.1] = torch.nan
        norms[torch.rand(UNITS, generator=g) < 0.1] = torch.inf
        yield norms, torch.rand(UNITS, generator=g) < 0.8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", [identity(), tree(restart_every=4)])
@pytest.mark.parametrize(
    "more",
    [{"bit_noise": 6.0}, {"bit_noise": 0.9, "rate": 3.0, "smallest": 0.3, "largest": 0.5}],
)
def test_a_device_moves_the_norm_as_the_host_does(device, strategy, more):
    config = QuantileClip(initial=0.4, units=UNITS, **more)
    slow, own = host(config, strategy), host(config, strategy)
    fast = on(device, own)
    fast.prepare()  # moves nothing
    for step, (norms, present) in enumerate(batches()):
        slow.learn([SimpleNamespace(norms=norms, present=present)], step=step)
        fast.stage()
        fast.count_(norms.to(device), present.to(device))
        assert float(fast.printed[0]) == shifted_count(norms, own.state, present=present)
        assert float(fast.printed[1]) == own.state.threshold
        fast.announce(step)
        fast.move_()
        # exp is the device's own, all else is the same to the bit
        assert own.state_dict() == pytest.approx(slow.state_dict(), rel=1e-14, abs=0.0)
        norm = torch.tensor(own.state.threshold, dtype=torch.float64)
        assert fast.before.cpu() == (1.0 / norm).float()
        assert fast.after.cpu() == (norm / 7.0).float()
    assert slow.state.threshold != 0.4


@pytest.mark.parametrize("device", DEVICES)
def test_the_noisy_count_is_on_the_grid_of_its_noise(device):
    """Two estimates in a row give it back, and it must say no more than its grid."""
    config = QuantileClip(initial=1.0, units=UNITS, bit_noise=6.0, rate=0.5)
    threshold = host(config)
    fast = on(device, threshold)
    for step, (norms, present) in enumerate(batches()):
        before = fast.read().estimate
        fast.count_(norms.to(device), present.to(device))
        fast.announce(step)
        fast.move_()
        moved = torch.tensor(fast.read().estimate / before, dtype=torch.float64).log()
        noisy = float(config.quantile - moved / config.rate - 0.5) * UNITS
        assert abs(noisy / grid_step(6.0) - round(noisy / grid_step(6.0))) < 1e-6
        count = float(fast.printed[0])
        assert noisy != count
        wanted = threshold.noise_of(step)(count)
        assert noisy == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_the_count_on_a_device_is_the_hosts(device):
    """NaN, infinities, units that are absent, and a norm that is the estimate but for float32."""
    threshold = host(QuantileClip(initial=0.1, units=8, bit_noise=4.0))
    norms = torch.tensor([0.1, 0.2, torch.nan, torch.inf, 0.05, 0.01, -0.0, 0.1 + 2e-8])
    present = torch.tensor([1, 1, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
    fast = on(device, threshold)
    fast.count_(norms.to(device), present.to(device))
    wanted = shifted_count(norms, threshold.state, present=present)
    assert float(fast.printed[0]) == wanted
    assert wanted in (-1.0, 0.0)  # two or three of six
    long = torch.rand(5000)
    fast.count_(long.to(device), (long > 0.05).to(device))
    assert float(fast.printed[0]) == shifted_count(long, threshold.state, present=long > 0.05)


def test_nobody_goes_on_with_an_older_norm():
    threshold = host(QuantileClip(initial=0.1, units=8, bit_noise=4.0))
    fast = on("cpu", threshold)

    class Lost:
        def read(self):
            raise NoshuffleError("the device lost a step")

    threshold.follow(Lost())
    for _ in range(2):
        with pytest.raises(NoshuffleError, match="lost a step"):
            _ = threshold.clip
    with pytest.raises(NoshuffleError, match="lost a step"):
        fast.stage()
    threshold.load_state_dict({"threshold": 0.3, "estimate": 0.2})
    fast.stage()
    assert fast.read() == threshold.state
    assert threshold.on_device is None  # nothing was released with it yet
