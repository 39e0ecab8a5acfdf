"""Where nobody watches, no test depends on chance: what draws here draws the same in every run."""

from __future__ import annotations

import os
import random
import secrets
import uuid

import numpy as np
import pytest
import torch
from tests.conftest import Entropy


def drawn() -> list[object]:
    """One draw of everything that the package, its tests and their libraries draw from."""
    system = [os.urandom(8), secrets.token_bytes(8), uuid.uuid4(), np.random.default_rng().random()]
    return [*system, secrets.SystemRandom().random(), random.random(), torch.rand(1).item()]


def test_entropy_is_that_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entropy = Entropy(os.urandom)
    monkeypatch.setattr(os, "urandom", entropy)
    monkeypatch.setattr(random, "_urandom", entropy)
    found = []
    for name in ("one", "one", "other"):
        entropy.begin(name)
        found.append(drawn() + drawn())
    first, again, other = found
    assert first == again
    assert len(set(map(str, first))) == 14  # no draw twice
    assert not set(map(str, first[:5])) & set(map(str, other))


def test_children_have_entropy_of_their_own() -> None:
    entropy = Entropy(lambda size: b"system"[:size])
    entropy.begin("a test")
    assert entropy(6) != b"system"
    entropy.process += 1  # as a child sees it
    assert entropy(6) == b"system"
