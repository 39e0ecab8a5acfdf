"""Scattering features: plain convolutions agree, images are transformed by themselves."""

from __future__ import annotations

import pytest
import torch

from noshuffle.errors import InvalidInput
from noshuffle.features import scattering as module
from noshuffle.features.scattering import CHANNELS, mirrored, normalised, scattering


def images(rows: int = 2, channels: int = 1, side: int = 8) -> torch.Tensor:
    return torch.randn(rows, channels, side, side, generator=torch.Generator().manual_seed(1))


def slow(image: torch.Tensor) -> torch.Tensor:
    """The slow twin: sums over shifts on the torus, one filter after the other."""
    step = module.STEP
    x = torch.nn.functional.pad(image[None, None], (step,) * 4, mode="reflect")[0, 0]
    size = tuple(x.shape)
    low, waves = (torch.fft.ifft2(part) for part in module._filters(size, x.device))

    def around(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(size, dtype=kernel.dtype)
        for i in range(size[0]):
            for j in range(size[1]):
                out = out + kernel[i, j] * torch.roll(x, (i, j), (0, 1))
        return out

    def read(x: torch.Tensor) -> torch.Tensor:
        return around(x, low).real[step:-step:step, step:-step:step]

    first = [[around(x, wave).abs() for wave in scale] for scale in waves]
    out = [read(x), *(read(own) for scale in first for own in scale)]
    out.append(read(around(first[0][2], waves[1][5]).abs()))  # one of the second order
    return torch.stack(out)


def test_features_are_those_of_sums_over_shifts() -> None:
    x = images(1)
    found, right = scattering(x)[0], slow(x[0, 0])
    torch.testing.assert_close(found[:17], right[:17], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[17 + 2 * 8 + 5], right[17], rtol=1e-4, atol=1e-5)


def test_images_and_channels_are_transformed_by_themselves() -> None:
    x = images(3, 2)
    whole = scattering(x, chunk=2)
    assert whole.shape == (3, 2 * CHANNELS, 2, 2)
    torch.testing.assert_close(whole[1, CHANNELS:], scattering(x[1:2, 1:])[0])
    x[0] *= 1e6
    assert torch.equal(scattering(x, chunk=2)[2], whole[2])
    torch.testing.assert_close(normalised(whole)[1], normalised(whole[1:2])[0])


def test_mirrored_features_do_not_know_left_from_right() -> None:
    x = images(2)
    found = mirrored(x)
    assert torch.equal(found, mirrored(x.flip(3)))
    mean = (normalised(scattering(x)) + normalised(scattering(x.flip(3)))) / 2
    torch.testing.assert_close(found, mean)
    assert not torch.allclose(found, normalised(scattering(x)), atol=1e-2)


def test_wavelets_have_mean_zero_and_a_shift_changes_little() -> None:
    flat = scattering(torch.ones(1, 1, 16, 16))[0]
    assert float((flat[0] - 1).abs().max()) < 1e-5
    assert float(flat[1:].abs().max()) < 1e-5
    x = torch.nn.functional.avg_pool2d(images(1, side=66), 3, 1)
    one, moved = scattering(x), scattering(x.roll(1, 3))
    change = float((one - moved).norm() / one.norm())
    assert change < 0.5 * float((x - x.roll(1, 3)).norm() / x.norm())


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 1, 9, 8), (2, 1, 4, 4)])
def test_other_shapes_are_refused(shape) -> None:
    with pytest.raises(InvalidInput, match="multiple of 4"):
        scattering(torch.zeros(shape))
