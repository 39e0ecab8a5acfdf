"""The C loop: clean, equal to torch, found where it was built, and left out where it was not."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.noise.texts import built, needs_compiler, text

from noshuffle import c_library
from noshuffle.c_library import SOURCES, build, library_name, load, together
from noshuffle.noise import c_step
from noshuffle.noise import gaussian as constants


@needs_compiler
@pytest.mark.parametrize("is_portable", [False, True])
def test_what_is_built_here_agrees_with_its_twin(tmp_path: Path, is_portable: bool) -> None:
    """One that did not would be left aside without a word, and its tests be skipped."""
    library = load(build(tmp_path, is_portable=is_portable).parent)  # type: ignore[union-attr]
    assert library is not None
    assert c_step.agrees(library)


@needs_compiler
def test_a_library_of_another_text_is_not_found(tmp_path: Path) -> None:
    first = build(tmp_path / "built")
    assert first is not None
    shutil.copytree(SOURCES, tmp_path / "native", ignore=shutil.ignore_patterns("built"))
    (tmp_path / "native" / "aes.h").write_text(text() + "\n/* changed */")
    assert library_name(tmp_path / "native") != library_name() == first.name
    (tmp_path / "built" / "noise-of-an-older-text.so").touch()
    assert build(tmp_path / "built") == first
    assert list((tmp_path / "built").iterdir()) == [first]


@needs_compiler
def test_it_is_left_out_where_it_is_missing_damaged_or_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(tmp_path) is None
    made = build(tmp_path)
    assert made is not None
    assert load(tmp_path) is not None
    monkeypatch.setenv("NOSHUFFLE_NATIVE", "off")
    assert load(tmp_path) is None
    monkeypatch.delenv("NOSHUFFLE_NATIVE")
    other = tmp_path / "damaged"
    other.mkdir()
    (other / made.name).write_bytes(b"\x7fELF nonsense")
    assert load(other) is None


def test_without_a_compiler_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert build(tmp_path) is None


@needs_compiler
def test_a_text_that_is_no_c_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "noise.c").write_text("not C")
    assert build(tmp_path / "built", sources=tmp_path) is None
    assert not list((tmp_path / "built").iterdir())


def test_noise_is_the_same_without_it() -> None:
    """In a process that finds none, and says nothing of it."""
    code = """
import sys
from pathlib import Path
from noshuffle import c_library
c_library.load.__defaults__ = (Path("nowhere"),) if sys.argv[1] == "none" else (c_library.BUILT,)
import torch
from noshuffle.noise import NoiseStream, c_step, test_source
from noshuffle.strategies.recipe import FeedForward
recipe, shapes = FeedForward((1.0, -1.0)), {"w": (5000,)}
stream = NoiseStream(recipe, test_source(seed=1), shapes, scale=1.0, steps=2)
assert sys.argv[1] == "some" or c_step.library() is None
value = torch.zeros(5000)
stream.add_({"w": value}), stream.add_({"w": value})
print(value.double().abs().sum().item().hex())
"""
    runs = [
        subprocess.run([sys.executable, "-c", code, which], capture_output=True, text=True)
        for which in ("none", "some")
    ]
    assert runs[0].stdout == runs[1].stdout != "", runs[0].stderr + runs[1].stderr
    assert runs[0].stderr == ""


@needs_compiler
@pytest.mark.parametrize("processor", [["-march=native"], ["-march=x86-64-v3", "-maes"], []])
def test_files_compile_without_a_warning(processor: list[str]) -> None:
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *processor]
    command = ["cc", *flags, str(SOURCES / "noise.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    if processor and ("unrecognized" in done.stderr or "bad value" in done.stderr):
        pytest.skip("this compiler has no such flag")
    assert not done.returncode, done.stderr


def test_constants_of_the_noise_are_those_of_python() -> None:
    header = (SOURCES / "noise_constants.h").read_text(encoding="utf-8")
    found = dict(re.findall(r"^#define (\w+) \(?([^\s)]+.*?)\)?$", header, re.M))
    reals = {"LN2": constants.LN2, "SPREAD": constants.SPREAD, "BASE": constants.BASE}
    for name in ("SINE", "COSINE", "LOG"):
        reals |= {f"{name}{i}": c for i, c in enumerate(getattr(constants, name))}
    for name, value in reals.items():
        assert float.fromhex(found[name].rstrip("f")) == value
        assert np.float32(value) == value
    assert len([name for name in found if name.startswith(("SINE", "COSINE", "LOG"))]) == 18
    whole = ("TILE", "SHIFT_DIGITS", "SHIFT_ONES", "RADIUS_DIGITS", "ANGLE_DIGITS", "MIDDLE_DIGIT")
    for name in whole:
        assert int(found[name], 0) == getattr(constants, name)
    assert int(found["SCATTER"].rstrip("u"), 0) == constants.SCATTER % 2**32
    assert found["HALF"] == "TILE / 2"
    assert constants.TILE == 2 * constants.HALF


@needs_compiler
@pytest.mark.parametrize("has_team", [True, False])
def test_all_threads_work_on_one_job(
    tmp_path: Path, has_team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Job(ctypes.Structure):
        _fields_ = (("done", ctypes.c_int64),)

    if not has_team:
        monkeypatch.setattr(c_library, "_openmp", lambda: None)
    add = "#include <stdint.h>\nvoid add(int64_t *n) { __atomic_fetch_add(n, 1, 0); }"
    worker, job = built(tmp_path, add).add, Job()
    worker.argtypes, worker.restype = [ctypes.c_void_p], None
    for threads in (1, 3):
        together(worker, job, threads=threads)
    assert job.done == 4


@pytest.mark.slow
@needs_compiler
def test_the_loop_does_nothing_undefined(tmp_path: Path) -> None:
    """Built to stop at the first overflow, bad shift or null, it still agrees with its twin."""
    flags = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
    assert c_step.agrees(built(tmp_path, text(), flags=flags))
