"""Live streams across processes: save, load, kills, copies, forks."""

from __future__ import annotations

import gc
import math
import multiprocessing
import pickle
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone

from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression, PrivateSVC
from noshuffle.convex.linear_rule import LinearRule
from noshuffle.errors import (
    InvalidInput,
    NoshuffleError,
    ParticipationViolation,
    Unsupported,
)
from noshuffle.release.release import Release
from noshuffle.release.verify import verify

QUICK: dict[str, Any] = {"mechanism": "tree", "test_seed": 0}


def table(n: int = 3000) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 4))
    return x, (x[:, 0] + 0.3 * rng.normal(size=n) > 0).astype(int)


def kinds() -> list[Any]:
    return [
        PrivateLogisticRegression(classes=[0, 1], batch_size=30, **QUICK),
        PrivateLogisticRegression(classes=[0, 1], horizon=3000, batch_size=37, epsilon=4.0),
        PrivateSVC(classes=[0, 1], penalty="l1", mechanism="blt", batch_size=50, test_seed=1),
        PrivateLinearRegression(solver="sums", batch_size=40, **QUICK),
    ]


@pytest.mark.parametrize("model", kinds(), ids=["classes", "horizon", "l1 blt", "sums"])
def test_a_loaded_stream_goes_on_as_if_nothing_had_been(model: Any, tmp_path: Path) -> None:
    x, y = table()
    ids = [f"user {i}" for i in range(len(x))]
    straight = clone(model).partial_fit(x[:1100], y[:1100], ids=ids[:1100])
    model = clone(model).partial_fit(x[:1100], y[:1100], ids=ids[:1100]).save(tmp_path / "s")
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    other = type(model).load(tmp_path / "copy")
    np.testing.assert_array_equal(other.coef_, model.coef_)
    assert other.privacy_ == model.privacy_
    assert other.progressive_score_ == model.progressive_score_
    with pytest.raises(ParticipationViolation, match="user 7"):
        other.partial_fit(x[7:8], y[7:8], ids=ids[7:8])
    straight.partial_fit(x[1100:], y[1100:], ids=ids[1100:])
    # The same rows cut differently are the same batches.
    for first, last in ((1100, 1101), (1101, 2000), (2000, 3000)):
        other.partial_fit(x[first:last], y[first:last], ids=ids[first:last])
    assert (other.n_rows_, other.n_steps_) == (straight.n_rows_, straight.n_steps_)
    if model.test_seed is None:  # fresh keys: the same sums, other noise
        assert not np.array_equal(other.coef_, straight.coef_)
        return
    np.testing.assert_allclose(other.coef_, straight.coef_, rtol=1e-9)


def learned_by_a_process_that_dies(folder: Path, first: int, last: int, ids: Any = None) -> int:
    """A process loads the stream, releases these rows and dies before it saves; steps by then."""
    x, y = table()
    model = PrivateLogisticRegression.load(folder)
    model.partial_fit(x[first:last], y[first:last], ids=ids)
    return int(model.n_steps_)  # nobody holds the model any more, nor the lock of the folder


@pytest.mark.parametrize("has_ids", [False, True])
def test_steps_after_the_last_save_of_a_killed_process_are_passed_over(
    has_ids: bool, tmp_path: Path
) -> None:
    x, y = table()
    ids = [f"user {i}" for i in range(len(x))] if has_ids else None

    def own(first: int, last: int) -> Any:
        return None if ids is None else ids[first:last]

    model = PrivateLogisticRegression(classes=[0, 1], batch_size=50, mechanism="tree")
    model.partial_fit(x[:120], y[:120], ids=own(0, 120)).save(tmp_path / "s")
    before = model.coef_
    del model
    assert learned_by_a_process_that_dies(tmp_path / "s", 120, 230, own(120, 230)) == 4
    again = PrivateLogisticRegression.load(tmp_path / "s")
    assert (again.n_steps_, again.n_rows_) == (4, 200)  # 30 rows were in no step
    np.testing.assert_array_equal(again.coef_, before)  # nothing was learned from the others
    if has_ids:
        for lost in (110, 199):  # of the saved sum, and of the last step
            with pytest.raises(ParticipationViolation, match="came twice"):
                again.partial_fit(x[lost : lost + 1], y[lost : lost + 1], ids=own(lost, lost + 1))
    again.partial_fit(x[200:300], y[200:300], ids=own(200, 300))
    assert (again.n_steps_, again.n_rows_) == (6, 300)
    assert not np.array_equal(again.coef_, before)
    again.save(tmp_path / "s")
    found = verify(tmp_path / "s")
    assert (found.refuted, found.released, found.participation_checked) == ((), 6, has_ids)


