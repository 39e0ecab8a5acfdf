"""Samplers: distribution, determinism, secrecy of steps, natural order."""

from __future__ import annotations

import os

import numpy as np
import pytest

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.release.keys import Keys
from noshuffle.release.sampler import AHEAD, Sampler, in_order

KEY = b"0123456789abcdef" * 2


def sampler_of(participation, population=None, *, key=KEY):
    return Sampler(participation, key_fn=lambda _: key, population=population)


def test_poisson_rate_and_independence():
    sampler = sampler_of(Poisson(steps=400, rate=0.03), 1000)
    hits = np.zeros((400, 1000))
    for t, ids in enumerate(sampler):
        hits[t, ids] = 1
    std = np.sqrt(0.03 * 0.97 / hits.size)
    assert abs(hits.mean() - 0.03) < 5 * std
    columns = hits.sum(0)  # binomial(400, 0.03) per example
    assert abs(columns.var() / (400 * 0.03 * 0.97) - 1) < 0.25
    overlap = (hits[1:] * hits[:-1]).sum() / hits[1:].size
    assert abs(overlap - 0.03**2) < 5 * np.sqrt(0.03**2 / hits[1:].size)


def test_fixed_size_is_uniform_without_replacement():
    sampler = sampler_of(FixedSize(steps=3000, batch=3, population=8))
    counts, pairs = np.zeros(8), np.zeros((8, 8))
    for ids in sampler:
        assert len(set(ids.tolist())) == 3
        counts[ids] += 1
        pairs[np.ix_(ids, ids)] += 1
    assert np.abs(counts / 3000 - 3 / 8).max() < 5 * np.sqrt(3 / 8 * 5 / 8 / 3000)
    off = pairs[~np.eye(8, dtype=bool)] / 3000
    assert np.abs(off - 3 * 2 / (8 * 7)).max() < 5 * np.sqrt(0.107 * 0.893 / 3000)


def test_groups_take_turns():
    sampler = sampler_of(CyclicPoisson(steps=600, groups=3, rate=0.2), 100)
    hits = np.zeros((600, 100))
    for t, ids in enumerate(sampler):
        assert (ids % 3 == t % 3).all()
        hits[t, ids] = 1
    turns = np.array([hits[i % 3 :: 3, i] for i in range(100)])  # the turns of every unit
    assert turns.shape == (100, 200)
    assert abs(turns.mean() - 0.2) < 5 * np.sqrt(0.16 / turns.size)
    overlap = (turns[:, 1:] * turns[:, :-1]).mean()
    assert abs(overlap - 0.04) < 5 * np.sqrt(0.04 / turns.size)
    with pytest.raises(InvalidInput, match="at least one a group"):
        sampler_of(CyclicPoisson(steps=6, groups=3, rate=0.2), 2)


def test_positions_are_uniform_and_stay():
    part = BallsInBins(epochs=2, steps_per_epoch=7)
    sampler = sampler_of(part, 70_000, key=os.urandom(32))
    batches = list(sampler)
    assert np.array_equal(np.sort(np.concatenate(batches[:7])), np.arange(70_000))
    assert all(np.array_equal(batches[t], batches[t + 7]) for t in range(7))
    sizes = np.array([len(batch) for batch in batches[:7]])
    assert ((sizes - 10_000) ** 2 / 10_000).sum() < 40  # χ² with six degrees of freedom
    seen = np.empty(70_000)
    for position, batch in enumerate(batches[:7]):
        seen[batch] = position
    assert abs(np.mean(seen[1:] == seen[:-1]) - 1 / 7) < 5 * np.sqrt(6 / 49 / 70_000)


