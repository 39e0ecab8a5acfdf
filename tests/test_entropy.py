"""Where nobody watches, no test depends on chance: what draws here draws the same in every run."""

from __future__ import annotations

import os
import random
import secrets
import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import Entropy

GENERATORS: Any = SimpleNamespace(
    a=np.random.default_rng(3), b=torch.Generator().manual_seed(3), c=random.Random(3)
)


def drawn() -> list[object]:
    """One draw of everything that the package, its tests and their libraries draw from."""
    system = [os.urandom(8), secrets.token_bytes(8), uuid.uuid4(), np.random.default_rng().random()]
    own = [GENERATORS.a.random(), torch.rand(1, generator=GENERATORS.b), GENERATORS.c.random()]
    return [*system, secrets.SystemRandom().random(), random.random(), torch.rand(1), *own]


def test_entropy_is_that_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entropy = Entropy(os.urandom)
    monkeypatch.setattr(os, "urandom", entropy)
    monkeypatch.setattr(random, "_urandom", entropy)
    entropy.know([GENERATORS])
    found = []
    for name in ("one", "one", "other"):
        entropy.begin(name)
        found.append([*map(str, drawn() + drawn())])
    first, again, other = found
    assert first == again
    assert len(set(first)) == 20  # no draw twice
    assert not set(first[:5]) & set(other)


def test_children_have_entropy_of_their_own() -> None:
    entropy = Entropy(lambda size: b"system"[:size])
    entropy.begin("a test")
    assert entropy(6) != b"system"
    entropy.process += 1  # as a child sees it
    assert entropy(6) == b"system"
    entropy.go_on("a child")
    first = entropy(6)
    assert first not in (b"system", entropy(6))
    entropy.go_on("a child")
    assert entropy(6) == first