def test_a_killed_process_comes_back_over_the_end_of_a_phase(tmp_path: Path) -> None:
    x, y = table()
    model = PrivateLogisticRegression(classes=[0, 1], mechanism="tree", batch_size=64)
    model.partial_fit(x[:900], y[:900]).save(tmp_path / "s")
    del model
    assert learned_by_a_process_that_dies(tmp_path / "s", 900, 2500) == 39  # 16 + 16 + 7
    again = PrivateLogisticRegression.load(tmp_path / "s")  # phases end at 1024 and 2048
    assert (again.n_steps_, again.n_rows_, len(again._stream.phases)) == (39, 2048 + 7 * 64, 3)
    again.partial_fit(x[2496:2560], y[2496:2560]).save(tmp_path / "s")
    secrets = [tmp_path / "s" / f"phase-{i}" / "secret.json" for i in (1, 2, 3)]
    assert [secret.exists() for secret in secrets] == [False, False, True]
    del again
    assert PrivateLogisticRegression.load(tmp_path / "s").n_rows_ == 2560
    found = verify(tmp_path / "s")
    assert (found.is_verified, found.released) == (True, 40)
    assert found.epsilon == max(
        verify(tmp_path / "s" / f"phase-{i}").epsilon or math.inf for i in (1, 2, 3)
    )
    assert "no unit lies in two phases" in str(found.unchecked)
    shutil.copytree(tmp_path / "s", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "phase-2")
    assert verify(tmp_path / "cut").refuted == ("phase-2 is not in the folder any more",)
    (tmp_path / "s" / "phase-2" / "statement.json").unlink()
    assert verify(tmp_path / "s").refuted[0].startswith("phase-2: statement.json is missing")


def test_a_stream_may_be_saved_first_in_a_later_phase(tmp_path: Path) -> None:
    x, y = table()
    model = PrivateSVC(classes=[0, 1], mechanism="tree", batch_size=64)
    model.partial_fit(x[:2100], y[:2100]).save(tmp_path / "s")  # in the third phase
    model.partial_fit(x[2100:2200], y[2100:2200])
    found = verify(tmp_path / "s")
    assert (found.is_verified, found.released) == (True, 2)
    assert "the 2 phases before phase-3" in str(found.unchecked)


