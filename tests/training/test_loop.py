"""The loop over many kinds of batches; the run folder; checkpoints."""

from __future__ import annotations

import json
import os
import re
import stat
from itertools import chain, islice

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tests.runs import weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from noshuffle.errors import InvalidInput, ProbablyNotMeant
from noshuffle.noise import test_source
from noshuffle.participation import Epochs, MinSeparation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.release import folder
from noshuffle.release.batches import Batch
from noshuffle.strategies import identity, tree
from noshuffle.training import RunFolder, fit_model, in_order, privatize
from noshuffle.training.batches import TensorBatches, with_ids

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(2, (20,), generator=torch.Generator().manual_seed(1))
LOSS = nn.CrossEntropyLoss()
RULE = Epochs(epochs=3, steps_per_epoch=4)


def make(run=None, rule=RULE, seed=1, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = Plan(
        participation=rule,
        strategy=identity()
        if rule.is_sampled
        else tree(restart_every=getattr(rule, "every", None)),
        noise_multiplier=1.0,
    )
    settings = {"clip_norm": 1.0, "batch_size": 5, "source": test_source(seed=seed), **options}
    return privatize(model, optimizer, plan, run=run, **settings)


def batches():
    return TensorBatches((X, Y), in_order(20, 5))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y))


def numbers(value):
    """Every number in a JSON value."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return [number for one in inside for number in numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []


def test_metrics_and_progress_show_no_raw_figure(tmp_path):
    """No loss and no norm of an example, of any step, is in metrics.jsonl or in a printed step."""
    raw, printed = [], []

    def look(where):
        outcome = where.private.outcome
        raw.extend(outcome.losses.tolist() + outcome.norms.tolist())
        raw.append(where.loss)
        printed.append(repr(where))
        printed.append(repr(outcome))

    private = make(tmp_path)
    fit_model(private, batches(), LOSS, callbacks=[look], evaluate=lambda model: {"score": 0.5})
    private.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    known = {"step", "epoch", "epsilon", "learning_rate", "private_gradient_norm", "score"}
    known |= {"trained_parameters"}  # their number
    assert set().union(*rows) == known
    kept = np.array([number for row in rows for number in numbers(row)])
    shown = np.array([float(n) for text in printed for n in re.findall(r"\d+\.\d+", text)])
    assert len(raw) == 12 * 11
    for figure in raw:
        for found in (kept, shown):
            assert not np.isclose(found, figure, rtol=1e-4, atol=0).any()


def test_every_kind_of_batches_gives_the_same_model():
    reference = make()
    fit_model(reference, batches(), LOSS)
    assert reference.steps_released == 12
    plain = [(X[i : i + 5], Y[i : i + 5]) for i in range(0, 20, 5)]
    kinds = {
        "list": plain,
        "loader": DataLoader(TensorDataset(X, Y), batch_size=5),
        "iterable data set": DataLoader(Stream(), batch_size=5),
        "named": [Batch(b, range(5 * i, 5 * i + 5)) for i, b in enumerate(plain)],
    }
    for name, kind in kinds.items():
        private = make()
        statement = fit_model(private, kind, LOSS)
        assert torch.equal(weights(private), weights(reference)), name
        assert statement.epsilon == reference.plan.epsilon()


def test_a_generator_makes_one_pass_and_stops_at_the_plan():
    private = make(rule=SinglePass(steps=3))
    fit_model(private, ((X[i : i + 2], Y[i : i + 2]) for i in range(0, 20, 2)), LOSS)
    assert private.steps_released == 3
    short = make(rule=SinglePass(steps=30))
    statement = fit_model(short, ((X[i : i + 2], Y[i : i + 2]) for i in range(0, 20, 2)), LOSS)
    assert short.steps_released == 10
    assert 0 < statement.epsilon < short.plan.epsilon()
    assert "So far 10 of 30" in statement.words()


@pytest.mark.parametrize("rate", [0.02, 0.4])  # at the small rate most draws are empty
def test_loader_with_ids_and_the_secret_sampler_resumes(tmp_path, rate):
    numbered = with_ids(TensorDataset(X, Y))
    finals = []
    for stops in ((), (3, 5)):
        run = tmp_path / str(len(stops))
        for stop in (*stops, 8):
            private = make(run, rule=Poisson(steps=8, rate=rate))
            sampler = private.sampler(20)
            loader = DataLoader(numbered, batch_sampler=sampler, collate_fn=numbered.collate)
            private.resume()
            fit_model(private, islice(loader, stop - private.steps_released), LOSS)
            assert private.steps_released == stop
        finals.append(weights(private))
    assert torch.equal(*finals)


def test_loader_with_ids_in_natural_order():
    numbered = with_ids(TensorDataset(X, Y))
    private, reference = make(), make()
    fit_model(private, DataLoader(numbered, batch_size=5, collate_fn=numbered.collate), LOSS)
    fit_model(reference, batches(), LOSS)
    assert torch.equal(weights(private), weights(reference))
    assert private.statement().participation_checked


def test_a_remainder_that_the_plan_does_not_know_is_refused_at_once():
    private = make()
    with pytest.raises(InvalidInput, match="drop_last"):
        fit_model(private, DataLoader(TensorDataset(X, Y), batch_size=4), LOSS)
    assert private.steps_released == 0


def test_progress_and_metrics_hold_released_values_only(tmp_path):
    run = tmp_path / "run"
    seen = []
    private = make(run)

    def accuracy(model):
        assert not model.training
        return {"accuracy": (model(X).argmax(1) == Y).double().mean().item()}

    fit_model(
        private, batches(), LOSS, evaluate=accuracy, evaluate_every=3, callbacks=[seen.append]
    )
    assert private.model.training
    assert [p.step for p in seen] == list(range(1, 13))
    assert seen[-1].epsilon == private.plan.epsilon()
    metrics = list(RunFolder(run).metrics())
    assert [m["step"] for m in metrics] == [3, 4, 6, 8, 9, 12]
    names = {"step", "epoch", "epsilon", "learning_rate", "private_gradient_norm", "accuracy"}
    names |= {"trained_parameters"}  # their number
    assert all(set(m) == names for m in metrics)


def test_torn_and_later_lines_of_metrics_are_dropped(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [m["step"] for m in run.metrics()] == [1, 2, 3]
    run.forget_metrics_after(2)
    assert [m["step"] for m in run.metrics()] == [1, 2]


def test_a_run_folder_belongs_to_one_plan_and_secret(tmp_path):
    run = tmp_path / "run"
    make(run).close()
    secret = run / "secret.json"
    assert stat.S_IMODE(os.stat(secret).st_mode) == 0o600
    with pytest.raises(InvalidInput, match="another plan"):
        make(run, rule=Epochs(epochs=2, steps_per_epoch=4))
    with pytest.raises(InvalidInput, match="another key"):
        make(run, seed=2)
    with pytest.raises(InvalidInput, match=r"begun with clip = Flat\(norm=1"):
        make(run, clip_norm=2.0)
    with pytest.raises(InvalidInput, match="begun with divisor = 5"):
        make(run, batch_size=6)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    with pytest.raises(InvalidInput, match="not empty"):
        make(other)
    assert sorted(p.name for p in other.iterdir()) == ["thesis.tex"]
    secret.unlink()
    with pytest.raises(InvalidInput, match="without its secret a run cannot go on"):
        make(run)


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors"])
def test_a_damaged_checkpoint_is_told_in_one_line(tmp_path, name):
    private = make(tmp_path, SinglePass(steps=4))
    fit_model(private, islice(batches(), 2), LOSS)
    private.close()
    (path,) = (tmp_path / "checkpoints").glob(f"step-00000002/{name}")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match=r"step-00000002 is .*remove it"):
        make(tmp_path, SinglePass(steps=4)).resume()


def test_a_full_disk_is_an_error_of_the_system(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device (os error 28)")

    private = make(tmp_path)
    monkeypatch.setattr(folder, "save_file", full)
    with pytest.raises(OSError, match=r"model.safetensors: No space left"):
        private.save()
    assert RunFolder(tmp_path).saved() == []


def test_evaluation_leaves_every_layer_in_its_own_mode():
    """A BatchNorm with public statistics stays in eval mode; in training mode it is refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
    plan = Plan(participation=RULE, strategy=tree(), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=5)
    fit_model(private, batches(), LOSS, evaluate=lambda _: {"score": 0.5}, evaluate_every=1)
    assert private.steps_released == 12
    assert [module.training for module in model] == [True, False, True]


