"""Copies that are waited for, and those that nobody could wait for."""

import torch

from noshuffle.device_copy import DeviceCopy


def test_a_copy_is_of_the_moment():
    for value in (
        torch.arange(5.0),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.ones(2).expand(2),
    ):
        want, copy = value.clone(), DeviceCopy(value)
        if value.numel():
            value.contiguous().zero_()
        assert torch.equal(copy.read(), want)
        assert copy.read().dtype is value.dtype


def test_only_what_an_event_stands_behind_is_left_to_itself(monkeypatch):
    """Other accelerators copy in their own time too, and are waited for at once."""
    asked, own = [], torch.ones(2)
    real = torch.Tensor.copy_

    def copy_(self, source, non_blocking=False):
        if source.data_ptr() == own.data_ptr():  # what ends during a test may copy, too
            asked.append(non_blocking)
        return real(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    DeviceCopy(own)
    assert asked
    assert not any(asked)  # what a test before left active may pass a call on twice