def test_no_step_is_released_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is killed and comes back, and again: its own rows, released with noise once each,
    and every noise row on one sum."""
    seen: list[tuple[int, Any]] = []
    close = Release.close

    def spy(self: Any, ticket: Any, values: Any) -> None:
        seen.append((ticket.step, self._keys.starts[-1].nonce))
        close(self, ticket, values)

    monkeypatch.setattr(Release, "close", spy)
    x, y = table()
    model = PrivateLogisticRegression(classes=[0, 1], batch_size=50, horizon=3000)
    model.partial_fit(x[:120], y[:120]).save(tmp_path / "s")
    del model
    for _ in range(3):
        model = PrivateLogisticRegression.load(tmp_path / "s")
        rows = slice(model.n_rows_, model.n_rows_ + 110)
        model.partial_fit(x[rows], y[rows])
        del model
    steps = [step for step, _ in seen]
    assert steps == list(range(8))
    assert len({nonce for _, nonce in seen}) == 4


def test_states_of_another_branch_are_refused(tmp_path: Path) -> None:
    x, y = table()
    model = PrivateSVC(classes=[0, 1], batch_size=50, horizon=3000)
    model.partial_fit(x[:70], y[:70]).save(tmp_path / "s")
    del model
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    shutil.copytree(tmp_path / "s", tmp_path / "backup")
    for name in ("s", "copy"):
        PrivateSVC.load(tmp_path / name).partial_fit(x[70:200], y[70:200]).save(tmp_path / name)
    for name in ("stream.pt", "model.pkl"):  # of the copy, beside the log of the original
        shutil.copy(tmp_path / "copy" / name, tmp_path / "s" / name)
    with pytest.raises(InvalidInput, match="copy that went on by itself"):
        PrivateSVC.load(tmp_path / "s")
    shutil.rmtree(tmp_path / "copy" / "phase-1")  # an older log, beside a newer state
    shutil.copytree(tmp_path / "backup" / "phase-1", tmp_path / "copy" / "phase-1")
    with pytest.raises(InvalidInput, match="newer than the log beside it"):
        PrivateSVC.load(tmp_path / "copy")
    assert PrivateSVC.load(tmp_path / "backup").n_rows_ == 70  # goes on as a second release


def test_a_stream_that_was_loaded_again_ends_where_it_was(tmp_path: Path) -> None:
    x, y = table()
    model = PrivateSVC(classes=[0, 1], batch_size=50, **QUICK)
    model.partial_fit(x[:70], y[:70]).save(tmp_path / "s")
    again = PrivateSVC.load(tmp_path / "s")
    with pytest.raises(NoshuffleError, match="closed; open it again"):
        model.partial_fit(x[70:100], y[70:100])
    assert again.partial_fit(x[70:100], y[70:100]).n_rows_ == 100


def test_two_continuations_of_a_copy_have_independent_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloned disk: the same rows again, and the difference is that of two draws of noise."""
    means: list[Any] = []
    update = LinearRule.update

    def spy(self: Any, mean: Any, *, step: int) -> None:
        means.append(np.array(mean))
        update(self, mean, step=step)

    monkeypatch.setattr(LinearRule, "update", spy)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(100, 4000)), rng.integers(2, size=100)
    model = PrivateLogisticRegression(
        classes=[0, 1], horizon=100, batch_size=25, mechanism="identity", fit_intercept=False
    )
    model.partial_fit(x[:25], y[:25]).save(tmp_path / "s")
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    for folder in ("s", "copy"):
        again = PrivateLogisticRegression.load(tmp_path / folder)
        again.partial_fit(x[25:50], y[25:50])
    first, second = (mean[:4000] for mean in means[-2:])
    scale = model.plan_.noise_multiplier / 25
    # Six deviations of an estimated one; nothing cancels, and the noise is not smaller either.
    assert abs(np.std(first - second) / (math.sqrt(2) * scale) - 1) < 6 / math.sqrt(2 * 4000)


def test_a_later_save_moves_the_point_of_return(tmp_path: Path) -> None:
    x, y = table()
    model = PrivateSVC(classes=[0, 1], batch_size=50, **QUICK)
    straight = clone(model).partial_fit(x[:420], y[:420])
    model.partial_fit(x[:70], y[:70]).save(tmp_path / "s")
    model.partial_fit(x[70:330], y[70:330]).save(tmp_path / "s")
    del model
    again = PrivateSVC.load(tmp_path / "s")
    assert again.n_rows_ == 330
    again.partial_fit(x[330:420], y[330:420])
    np.testing.assert_allclose(again.coef_, straight.coef_, rtol=1e-9)


def test_sparse_streams(tmp_path: Path) -> None:
    x, y = table(600)
    rows = sparse.csr_array(np.where(np.abs(x) > 1, x, 0.0))
    model = PrivateLogisticRegression(classes=[0, 1], batch_size=50, **QUICK)
    straight = clone(model).partial_fit(rows, y)
    model.partial_fit(rows[:120], y[:120]).save(tmp_path / "s")
    del model
    twin = PrivateLogisticRegression.load(tmp_path / "s")
    twin.partial_fit(rows[120:600], y[120:600])
    np.testing.assert_allclose(twin.coef_, straight.coef_, rtol=1e-9)