def test_a_plan_of_fewer_passes_is_refused_before_the_first_step(tmp_path):
    """The second epoch was refused, when the first was trained and paid for."""
    data = TensorDataset(X, Y)
    again = [
        batches(),
        list(batches()),
        DataLoader(data, batch_size=5),
        DataLoader(with_ids(data), batch_size=5, shuffle=True, collate_fn=with_ids(data).collate),
    ]
    for i, each in enumerate(again):
        private = make(tmp_path / str(i), SinglePass(steps=9))
        with pytest.raises(InvalidInput, match=r"same rows 2 times.*Epochs\(epochs=2, steps_per"):
            fit_model(private, each, LOSS, epochs=2)
        assert private.steps_released == 0
    private = make(rule=SinglePass(steps=9))
    fit_model(private, DataLoader(Stream(), batch_size=5), LOSS, epochs=1)
    private = make(rule=SinglePass(steps=8), on_violation="drop")  # who asks for it may
    fit_model(private, batches(), LOSS, epochs=2)
    assert private.steps_released == 8


class Itself:
    """A loader that is its own iterator, and begins anew."""

    def __iter__(self):
        self.inside = iter(Anew())
        return self

    def __next__(self):
        return next(self.inside)


class Anew:
    """Batches of unknown length that begin anew each time."""

    def __init__(self, begin: int = 0, end: int = 20) -> None:
        self.begin, self.end = begin, end

    def __iter__(self):
        for i in range(self.begin, self.end, 5):
            yield Batch((X[i : i + 5], Y[i : i + 5]), range(i, i + 5))


