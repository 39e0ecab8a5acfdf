"""On an accelerator the same counters give the same bits as in ordinary memory."""

from __future__ import annotations

import pytest
import torch

from noshuffle.noise import NoiseStream, Source, test_source
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

SHAPES = {"w": (300, 700), "b": (3,)}
RECIPES: dict[str, Recipe] = {
    "identity": FeedForward((1.0,)),
    "banded inverse": FeedForward((1.0, -0.5, 0.1)),
    "banded": Recursive((1.0, -0.5, -0.375)),
    "blt": Buffered((0.9, 0.5), (-0.1, -0.3), ((0, 1.0), (4, 0.3))),
    "tree": Forest("honaker", 9, 4, completion=True),
}


@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_draws_are_bit_identical_to_the_cpu(kind: str) -> None:
    source = test_source(seed="cuda", kind=kind)
    here, there = torch.empty(70_001), torch.empty(70_001, device="cuda")
    source.normal_(here, row=5, name="w", start=17)
    source.normal_(there, row=5, name="w", start=17)
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("has_ring", [False, True])
def test_streams_are_bit_identical_and_resume_across_devices(name: str, has_ring: bool) -> None:
    source = test_source(seed="cuda", kind="philox")
    if has_ring:
        source = Source(source.key, "philox", later=((2, bytes(32)), (6, bytes(range(32)))))
    streams = {
        device: NoiseStream(RECIPES[name], source, SHAPES, scale=0.3, steps=9, device=device)
        for device in ("cpu", "cuda")
    }
    for _ in range(9):
        values = {}
        for device, stream in streams.items():
            values[device] = {k: torch.zeros(s, device=device) for k, s in SHAPES.items()}
            stream.add_(values[device])
        for key in SHAPES:
            assert torch.equal(values["cpu"][key], values["cuda"][key].cpu())
        streams["cuda"].load_state_dict(streams["cpu"].state_dict())


def test_auto_is_philox_on_cuda() -> None:
    assert test_source(seed=0).on(torch.device("cuda")).kind == "philox"
