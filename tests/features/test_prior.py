"""The prior: whitened, of one length, learned from public images alone, kept in a file."""

from __future__ import annotations

import os

import pytest
import torch

from noshuffle.errors import InvalidInput
from noshuffle.features import NAMES, encoder, fixed, prior
from noshuffle.features.encoder import contrast, learned
from noshuffle.features.kept import kept
from noshuffle.features.leaves import leaves
from noshuffle.features.prior import LENGTH, Prior
from noshuffle.features.views import view
from noshuffle.features.whitening import FLOOR, Whitening

SMALL = {"channels": 3, "side": 16, "patches": 8, "images": 60, "seed": 1}


@pytest.fixture
def _few(monkeypatch) -> None:
    monkeypatch.setattr(prior, "IMAGES", 40)
    monkeypatch.setattr(prior, "LEARNED_FROM", 80)
    monkeypatch.setattr(encoder, "BATCH", 16)


def test_whitening_has_the_covariance_of_the_identity() -> None:
    mix = torch.randn(5, 5)
    maps = torch.einsum("nchw,cd->ndhw", torch.randn(4000, 5, 2, 2), mix) + 3.0
    white = Whitening.of(maps)
    apart = (maps - white.mean[:, None, None]).movedim(1, 3).flatten(0, 2) @ white.matrix
    spread = torch.linalg.eigvalsh((maps.movedim(1, 3).flatten(0, 2) - white.mean).T.cov())
    wanted = torch.sort(spread / (spread + FLOOR * spread.mean())).values
    torch.testing.assert_close(
        torch.linalg.eigvalsh(apart.T.cov()), wanted.float(), rtol=1e-3, atol=1e-3
    )


def test_rows_have_one_length_whatever_the_image() -> None:
    made = Prior.of(**SMALL, steps=0)
    images = torch.cat([leaves(3, side=16, seed=2), torch.zeros(1, 3, 16, 16)])
    found = made(images)
    assert found.shape == (4, 2 * 8 * 4)
    torch.testing.assert_close(found.norm(dim=1), torch.full((4,), LENGTH))
    torch.testing.assert_close(found, made(images.flip(3)))
    sided = Prior.of(**SMALL, steps=0, mirror=False)
    assert not torch.allclose(sided(images), sided(images.flip(3)), atol=0.1)


@pytest.mark.usefixtures("_few")
def test_an_encoder_adds_three_maps_and_sees_each_image_by_itself() -> None:
    made = Prior.of(**SMALL, steps=2, width=4)
    images = leaves(5, side=16, seed=2)
    found = made(images)
    assert found.shape == (5, 2 * 8 * 4 + (4 + 8 + 16) * 16)
    torch.testing.assert_close(found.norm(dim=1), torch.full((5,), LENGTH))
    images[0] = 1e3
    torch.testing.assert_close(made(images)[1:], found[1:], rtol=1e-4, atol=1e-4)
    assert made.encoder is not None
    made.encoder.train()
    with pytest.raises(InvalidInput, match="eval"):
        made(images)


def test_the_loss_is_least_where_fellows_are_alike() -> None:
    z = torch.nn.functional.normalize(torch.randn(6, 32), dim=1)
    alike = contrast(torch.cat([z, z]))
    slow = []
    both = torch.cat([z, z])
    for i in range(12):
        scores = [float(both[i] @ both[j]) / encoder.TEMPERATURE for j in range(12) if j != i]
        own = float(both[i] @ both[(i + 6) % 12]) / encoder.TEMPERATURE
        slow.append(torch.logsumexp(torch.tensor(scores), 0) - own)
    torch.testing.assert_close(alike, torch.stack(slow).mean(), rtol=1e-4, atol=1e-5)
    assert float(alike) < float(contrast(torch.cat([z, z.flip(0)])))


def test_an_encoder_learns_which_views_belong_together() -> None:
    images = ((leaves(64, side=16, seed=1) + 1) * 127.5).round().byte()
    draw = torch.Generator().manual_seed(3)
    x = images.float() / 127.5 - 1
    both = torch.cat([view(x, draw), view(x, draw)])
    losses = []
    for steps in (1, 40):
        net = learned(images, steps=steps, width=8, batch=32, seed=1)
        net.train()  # statistics of this batch: after few steps the kept ones are still far off
        with torch.no_grad():
            losses.append(float(contrast(net(both))))
    assert losses[1] < losses[0] - 0.3
    with pytest.raises(InvalidInput, match="bytes"):
        learned(x, steps=1, seed=1)


def test_views_stay_in_range_and_differ() -> None:
    draw = torch.Generator().manual_seed(3)
    for channels in (1, 3):
        images = leaves(20, side=16, channels=channels, seed=1)
        one, other = view(images, draw), view(images, draw)
        assert one.shape == images.shape
        assert bool((one.abs() <= 1).all())
        assert not torch.allclose(one, other, atol=0.1)


@pytest.mark.usefixtures("_few")
def test_what_was_learned_is_kept(tmp_path) -> None:
    how = {**SMALL, "steps": 2, "width": 4, "mirror": False, "folder": tmp_path}
    told: list[str] = []
    first = kept(**how, say=told.append)
    [path] = list(tmp_path.iterdir())
    changed, images = os.stat(path).st_mtime_ns, leaves(3, side=16, seed=2)
    again = kept(**how, say=told.append)
    assert torch.equal(again(images), first(images))
    assert os.stat(path).st_mtime_ns == changed
    path.write_bytes(path.read_bytes()[:-100])
    kept(**how, say=told.append)
    assert "cannot be read" in told[-1]
    state = torch.load(path, weights_only=True)
    torch.save({**state, "offset": state["offset"] * torch.nan}, path)
    torch.testing.assert_close(kept(**how, say=told.append)(images), first(images))
    assert "finite" in told[-1]
    kept(**{**how, "seed": 2})
    assert len(list(tmp_path.iterdir())) == 2


def test_images_that_are_no_numbers_or_too_small_are_one_line() -> None:
    with pytest.raises(InvalidInput, match="uint8"):
        Prior.of(**SMALL, steps=0)(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(InvalidInput, match="side must be"):
        Prior.of(**{**SMALL, "side": 1}, steps=0)


def test_features_by_name() -> None:
    for name in ("scattering", "mirrored"):
        assert fixed(name, channels=1, side=8)(torch.zeros(2, 1, 8, 8)).shape == (2, 81, 2, 2)
    assert "patches" in NAMES
    for wrong in ("wavelets", "patches:0", "patches:x", "prior:3"):
        with pytest.raises(InvalidInput, match="features"):
            fixed(wrong, channels=1, side=8)
