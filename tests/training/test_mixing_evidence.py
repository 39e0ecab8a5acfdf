"""A model that begins to mix examples after steps were released: ledger, statement and verdict."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import noshuffle as ns
from noshuffle.errors import Unsupported
from noshuffle.release.opening import fork
from noshuffle.release.verify import verify
from noshuffle.training.distributed import privatize_distributed

LOSS = nn.CrossEntropyLoss()
ROWS, STEPS, BEGINS, LOOK = 6, 8, 3, 5


class Late(nn.Module):
    """A linear model that adds the mean of the batch once it was told to."""

    is_mixing = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + x.mean(0) if Late.is_mixing else x)


@pytest.fixture(autouse=True)
def _looks(monkeypatch: pytest.MonkeyPatch):
    """One full look, at call `LOOK` + 1, and no quick ones."""
    monkeypatch.setattr("noshuffle.clipping.later_looks.next_quick", lambda calls, **_: 10**9)
    for where in (
        "clipping.later_looks",
        "clipping.per_example",
        "training.compiled.programs",
    ):
        monkeypatch.setattr(
            f"noshuffle.{where}.next_full", lambda calls: LOOK + 1 if calls < LOOK else 10**9
        )
    Late.is_mixing = False
    yield
    Late.is_mixing = False


def plan(steps: int = STEPS) -> ns.Plan:
    return ns.Plan.fit(ns.SinglePass(steps=steps), mechanism="tree", noise_multiplier=2.0)


def begin(run=None, *, make=ns.privatize, **options) -> ns.Private:
    torch.manual_seed(0)
    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {"clip_norm": 1.0, "batch_size": ROWS, "run": run, **options}
    return make(model, optimizer, plan(), **own)


def rows(step: int) -> tuple[Tensor, Tensor, np.ndarray]:
    rng = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 4, generator=rng), torch.randint(3, (ROWS,), generator=rng)
    return x, y, np.arange(ROWS) + ROWS * step


def walk(private: ns.Private, until: int) -> None:
    for step in range(private.steps_done, until):
        Late.is_mixing = step >= BEGINS
        x, y, ids = rows(step)
        told = nullcontext()
        if step == LOOK:
            told = pytest.warns(RuntimeWarning, match="apart no longer")
        with told as heard:
            private.step(LOSS, x, y, ids=ids)
        assert {one.filename for one in heard or ()} <= {__file__}


def is_said(statement: ns.PrivacyStatement) -> bool:
    """Whether a statement says which steps may not be covered."""
    said = [line for line in statement.assumptions if "NOT PRIVATE" in line]
    assert statement.headline().startswith("NOT PRIVATE") == bool(said)
    return any(f"steps 0 to {LOOK}: the loss of an example" in line for line in said)


def test_it_is_in_the_ledger_and_on_the_disk_before_the_step_is_released(tmp_path) -> None:
    private = begin(tmp_path / "run")
    walk(private, LOOK)
    assert not private.statement().headline().startswith("NOT")
    private.ledger.record = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="apart no longer"), pytest.raises(ZeroDivisionError):
        private.step(LOSS, *rows(LOOK)[:2], ids=rows(LOOK)[2])
    assert "NOT PRIVATE" in (tmp_path / "run/statement.json").read_text()
    assert private.ledger.released == LOOK
    found = verify(tmp_path / "run")  # as a killed process leaves it
    assert found.answer == "NOT PRIVATE", found.words()


@pytest.mark.parametrize("ends", ["closed", "sealed", "resumed", "forked"])
def test_a_run_that_began_to_mix_is_not_private(tmp_path, ends: str) -> None:
    run = tmp_path / "run"
    private = begin(run)
    walk(private, STEPS if ends == "sealed" else LOOK + 1)
    assert is_said(private.statement())
    private.save()
    private.close()
    if ends == "resumed":
        private = begin(run)
        assert private.resume() == LOOK + 1
        Late.is_mixing = False
        for step in range(LOOK + 1, STEPS):
            private.step(LOSS, *rows(step)[:2], ids=rows(step)[2])
        assert is_said(private.statement())
        private.close()
    if ends == "forked":
        run = fork(run, tmp_path / "fork").path
        Late.is_mixing = False
        private = begin(run)
        private.step(LOSS, *rows(20)[:2], ids=rows(20)[2])
        assert is_said(private.statement())
        private.close()
    verdict = verify(run)
    assert (verdict.answer, verdict.exit_code) == ("NOT PRIVATE", 4), verdict.words()
    assert not verdict.refuted
    assert "changed each other" in verdict.not_private[0]


def test_a_process_that_finds_it_at_its_start_says_so_of_the_steps_before(tmp_path) -> None:
    """Mixing began behind the last look of a process that ended."""
    private = begin(tmp_path / "run")
    walk(private, LOOK - 1)
    private.save()
    private.close()
    again = begin(tmp_path / "run")
    again.resume()
    again.step(LOSS, *rows(LOOK - 1)[:2], ids=rows(LOOK - 1)[2])
    assert any("NOT PRIVATE" in line for line in again.statement().assumptions)
    again.close()
    assert verify(tmp_path / "run").answer == "NOT PRIVATE"


def test_a_model_that_always_mixed_is_private_in_every_process(tmp_path) -> None:
    """It is written out from the first step on."""
    for until in (3, STEPS):
        private = begin(tmp_path / "run")
        private.resume()
        Late.is_mixing = True
        for step in range(private.steps_done, until):
            private.step(LOSS, *rows(step)[:2], ids=rows(step)[2])
        private.save()
        private.close()
    assert verify(tmp_path / "run").answer == "PROVED"


@pytest.mark.parametrize("has_rule", [True, False])
def test_a_model_that_begins_to_remember_is_refused_and_not_private(tmp_path, has_rule) -> None:
    class Recalls(nn.Linear if not has_rule else nn.Module):  # type: ignore[misc]
        last, is_on = 0.0, False

        def forward(self, x: Tensor) -> Tensor:
            shift, self.last = self.last, float(x.detach().abs().max()) if self.is_on else 0.0
            return self.inner(x + shift) if has_rule else super().forward(x + shift)

    model = Recalls() if has_rule else Recalls(4, 3)
    if has_rule:
        model.inner = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"clip_norm": 1.0, "batch_size": ROWS, "run": tmp_path / "run"}
    private = ns.privatize(model, optimizer, plan(), **options)
    for step in range(LOOK + 1):
        model.is_on = step >= BEGINS
        refused = pytest.raises(Unsupported, match="keeps something of one example")
        with refused if step == LOOK else nullcontext():
            private.step(LOSS, *rows(step)[:2], ids=rows(step)[2])
    assert private.steps_released == LOOK
    private.close()
    assert verify(tmp_path / "run").answer == "NOT PRIVATE"


def test_sizes_of_secret_draws_are_not_in_the_ledger(tmp_path) -> None:
    rule = ns.Poisson(steps=4, rate=0.5)
    secret = ns.Plan.fit(rule, mechanism="identity", noise_multiplier=2.0)
    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"clip_norm": 1.0, "batch_size": 20, "run": tmp_path / "run"}
    private = ns.privatize(model, optimizer, secret, **options)
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    for drawn in private.sampler(40):
        private.step(LOSS, x[drawn], y[drawn], ids=drawn)
    (look,) = private.ledger.notes("look")
    assert (look["size"], look["mixes"], look["step"]) == (0, "", 0)
    private.close()
    assert verify(tmp_path / "run").answer == "PROVED"


def test_without_a_folder_the_statement_says_it() -> None:
    private = begin()
    walk(private, LOOK + 1)
    assert is_said(private.statement())
    private.close()
    assert is_said(private.statement())


def test_the_unchanged_loop_stops_and_says_it(tmp_path) -> None:
    private = begin(tmp_path / "run")
    for step in range(STEPS):
        Late.is_mixing = step >= BEGINS
        x, y, ids = rows(step)
        private.optimizer.zero_grad()
        LOSS(private.model(x), y).backward()
        refused = pytest.raises(Unsupported, match="must not mix") if step == 3 else nullcontext()
        with refused:
            private.optimizer.step(ids=ids)
        if step == 3:
            break
    assert any("NOT PRIVATE" in line for line in private.statement().assumptions)
    private.close()
    assert verify(tmp_path / "run").answer == "NOT PRIVATE"


def test_one_of_many_ranks(tmp_path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        private = begin(tmp_path / "run", make=privatize_distributed, block=ROWS)
        walk(private, LOOK + 1)
        assert is_said(private.statement())
        private.close()
    finally:
        dist.destroy_process_group()
    assert verify(tmp_path / "run").answer == "NOT PRIVATE"
