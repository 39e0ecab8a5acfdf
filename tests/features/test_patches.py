"""Responses to patches: a slow twin agrees, images are transformed by themselves."""

from __future__ import annotations

import pytest
import torch

from noshuffle.errors import InvalidInput
from noshuffle.features import patches as module
from noshuffle.features.leaves import leaves
from noshuffle.features.patches import CONTRAST, THRESHOLD, Patches


def slow(made: Patches, image: torch.Tensor) -> torch.Tensor:
    """One window after the other, one field after the other."""
    size, sides = made.filters.shape[2], image.shape[1:]
    high, wide = (n - size + 1 for n in sides)
    out = torch.zeros(2 * len(made.filters), high, wide)
    for i in range(high):
        for j in range(wide):
            window = image[:, i : i + size, j : j + size].flatten()
            window = (window - window.mean()) / (window.var() + CONTRAST).sqrt()
            z = made.filters.flatten(1) @ window - made.offset
            out[:, i, j] = torch.cat([z - THRESHOLD, -z - THRESHOLD]).clamp_min(0)
    return torch.nn.functional.adaptive_avg_pool2d(out, made.pool)


@pytest.mark.parametrize(("channels", "size", "pool"), [(3, 4, 2), (1, 3, 1), (3, 5, 3)])
def test_responses_are_those_of_single_windows(channels: int, size: int, pool: int) -> None:
    made = Patches.of(
        leaves(30, side=12, channels=channels, seed=1), count=5, size=size, pool=pool, seed=2
    )
    images = leaves(3, side=12, channels=channels, seed=4)
    found = made(images)
    for image, own in zip(images, found):
        torch.testing.assert_close(own, slow(made, image), rtol=1e-4, atol=1e-4)


def test_images_are_transformed_by_themselves_in_any_chunk(monkeypatch) -> None:
    made = Patches.of(leaves(30, side=12, seed=1), count=5, seed=2)
    images = leaves(5, side=12, seed=4)
    whole = made(images)
    monkeypatch.setitem(module.CHUNKS, "cpu", 1)
    torch.testing.assert_close(made(images), whole)
    images[0] = 1e6
    torch.testing.assert_close(made(images)[1:], whole[1:])


def test_windows_are_whitened() -> None:
    """Responses to the directions of a dictionary are as large in one as in another."""
    images = leaves(200, side=16, seed=1)
    made = Patches.of(images, count=64, seed=2)
    found = made(images).mean((0, 2, 3))
    assert float(found.max() / found.median()) < 3


def test_brightness_and_contrast_change_little() -> None:
    made = Patches.of(leaves(50, side=16, seed=1), count=8, seed=2)
    images = leaves(4, side=16, seed=3)
    one, other = made(images), made(0.5 * images + 0.2)
    assert float((one - other).norm() / one.norm()) < 0.1


def test_no_images_have_no_features() -> None:
    made = Patches.of(leaves(30, side=12, seed=1), count=5, seed=2)
    assert made(torch.zeros(0, 3, 12, 12)).shape == (0, 10, 2, 2)


def test_what_does_not_fit_is_refused() -> None:
    images = leaves(2, side=8, seed=1)
    with pytest.raises(InvalidInput, match="at least 7"):
        Patches.of(images[..., :6], count=1, seed=1)
    with pytest.raises(InvalidInput, match="there are 18 windows"):
        Patches.of(images, count=19, seed=1)
    made = Patches.of(images, count=4, seed=1)
    with pytest.raises(InvalidInput, match=r"\(rows, 3"):
        made(images[:, :1])