def test_cut_batches_keep_a_uniform_subset():
    part = TruncatedPoisson(steps=3000, rate=0.5, cap=6, population=10)
    plain = sampler_of(Poisson(steps=3000, rate=0.5), 10)
    sampler, counts, cut = sampler_of(part), np.zeros(10), 0
    for step, ids in enumerate(sampler):
        before = plain.draw(step)  # the same words: the cut only leaves units out
        assert len(ids) == min(6, len(before))
        assert np.isin(ids, before).all()
        if len(before) > 6:
            cut += 1
            counts[ids] += 1
    assert abs(cut / 3000 - 0.171875) < 5 * np.sqrt(0.1424 / 3000)  # P(Binomial(10, ½) > 6)
    assert np.abs(counts / cut - 0.6).max() < 5 * np.sqrt(0.24 / cut)  # the first six: 1 and 0.3
    with pytest.raises(InvalidInput, match="samples from 10"):
        sampler_of(part, 9)
    of = TruncatedPoisson.of(steps=1, batch=100, population=10_000)
    assert (of.rate, of.cap, of.largest_draw) == (0.01, 150, 150)


def test_draws_depend_on_key_and_step_only():
    a, b = (sampler_of(Poisson(steps=10, rate=0.5), 64) for _ in range(2))
    c = sampler_of(Poisson(steps=10, rate=0.5), 64, key=os.urandom(32))
    list(a)
    assert all(np.array_equal(a.draw(t), b.draw(t)) for t in range(10))
    assert not np.array_equal(a.draw(0), a.draw(1))
    assert not np.array_equal(a.draw(0), c.draw(0))
    a.start = 7
    assert len(a) == 3
    assert np.array_equal(next(iter(a)), b.draw(7))
    assert KEY.hex() not in repr(a)
    assert str(KEY) not in repr(a)


def test_rate_one_is_everybody():
    assert len(sampler_of(Poisson(steps=2, rate=1.0), 9).draw(1)) == 9


def test_natural_order_drops_the_remainder():
    assert [b.tolist() for b in in_order(5, 2)] == [[0, 1], [2, 3]]
    assert [b.tolist() for b in in_order(2, 2)] == [[0, 1]]
    with pytest.raises(InvalidInput, match="at most the number of examples"):
        in_order(3, 4)


def test_make_sampler_refuses_what_makes_no_sense():
    with pytest.raises(Unsupported, match="not sampled"):
        sampler_of(Epochs(epochs=1, steps_per_epoch=2))
    with pytest.raises(InvalidInput, match="population"):
        sampler_of(Poisson(steps=1, rate=0.5))
    with pytest.raises(InvalidInput, match="samples from 9"):
        sampler_of(FixedSize(steps=1, batch=2, population=9), 8)


def test_steps_not_yet_drawn_get_the_keys_of_the_new_process():
    """Draws of released steps come again, later ones are fresh in every continuation."""
    rule, keys = Poisson(steps=10, rate=0.5), Keys.new().started(step=0, row=0, nonce="first")
    one, two = (keys.started(step=4, row=4, nonce=nonce) for nonce in "ab")
    before, a, b = (Sampler(rule, key_fn=own.draw_key, population=64) for own in (keys, one, two))
    for t in range(4):
        assert np.array_equal(before.draw(t), a.draw(t))
        assert np.array_equal(before.draw(t), b.draw(t))
    for t in range(4, 10):
        assert not np.array_equal(a.draw(t), b.draw(t))
        assert not np.array_equal(a.draw(t), before.draw(t))


def test_the_guard_gets_what_was_drawn_whatever_a_loop_does_with_its_own(monkeypatch):
    """Remembered draws are those of a second draw, changed by nobody, and of the key in use."""
    keys, count = {"now": KEY}, []
    cipher = Sampler._cipher
    monkeypatch.setattr(Sampler, "_cipher", lambda *a: count.append(a[1]) or cipher(*a))
    rule = FixedSize(steps=99, batch=5, population=40)
    sampler, twin = Sampler(rule, key_fn=lambda _: keys["now"]), sampler_of(rule)
    for step, own in enumerate(sampler):
        own[:] = 0
        if step < 3:
            assert np.array_equal(sampler.draw(step), twin.draw(step))
    assert count.count(98) == 1
    assert np.array_equal(sampler.draw(98), twin.draw(98))
    assert AHEAD < 98
    assert np.array_equal(sampler.draw(0), twin.draw(0))  # forgotten long ago: drawn again
    keys["now"] = KEY[::-1]
    assert not np.array_equal(sampler.draw(98), twin.draw(98))