def test_copies_go_on_and_wrong_folders_are_refused(tmp_path: Path) -> None:
    x, y = table()
    model = PrivateSVC(classes=[0, 1], **QUICK).partial_fit(x[:200], y[:200])
    model.save(tmp_path / "s")
    assert (tmp_path / "s" / "stream.pt").stat().st_mode & 0o077 == 0
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    for _ in range(2):
        assert PrivateSVC.load(tmp_path / "copy").n_rows_ == 200
    with pytest.raises(InvalidInput, match="lives in"):
        model.save(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match="not an empty folder"):
        PrivateSVC(classes=[0, 1], **QUICK).fit(x, y).save(tmp_path / "s")
    with pytest.raises(InvalidInput, match="holds a PrivateSVC"):
        PrivateLogisticRegression.load(tmp_path / "s")
    with pytest.raises(InvalidInput, match="no saved stream"):
        PrivateSVC.load(tmp_path)
    with pytest.raises(InvalidInput, match="pickled or copied"):
        pickle.loads(pickle.dumps(model)).save(tmp_path / "p")


def test_a_pickle_holds_no_secret_and_names_the_way(tmp_path: Path) -> None:
    x, y = table(200)
    model = PrivateSVC(classes=[0, 1], mechanism="tree").partial_fit(x, y)
    data = pickle.dumps(model)
    secret = model._stream.release.secret
    assert secret not in data
    with pytest.raises(InvalidInput, match=r"use save\(folder\)"):
        pickle.loads(data).partial_fit(x, y)
    model.save(tmp_path / "s")
    for file in ("model.pkl", "stream.pt"):
        assert secret not in (tmp_path / "s" / file).read_bytes()


def test_another_process_goes_on(tmp_path: Path) -> None:
    x, y = table(1500)
    np.savez(tmp_path / "t.npz", x=x, y=y)
    model = PrivateLogisticRegression(classes=[0, 1], batch_size=25, **QUICK)
    model.partial_fit(x[:700], y[:700]).save(tmp_path / "s")
    del model  # a folder has one process at a time
    gc.collect()
    code = (
        "import numpy as np, sys\n"
        "from noshuffle.convex import PrivateLogisticRegression as P\n"
        "t = np.load(sys.argv[1] + '/t.npz')\n"
        "m = P.load(sys.argv[1] + '/s')\n"
        "m.partial_fit(t['x'][m.n_rows_:], t['y'][m.n_rows_:]).save(sys.argv[1] + '/s')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=900)
    back = PrivateLogisticRegression.load(tmp_path / "s")
    straight = PrivateLogisticRegression(classes=[0, 1], batch_size=25, **QUICK).partial_fit(x, y)
    np.testing.assert_array_equal(back.coef_, straight.coef_)
    assert back.privacy_ == straight.privacy_


def _in_fork(model: Any, x: Any, y: Any, queue: Any) -> None:
    try:
        model.partial_fit(x, y)
        queue.put("learned")
    except NoshuffleError as error:
        queue.put(str(error))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_may_not_go_on() -> None:
    x, y = table(200)
    model = PrivateSVC(classes=[0, 1], **QUICK).partial_fit(x[:100], y[:100])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_fork, args=(model, x[100:], y[100:], queue))
    child.start()
    told = queue.get(timeout=900)
    child.join()
    assert "fork" in told