def test_several_passes_over_batches_of_unknown_length():
    """The second pass read past as many batches as the first had, and trained on none."""
    reference = make(rule=MinSeparation(8, 4, 2))
    fit_model(reference, batches(), LOSS, epochs=2)
    for kind in (Anew(), Itself()):
        private = make(rule=MinSeparation(8, 4, 2))
        fit_model(private, kind, LOSS, epochs=2)
        assert private.steps_released == 8
        assert torch.equal(weights(private), weights(reference))


@pytest.mark.parametrize("stop", [1, 4, 6, 11])
@pytest.mark.parametrize("kind", ["tensors", "list", "loader", "unknown length", "generator"])
def test_a_run_that_was_saved_goes_on_to_the_bit(tmp_path, kind, stop):
    """Stopped in order, nothing is lost; a generator goes on where it stands."""
    data = TensorDataset(X, Y)
    source = {
        "tensors": batches(),
        "list": list(batches()),
        "loader": DataLoader(data, batch_size=5),
        "unknown length": Anew(),
        "generator": chain(*[Anew()] * 3),
    }[kind]
    reference = make()
    fit_model(reference, batches(), LOSS)

    def interrupt(where):
        if where.step == stop:
            raise KeyboardInterrupt

    private = make(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit_model(private, source, LOSS, callbacks=[interrupt])
    private.save()
    private.close()
    seen, private = [], make(tmp_path)
    fit_model(private, source, LOSS, callbacks=[seen.append])
    assert [(p.step, p.epoch) for p in seen] == [(t + 1, t // 4) for t in range(stop, 12)]
    assert torch.equal(weights(private), weights(reference))


def test_an_iterator_is_not_read_several_times(recwarn):
    private = make(rule=MinSeparation(9, 4, 2))  # one step more than batches
    with pytest.raises(InvalidInput, match="epochs=2 reads the batches 2 times, and a generator"):
        fit_model(private, iter(Anew()), LOSS, epochs=2)
    assert private.steps_released == 0
    fit_model(private, chain(Anew(), Anew()), LOSS)
    assert private.steps_released == 8
    assert not [w for w in recwarn if w.category is ProbablyNotMeant]
    planned = make()
    with pytest.warns(ProbablyNotMeant, match="pass 2 of 3 brought no batch.*after 4 steps"):
        fit_model(planned, iter(Anew()), LOSS)
    assert planned.steps_released == 4


def test_an_iterator_that_is_given_again_stands_where_it_was(recwarn):
    def interrupt(where):
        if where.step == 2:
            raise KeyboardInterrupt

    private, reference = (make(rule=SinglePass(steps=4)) for _ in range(2))
    fit_model(reference, batches(), LOSS)
    once = iter(Anew())
    with pytest.raises(KeyboardInterrupt):
        fit_model(private, once, LOSS, callbacks=[interrupt])
    fit_model(private, once, LOSS)
    assert torch.equal(weights(private), weights(reference))
    assert not [w for w in recwarn if w.category is ProbablyNotMeant]
