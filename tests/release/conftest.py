"""What tests of the release core leave behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """The driver of many ranks makes one; tests of other files ask what happens without."""
    yield
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
