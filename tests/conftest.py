"""What holds for every test: where chance begins, and how hypothesis searches."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import settings

#: Examples that take long on a busy machine are not wrong. Where nobody watches, the same examples
#: in every run, so that a change is judged by itself; everywhere else other ones every time.
settings.register_profile("here", deadline=None)
settings.register_profile("watched by nobody", deadline=None, derandomize=True, database=None)
settings.load_profile("watched by nobody" if os.environ.get("CI") else "here")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The generators of numpy and torch begin alike for every test, whatever ran before it."""
    np.random.seed(0)  # noqa: NPY002 (the global one, which scikit-learn draws from)
    torch.manual_seed(0)
