"""`private.batches`: rows are named by their place, and the batch of step t is a function of t."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from noshuffle.errors import InvalidInput, ParticipationViolation
from noshuffle.noise import test_source
from noshuffle.participation import (
    AnyOrderEpochs,
    Epochs,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
)
from noshuffle.plan import Plan
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.strategies import identity, tree
from noshuffle.training import Batch, Private, fit_model, privatize, verify, with_ids

LOSS = nn.CrossEntropyLoss()
N = 22
X, Y = torch.arange(float(N))[:, None], torch.arange(N) % 2
DATA = TensorDataset(X, Y)
TWO_EPOCHS = Epochs(epochs=2, steps_per_epoch=5)


def begin(
    rule: Participation = TWO_EPOCHS,
    *,
    run: Path | None = None,
    is_correlated: bool = True,
    **options: Any,
) -> Private:
    model = nn.Linear(1, 2)
    unit = options.pop("unit", "example")
    noise = tree(restart_every=getattr(rule, "every", None)) if is_correlated else identity()
    plan = Plan(participation=rule, strategy=noise, noise_multiplier=1.0, unit=unit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"source": test_source(seed=1), **options}
    return privatize(model, optimizer, plan, clip_norm=1.0, batch_size=5, run=run, **options)


def again(run: Path, *args: Any, **options: Any) -> Private:
    """The run opened by another process."""
    private = begin(*args, run=run, **options)
    private.resume()
    return private


def kill(private: Private) -> None:
    """What is left of a run whose process was killed: its folder."""
    private._parts.release.log.close()


def loader(data: Any = DATA, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, **{"batch_size": 5, "drop_last": True, **options})


def rows(batch: Any) -> list[int]:
    return [int(i) for i in batch[0].flatten()]


def train(private: Private, source: Any, *, until: int = 10**6) -> list[list[int]]:
    """A raw loop over one pass, to this step; the rows of its batches."""
    seen = []
    for x, y in source:
        private.step(LOSS, x, y)
        seen.append(rows((x, y)))
        if private.steps_released >= until:
            break
    return seen


def on_record(run: Path) -> list[list[int]]:
    """The units of every step in the log."""
    found: list[list[int]] = []
    History.read(RunFolder(run), on_step=lambda _, units: found.append(units.tolist()))
    return found


def twin(rule: Participation, *, seed: int, passes: int, is_correlated: bool = True) -> list[Any]:
    """The order of a shuffled loader of 22 rows in batches of 5, written down slowly."""
    found = []
    for number in range(passes):
        turn = 0
        if isinstance(rule, AnyOrderEpochs) or not is_correlated:
            turn = number
        if isinstance(rule, Restarted):
            turn = number * 5 // rule.every
        words = np.random.Philox(key=np.array([seed, turn], dtype=np.uint64)).random_raw(N)
        order = [i for _, i in sorted((int(word), i) for i, word in enumerate(words))]
        found += [order[i : i + 5] for i in range(0, N, 5)]
    return found


# -- what is read ----------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """Dictionaries; with `many`, several are read at once."""

    def __init__(self, is_many: bool = False) -> None:
        if is_many:
            self.__getitems__ = lambda indices: [self[i] for i in indices]

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": X[i], "name": f"row {i}"}


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_gives_what_the_loader_gives(workers: int) -> None:
    def joined(items: list[Any]) -> list[Tensor]:
        return [torch.stack([one["x"] for one in items])]

    for data, collate in ((DATA, None), (Rows(), None), (Rows(), joined), (Rows(True), None)):
        if workers and isinstance(data, Rows) and hasattr(data, "__getitems__"):
            continue  # a lambda does not go everywhere
        plain = loader(data, drop_last=False, collate_fn=collate, num_workers=workers)
        private = begin()
        named = iter(private.batches(plain))
        for want in plain:
            got = next(named)
            assert type(got) is type(want)
            torch.testing.assert_close(got, want) if collate else None
            assert repr(got) == repr(want)
            private.skip()
        assert next(named, None) is None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("rule", "is_correlated"),
    [
        (TWO_EPOCHS, True),
        (TWO_EPOCHS, False),
        (AnyOrderEpochs(epochs=2, steps_per_epoch=5), False),
        (Restarted(Epochs(epochs=4, steps_per_epoch=5), every=10), True),
    ],
)
def test_the_order_is_the_slow_one_wherever_a_run_is_killed(
    tmp_path: Path, rule: Participation, is_correlated: bool, workers: int
) -> None:
    """Short last batch; killed in the middle of both epochs, once behind a checkpoint."""
    run, seen, saved = tmp_path / "run", [], 0
    own: dict[str, Any] = {"is_correlated": is_correlated, "source": None}
    for stop in (2, 7, rule.steps):
        private = again(run, rule, **own)
        assert private.steps_released == saved
        while private.steps_released < stop:
            mixed = loader(shuffle=True, drop_last=False, num_workers=workers)
            seen += train(private, private.batches(mixed), until=stop)
            if private.steps_released == 5:
                private.save()
        saved = stop
        seed = private._parts.release.order_seed
        kill(private)
    want = twin(rule, seed=seed, passes=rule.steps // 5, is_correlated=is_correlated)
    assert seen == want
    assert on_record(run) == [sorted(batch) for batch in want]
    verdict = verify(run)
    assert verdict.answer == "VERIFIED", verdict.words()


def test_two_runs_have_orders_of_their_own_and_a_test_run_one() -> None:
    def first(**options: Any) -> list[int]:
        private = begin(**options)
        return rows(next(iter(private.batches(loader(shuffle=True, drop_last=False)))))

    assert first(source=None) != first(source=None)
    assert first() == first()


def test_natural_order_without_the_rest(tmp_path: Path) -> None:
    rule = Epochs(epochs=2, steps_per_epoch=4)
    private = again(tmp_path, rule)
    for _ in range(3):  # the last pass has nothing left
        train(private, private.batches(loader()))
    assert on_record(tmp_path) == 2 * [list(range(i, i + 5)) for i in range(0, 20, 5)]
    with pytest.raises(InvalidInput, match="5 batches; leave out the incomplete last batch"):
        begin(rule).batches(loader(drop_last=False))
    assert "by their place in the data set" in private.statement().words()


def test_a_shuffled_loader_of_two_passes_is_refused_at_the_first_repeated_row(
    tmp_path: Path,
) -> None:
    """SinglePass, no ids, a shuffled loader read twice: ε was half of what it should have been."""
    for rule in (SinglePass(steps=10), MinSeparation(10, 6, 2)):
        private = begin(rule, run=tmp_path / rule.kind)
        mixed = private.batches(loader(shuffle=True, drop_last=False))
        train(private, mixed)
        with pytest.raises(ParticipationViolation, match="may not take part in step 5"):
            train(private, mixed)
        assert private.steps_released == 5
        assert private.statement().participation_checked
        unnamed = begin(rule)
        for _ in range(2):
            train(unnamed, loader(shuffle=True, drop_last=False))
        assert not unnamed.statement().participation_checked


# -- whose row it is -------------------------------------------------------------------------------


class Table:
    """As much of a data set of Hugging Face as `select` keeps."""

    def __init__(self, data: Any, indices: list[int] | None = None, name: str = "made") -> None:
        self._data, self._fingerprint = data, name
        self._indices = None if indices is None else self
        self._order = np.arange(len(data)) if indices is None else np.array(indices)

    def column(self, _: int) -> Any:
        return self

    def to_numpy(self) -> Any:
        return self._order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> Any:
        return self._data[int(self._order[i])]


def test_subsets_and_concatenations_are_looked_through(tmp_path: Path) -> None:
    few = Subset(Subset(DATA, list(range(21, 1, -1))), [0, 3, -1])  # places 21, 18, 2
    table: Any = Table(DATA, [7, 9, 8])
    cases: dict[str, tuple[Any, list[int]]] = {
        "subset": (few, [21, 18, 2]),
        "both": (
            ConcatDataset([few, Subset(DATA, torch.tensor([4, 5]).tolist())]),
            [21, 18, 2, 4, 5],
        ),
        "table": (table, [7, 9, 8]),
        "parts of a table": (Subset(table, [2, 0]), [8, 7]),
    }
    for name, (data, places) in cases.items():
        private = begin(SinglePass(steps=3), run=tmp_path / name)
        assert train(private, private.batches(loader(data, drop_last=False))) == [places]
        assert on_record(tmp_path / name) == [sorted(places)]
        kill(private)
    twice: Any = ConcatDataset([DATA, Subset(DATA, [3])])
    private = begin(SinglePass(steps=10))
    with pytest.raises(ParticipationViolation, match="unit 3 may not take part in step 4"):
        train(private, private.batches(loader(twice, drop_last=False)))


def test_what_has_no_places_is_refused_with_the_advice_to_give_ids() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(X, Y))

    class Own(DataLoader[Any]):
        pass

    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    other = TensorDataset(X, Y)
    cases: dict[str, Any] = {
        "two data sets": loader(ConcatDataset([DATA, other])),
        "DataLoader, got a list": [(X, Y)],
        "Own may read": Own(DATA, batch_size=5),
        "IterableDataset": DataLoader(Stream(), batch_size=5),
        "batch_size=None": DataLoader(DATA, batch_size=None),
        "no length": DataLoader(DATA, batch_size=5, sampler=Endless()),
    }
    for words, source in cases.items():
        with pytest.raises(InvalidInput, match=rf"{words}.*ids="):
            begin(SinglePass(steps=9)).batches(source)
    private = begin(SinglePass(steps=9))
    private.batches(loader())
    with pytest.raises(InvalidInput, match=r"two data sets.*ids="):
        private.batches(loader(other))
    with pytest.raises(InvalidInput, match=r"private\.sampler\(population\)"):
        begin(Poisson(steps=9, rate=0.1), is_correlated=False).batches(loader())
    with pytest.raises(InvalidInput, match=r"protects users.*ids="):
        begin(SinglePass(steps=9), unit="user").batches(loader())


def test_a_run_keeps_to_its_data(tmp_path: Path) -> None:
    """Their number is on record, and their list of files under the secret of the run."""

    class Files(TensorDataset):
        root = "/data"
        samples: Any = ()

    def files(*names: str, root: str = "/data") -> Any:
        made = Files(X, Y)
        made.root, made.samples = root, [(f"{root}/{name}", 0) for name in names]
        return made

    for name in ("one", "two"):
        private = begin(run=tmp_path / name, source=None)
        train(private, private.batches(loader(files("a", "b"), drop_last=False)), until=2)
        kill(private)
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("one", "two")]
    kept = [
        [json.loads(line)["value"] for line in log.splitlines() if '"files"' in line]
        for log in logs
    ]
    assert [len(own) for own in kept] == [1, 1]
    assert kept[0] != kept[1]
    changed = again(tmp_path / "one", source=None)
    with pytest.raises(InvalidInput, match=r"begun with files.*fork_of=\)$"):
        changed.batches(loader(files("a", "b2"), drop_last=False))
    moved = files("a", "b", root="/elsewhere")
    assert len(train(changed, changed.batches(loader(moved, drop_last=False)))) == 3
    more = again(tmp_path / "two", source=None)
    with pytest.raises(InvalidInput, match="begun with rows = 22, and now 21 of 22 came"):
        more.batches(loader(Subset(DATA, range(21)), drop_last=False))
    with pytest.raises(InvalidInput, match="begun with order"):
        for _ in more.batches(loader(files("a", "b"), drop_last=False, shuffle=True)):
            pass


# -- one batch, one step ---------------------------------------------------------------------------


def test_a_batch_is_taken_by_one_step() -> None:
    private = begin()
    named = iter(private.batches(loader(drop_last=False)))
    with pytest.raises(InvalidInput, match="step 0 came without a batch"):
        private.step(LOSS, X[:5], Y[:5])
    x, y = next(named)
    with pytest.raises(InvalidInput, match="a second way"):
        private.step(LOSS, x, y, ids=range(5))
    with pytest.raises(InvalidInput, match="5 rows were read and 4 came"):
        private.step(LOSS, x[:4], y[:4])
    assert private.steps_released == 0
    private.step(LOSS, x, y)  # a refused batch leaves the run as it was
    with pytest.raises(InvalidInput, match="step 1 came without a batch"):
        private.step(LOSS, x, y)
    next(named)
    with pytest.raises(InvalidInput, match="a second batch came before step 1"):
        next(named)
    assert private.steps_released == 1


def test_a_step_that_was_given_up_loses_its_batch_and_no_other() -> None:
    private = begin()
    seen = []
    for x, y in private.batches(loader(drop_last=False)):
        if x[0] == 5:
            private.skip()
            continue
        private.step(LOSS, x, y)
        seen.append(rows((x, y))[0])
        if x[0] == 10:
            private.skip()
    assert seen == [0, 10, 20]
    x, y = next(iter(private.batches(loader(drop_last=False))))  # and broken off
    for x, y in private.batches(loader(drop_last=False)):
        private.step(LOSS, x, y)
        break
    more = train(private, private.batches(loader(drop_last=False)), until=8)
    assert [one[0] for one in more] == [5, 10]
    left = iter(private.batches(loader(drop_last=False)))
    next(left)
    private.pass_over(to="epoch")
    assert next(left, None) is None
    assert list(private.batches(loader(drop_last=False))) == []


def test_two_readers_cannot_mix_their_names() -> None:
    private = begin(SinglePass(steps=9))
    one = iter(private.batches(loader(Subset(DATA, range(11)))))
    next(one)
    with pytest.raises(InvalidInput, match="a second batch"):
        next(iter(private.batches(loader(Subset(DATA, range(11, 22))))))


def test_a_step_of_several_batches(tmp_path: Path) -> None:
    """With `parts`, in the middle of an epoch too; without, the second step is refused."""
    rule = Epochs(epochs=2, steps_per_epoch=3)  # 5 batches: the last step has one
    seen: list[list[int]] = []
    for stop in (2, 4, 6):
        private = again(tmp_path, rule)
        while private.steps_released < stop:
            named = iter(private.batches(loader(drop_last=False), parts=2))
            while private.steps_released < stop:
                with private.accumulate() as step:
                    mine = []
                    for _ in range(1 if private.steps_released % 3 == 2 else 2):
                        x, y = next(named)
                        step.add(LOSS, (x, y))
                        mine += rows((x, y))
                seen.append(mine)
                if private.steps_released % 3 == 0:
                    break
        kill(private)
    assert seen == 2 * [list(range(10)), list(range(10, 20)), [20, 21]]
    assert sorted(on_record(tmp_path)[:2]) == [list(range(5)), list(range(5, 10))]
    private = begin(SinglePass(steps=9))
    named = iter(private.batches(loader()))
    with private.accumulate() as step:
        step.add(LOSS, next(named))
        step.add(LOSS, next(named))
    with pytest.raises(InvalidInput, match="parts="):
        next(named)


def test_the_loop_that_people_have(tmp_path: Path) -> None:
    private = begin(run=tmp_path)
    criterion = private.criterion(LOSS)
    for x, y in private.batches(loader(shuffle=True, drop_last=False)):
        criterion(private.model(x), y).backward()
        private.optimizer.step()
    assert sorted(chain(*on_record(tmp_path))) == list(range(N))
    assert private.statement().participation_checked


def test_rows_that_get_lost_on_the_way_are_refused() -> None:
    class Fewer(Rows):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[i] for i in indices[1:]]

    with pytest.raises(InvalidInput, match="a list of 5 rows"):
        next(iter(begin().batches(loader(Fewer(), drop_last=False))))
    private = begin()
    cut = loader(
        drop_last=False, collate_fn=lambda items: [torch.stack(c[1:]) for c in zip(*items)]
    )
    with pytest.raises(InvalidInput, match="5 rows were read and 4 came"):
        train(private, private.batches(cut))
    assert private.steps_released == 0


# -- a sampler of the caller's ---------------------------------------------------------------------


class Seeded(Sampler[int]):
    """Another order in every pass, from a generator of its own."""

    def __init__(self, seed: int, *, keeps: bool = False) -> None:
        self.made, self.keeps = torch.Generator().manual_seed(seed), keeps
        self.first = torch.randperm(N, generator=self.made).tolist()

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        if self.keeps:
            return iter(self.first)
        return iter(torch.randperm(N, generator=self.made).tolist())


@pytest.mark.parametrize("keeps", [True, False])
def test_a_sampler_of_ones_own_goes_on_where_the_log_stands(tmp_path: Path, keeps: bool) -> None:
    seen: list[list[int]] = []
    for stop in (2, 8, 10):
        private = again(tmp_path, is_correlated=keeps)
        own = loader(sampler=Seeded(3, keeps=keeps), drop_last=False)
        while private.steps_released < stop:
            seen += train(private, private.batches(own), until=stop)
        kill(private)
    sampler = Seeded(3, keeps=keeps)
    assert seen == [o[i : i + 5] for o in (list(sampler), list(sampler)) for i in range(0, N, 5)]
    assert "that of the caller's sampler; it does not look at the content" in (
        private.statement().words()
    )


@pytest.mark.parametrize("is_correlated", [True, False])
def test_an_order_that_is_lost_is_refused_before_a_gradient(
    tmp_path: Path, is_correlated: bool
) -> None:
    private = begin(run=tmp_path, is_correlated=is_correlated)
    sampler = Seeded(3, keeps=is_correlated)
    train(private, private.batches(loader(sampler=sampler, drop_last=False)), until=3)
    kill(private)
    private = again(tmp_path, is_correlated=is_correlated)
    lost = loader(sampler=Seeded(4, keeps=is_correlated), drop_last=False)
    way = "egin a new run" if is_correlated else r"pass_over\(to='epoch'\).*or begin a new run"
    with pytest.raises(InvalidInput, match=f"order of this run is lost: .*{way}"):
        train(private, private.batches(lost))
    assert private.steps_released == 3
    assert private.pass_over(to="epoch") == 2
    if is_correlated:  # the order of the first epoch is part of the plan
        with pytest.raises(InvalidInput, match="order of this run is lost: begin a new run"):
            train(private, private.batches(lost))
        other = begin(run=tmp_path / "fork", fork_of=tmp_path)
        assert len(train(other, other.batches(lost))) == 5
    else:
        assert len(train(private, private.batches(lost))) == 5
    private.close()


def test_torchs_global_generator_is_put_back_for_a_sampler_that_draws_from_it(
    tmp_path: Path,
) -> None:
    """What `resume` restores is the state in which the pass began, if it was saved in this pass."""
    seen: list[int] = []
    for stop in (7, 10):
        torch.manual_seed(stop)
        private = again(tmp_path, is_correlated=False)
        own = loader(sampler=SubsetRandomSampler(range(N)), drop_last=False)
        while private.steps_released < stop:
            seen += chain(*train(private, private.batches(own), until=min(stop, 6)))
            if private.steps_released == 6:
                private.save()
                seen += chain(*train(private, private.batches(own), until=stop))
        kill(private)
    assert sorted(seen[:N]) == sorted(seen[N:]) == list(range(N))


def test_batches_of_a_batch_sampler(tmp_path: Path) -> None:
    cut = BatchSampler(Seeded(1, keeps=True), 5, drop_last=False)
    private = begin(run=tmp_path)
    seen = train(private, private.batches(DataLoader(DATA, batch_sampler=cut)))
    assert seen == list(cut)
    ours = BatchSampler(torch.utils.data.RandomSampler(DATA), 5, drop_last=False)
    private = begin()
    train(private, private.batches(DataLoader(DATA, batch_sampler=ours)))
    assert "sampler" not in private.statement().words()


# -- fit_model -------------------------------------------------------------------------------------


class Augmented(TensorDataset):
    """Rows that look different in every epoch."""

    def __getitem__(self, i: int) -> Any:
        x, y = (tensor[i] for tensor in self.tensors)
        return x + torch.rand(()), y


@pytest.mark.parametrize(("workers", "stop"), [(0, 3), (2, 7), (0, 9)])
def test_fit_model_goes_on_at_the_next_step_of_the_log(
    tmp_path: Path, workers: int, stop: int
) -> None:
    class Killed(BaseException):
        pass

    def at(where: Any) -> None:
        if where.step == stop:
            raise Killed

    data = Augmented(X, Y)

    def source() -> DataLoader[Any]:
        return loader(data, shuffle=True, drop_last=False, num_workers=workers)

    private = begin(run=tmp_path, source=None)
    with pytest.raises(Killed):
        fit_model(private, source(), LOSS, checkpoint_every=4, callbacks=[at])
    kill(private)
    private, seen = begin(run=tmp_path, source=None), []
    fit_model(private, source(), LOSS, callbacks=[lambda where: seen.append(where.step)])
    assert seen == list(range(stop + 1, 11))
    record = on_record(tmp_path)
    assert record[:5] == record[5:]
    assert sorted(chain(*record[:5])) == list(range(N))
    private.close()
    assert verify(tmp_path).answer == "VERIFIED"


def test_a_run_without_rows_left_ends_in_order(tmp_path: Path) -> None:
    private = begin(run=tmp_path, source=None)
    train(private, private.batches(loader(drop_last=False)))
    train(private, private.batches(loader(drop_last=False)))
    kill(private)
    private = begin(run=tmp_path, source=None)
    assert fit_model(private, loader(drop_last=False), LOSS).epsilon == private.plan.epsilon()
    private.close()
    assert not (tmp_path / "secret.json").exists()


def test_a_loader_that_names_its_rows_itself_keeps_its_names(tmp_path: Path) -> None:
    class Users(with_ids):
        def collate(self, items: list[Any]) -> Batch:
            batch = super().collate(items)
            return Batch(batch.data, [f"user {int(i) // 2}" for i in batch.ids])

    for data in (with_ids(DATA), Users(ConcatDataset([DATA]))):
        unit = "user" if isinstance(data, Users) else "example"
        private = begin(SinglePass(steps=6), run=tmp_path / unit, unit=unit)
        numbered = loader(data, collate_fn=data.collate, batch_size=4, drop_last=True)
        fit_model(private, numbered, LOSS)
        assert private.steps_released == 5
        assert private.statement().participation_checked
        assert "by their place" not in private.statement().words()


# -- check -----------------------------------------------------------------------------------------


def test_check_says_what_would_happen_and_binds_nothing() -> None:
    def said(source: Any, **options: Any) -> str:
        private = begin(**options)
        check = private.check(source)
        for fact in ("rows", "order"):
            assert private._parts.release.fact(fact) is None
        return " ".join(str(check).split())

    mixed = loader(shuffle=True, drop_last=False)
    assert "order ok drawn from a public seed, one for all epochs" in said(mixed)
    assert "a new one for each epoch" in said(mixed, is_correlated=False)
    assert "ids ok the place of each row" in said(mixed)
    assert "order ok that of the data set" in said(loader(drop_last=False))
    two = said(loader(ConcatDataset([DATA, TensorDataset(X, Y)])), rule=SinglePass(steps=9))
    assert "ids REFUSED rows of two data sets" in two
    assert "pass ids=" in said(loader(drop_last=False), unit="user")
