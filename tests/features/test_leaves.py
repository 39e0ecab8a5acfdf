"""Dead leaves: repeatable, covered, with edges at every scale."""

from __future__ import annotations

import pytest
import torch

from noshuffle.errors import InvalidInput
from noshuffle.features import leaves as module
from noshuffle.features.leaves import leaves


def test_a_seed_gives_the_same_images_and_another_one_others() -> None:
    first = leaves(4, side=16, seed=1)
    assert torch.equal(first, leaves(4, side=16, seed=1))
    assert not torch.equal(first, leaves(4, side=16, seed=2))
    assert first.shape == (4, 3, 16, 16)
    assert bool((first.abs() <= 1).all())


def test_grey_images_are_the_mean_of_their_colours() -> None:
    colour, grey = (leaves(3, side=12, channels=c, seed=5) for c in (3, 1))
    torch.testing.assert_close(grey, colour.mean(1, keepdim=True))


def test_more_images_than_a_chunk(monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 3)
    images = leaves(8, side=8, seed=1)
    assert images.shape == (8, 3, 8, 8)
    assert len({tuple(image.flatten().tolist()) for image in images}) == 8


def test_images_are_in_pieces_not_noise() -> None:
    """Neighbours are alike, as in photographs, and differ at edges far more than a normal would."""
    images = leaves(200, seed=3)
    step = (images[..., 1:] - images[..., :-1]).flatten()
    assert 0.15 < float(images.std()) < 0.8
    assert float(step.std()) < 0.5 * float(images.std())
    kurtosis = float((step / step.std()).pow(4).mean())
    assert kurtosis > 6  # 3 for a normal


@pytest.mark.parametrize("wrong", [{"count": 0}, {"side": 0}, {"channels": 2}])
def test_what_cannot_be_is_refused(wrong) -> None:
    with pytest.raises(InvalidInput):
        leaves(**{"count": 1, "side": 8, "channels": 3, "seed": 1, **wrong})