def test_neighbours_that_shift_batches_are_refused() -> None:
    x, y = table(100)
    with pytest.raises(Unsupported, match="other batches"):
        PrivateSVC(neighbours="add-remove", **QUICK).fit(x, y)


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two threads in one sum at once could be added to it after its noise."""
    x, y = table(60)
    model, inside, most = PrivateLogisticRegression(classes=[0, 1], batch_size=10, **QUICK), 0, 0
    learn = type(model)._learn

    def slow(*args: Any, **options: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1
        learn(*args, **options)

    monkeypatch.setattr(type(model), "_learn", slow)
    with ThreadPoolExecutor(3) as pool:
        starts = (0, 20, 40)
        list(pool.map(lambda i: model.partial_fit(x[i : i + 20], y[i : i + 20]), starts))
    assert (most, model.n_rows_) == (1, 60)
    assert not any(name.startswith("_turn") for name in pickle.loads(pickle.dumps(model)).__dict__)


def test_a_stream_takes_the_run_folder_that_it_began_with_at_every_call(tmp_path: Path) -> None:
    x, y = table(60)
    model = PrivateLogisticRegression(classes=[0, 1], horizon=60, batch_size=20, **QUICK)
    for first in range(0, 60, 20):
        piece = slice(first, first + 20)
        model.partial_fit(x[piece], y[piece], run=tmp_path / "run")
        if first == 0:
            with pytest.raises(Unsupported, match="goes with the first partial_fit"):
                model.partial_fit(x[piece], y[piece], run=tmp_path / "other")
    assert verify(tmp_path / "run").released == 3


@pytest.mark.parametrize(
    "place",
    [
        "noshuffle.release.release.write_json",
        "noshuffle.release.log.Log.append",
        "noshuffle.release.release.Release.write_statement",
        "noshuffle.convex.saved.write_bytes",
        "noshuffle.convex.saved.write_stream",
    ],
)
@pytest.mark.parametrize("ids", [None, range(3000)])
def test_a_save_that_failed_loses_nothing(place: str, ids: Any, tmp_path: Path) -> None:
    """The stream goes on as if nobody had tried, and can be saved into the same folder."""
    x, y = table()

    def learn(model: Any, first: int, last: int) -> Any:
        own = None if ids is None else ids[first:last]
        return model.partial_fit(x[first:last], y[first:last], ids=own)

    make = PrivateLogisticRegression(classes=[0, 1], batch_size=30, bounds=(-3, 3), **QUICK)
    straight, model = learn(clone(make), 0, 500), learn(clone(make), 0, 500)
    for error in (OSError, KeyboardInterrupt):
        with mock.patch(place, side_effect=error), pytest.raises(error):
            model.save(tmp_path / "s")
        with pytest.raises(InvalidInput, match="no saved stream"):
            PrivateLogisticRegression.load(tmp_path / "s")
    for first, last in ((500, 731), (731, 1400)):  # a phase ends at 1024
        learn(straight, first, last)
        learn(model, first, last).save(tmp_path / "s")
    np.testing.assert_allclose(model.coef_, straight.coef_, rtol=1e-9)
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    other = PrivateLogisticRegression.load(tmp_path / "copy")
    np.testing.assert_array_equal(other.coef_, model.coef_)
    assert (other.n_steps_, other.n_rows_) == (straight.n_steps_, 1400)
    for phase, steps in ((1, 35), (2, 12)):
        found = verify(tmp_path / "s" / f"phase-{phase}")
        assert (found.refuted, found.released) == ((), steps)
    if ids is not None:
        with pytest.raises(ParticipationViolation, match="came twice"):
            learn(other, 20, 21)


def test_rows_that_were_summed_by_half_are_not_lost_in_silence(tmp_path: Path) -> None:
    x, y = table()
    model = PrivateLogisticRegression(classes=[0, 1], batch_size=30, **QUICK)
    model.partial_fit(x[:500], y[:500]).partial_fit(x[500:501], y[500:501])
    stopped = mock.patch.object(LinearRule, "clipped_sum", side_effect=KeyboardInterrupt)
    with stopped, pytest.raises(KeyboardInterrupt):
        model.save(tmp_path / "s")
    for act in (lambda: model.partial_fit(x[501:], y[501:]), lambda: model.save(tmp_path / "s")):
        with pytest.raises(InvalidInput, match="half-way"):
            act()
