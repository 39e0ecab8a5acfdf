"""One key, one ledger, one place: copies, lost ledgers and rolled-back ones are refused."""

from __future__ import annotations

import shutil
import stat

import pytest
import torch
from torch import nn

from noshuffle.errors import ReplayRefused
from noshuffle.participation import Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training import privatize


def begin(path, rule=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plan = Plan(
        participation=rule or SinglePass(steps=6), strategy=identity(), noise_multiplier=1.0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return privatize(model, optimizer, plan, clip_norm=1.0, batch_size=2, run=path, **options)


def go(private, step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 3, generator=generator), torch.randint(2, (2,), generator=generator)
    private.step(nn.CrossEntropyLoss(), x, y, ids=[2 * step, 2 * step + 1])


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    private = begin(path)
    go(private, 0)
    go(private, 1)
    private.save()
    private.close()
    return path


def test_a_copy_does_not_go_on_unless_it_was_moved(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(ReplayRefused, match="copy or a restored backup"):
        begin(copy)
    moved = begin(copy, moved=True)
    assert moved.resume() == 2
    go(moved, 2)
    moved.close()
    begin(copy).close()  # the promise is kept in the ledger
    again = begin(run)  # the folder itself was never moved
    assert again.resume() == 2
    again.close()


def test_a_renamed_folder_goes_on(run, tmp_path):
    again = begin(run.rename(tmp_path / "other"))
    assert again.resume() == 2
    again.close()


def test_a_lost_ledger_is_not_begun_anew(run):
    for file in run.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(ReplayRefused, match="missing or older"):
        begin(run)


def test_a_rolled_back_ledger_is_told_by_the_checkpoints(tmp_path):
    path = tmp_path / "run"
    private = begin(path)
    go(private, 0)
    private.save()
    private.close()
    early = (path / "ledger.sqlite").read_bytes()
    private = begin(path)
    private.resume()
    go(private, 1)
    private.save()
    private.close()
    (path / "ledger.sqlite").write_bytes(early)  # in place: the inode stays
    with pytest.raises(ReplayRefused, match="missing or older"):
        begin(path)


def test_secret_draws_are_readable_by_their_owner_only(tmp_path):
    begin(tmp_path / "run", Poisson(rate=0.1, steps=4)).close()
    mode = stat.S_IMODE((tmp_path / "run" / "ledger.sqlite").stat().st_mode)
    assert mode == 0o600
