"""The root has few names, all of them listed, all of them there."""

from __future__ import annotations

import noshuffle


def test_all_is_what_is_there() -> None:
    for name in noshuffle.__all__:
        assert getattr(noshuffle, name) is not None
    assert set(noshuffle.__all__) == set(noshuffle._HOMES)
    assert len(noshuffle.__all__) <= 20


def test_unknown_names_are_refused() -> None:
    assert not hasattr(noshuffle, "no_such_name")


def test_dir_lists_public_names() -> None:
    assert set(noshuffle.__all__) <= set(dir(noshuffle))
