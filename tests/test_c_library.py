"""C files: clean, equal to their Python twins, built once, and loaded from safe folders only."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from noshuffle import c_library
from noshuffle.c_library import build, cache_folder, text_of
from noshuffle.noise import gaussian as constants
from noshuffle.noise import native

FILES = sorted((Path(c_library.__file__).parent / "native").glob("*.c"))
SEVEN = "int seven(void) { return 7; }"
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or bool(os.environ.get("NOSHUFFLE_NATIVE")),
    reason="no C compiler, or switched off",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("NOSHUFFLE_CACHE", str(cache))
    return cache


@needs_compiler
def test_without_a_compiler_the_libraries_of_the_wheel_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_library, "_SHIPPED", tmp_path)
    assert c_library.ship(tmp_path, {SEVEN: c_library.EXACT}) == 1
    monkeypatch.setattr(c_library, "_compiler", lambda: None)
    built = build(SEVEN)
    assert built is not None
    assert built.seven() == 7
    assert build(SEVEN, switch="off") is None
    assert build("int eight(void) { return 8; }") is None
    (tmp_path / c_library.shipped_name(SEVEN, ("-g",))).write_bytes(b"damaged")
    assert build(SEVEN, flags=("-g",)) is None


@needs_compiler
def test_all_are_built_before_they_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By texts that take no time: all C files of the package are those of the table."""
    assert set(c_library.SHIPPED_FLAGS) == {file.name for file in FILES}
    monkeypatch.setattr(c_library, "text_of", lambda name: f"{SEVEN} /* {name} */")
    assert c_library.prepare() == len(FILES)
    assert len(list(folder.glob("*.so"))) == len(FILES)
    monkeypatch.setattr(c_library, "_compiled", None)  # kept: none is compiled again
    assert c_library.prepare() == len(FILES)


def test_whoever_has_none_is_told_what_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSHUFFLE_NATIVE", "off")
    command = [sys.executable, "-m", "noshuffle.c_library"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.startswith(f"0 of {len(FILES)} C libraries are ready\nSlower forms stand in")


@needs_compiler
@pytest.mark.slow
def test_what_a_wheel_ships_is_what_is_asked_for_and_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built for any processor, every library is found by its user and equals its slow twin."""
    monkeypatch.setattr(c_library, "_SHIPPED", tmp_path)
    assert c_library.ship(tmp_path) == len(FILES) == len(c_library.SHIPPED_FLAGS)
    monkeypatch.setattr(c_library, "_compiler", lambda: None)
    native.library.cache_clear()
    assert native.library() is not None
    native.library.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were given to a compiler."""
    texts: list[str] = []
    real = c_library._compiled

    def noted(text: str, *rest: object) -> object:
        texts.append(text)
        return real(text, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(c_library, "_compiled", noted)
    return texts


def seven_of(library: ctypes.CDLL | None) -> int:
    assert library is not None
    return int(library.seven())


@needs_compiler
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("processor", [["-march=native"], []], ids=["native", "any"])
def test_files_compile_by_themselves_without_a_warning(path: Path, processor: list[str]) -> None:
    """As they lie there, as an editor or a sanitizer would compile them."""
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *processor]
    done = subprocess.run(["cc", *flags, str(path)], capture_output=True, text=True)
    if processor and "unrecognized" in done.stderr:
        pytest.skip("this compiler knows no -march=native")
    assert not done.returncode, done.stderr


def defined(name: str) -> dict[str, str]:
    """The plain numbers that a file defines."""
    return dict(re.findall(r"^#define (\w+) \(?([^\s)]+.*?)\)?\s*(?:/\*.*)?$", text_of(name), re.M))


def test_constants_of_the_noise_are_those_of_python() -> None:
    found = defined("noise_constants.h")
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
def test_a_library_is_built_once(folder: Path, compiled: list[str]) -> None:
    assert seven_of(build(SEVEN)) == seven_of(build(SEVEN)) == 7
    assert compiled == [SEVEN]
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    assert folder.stat().st_mode & 0o777 == 0o700
    code = (
        "from noshuffle import c_library; c_library._compiled = None; "
        f"print(c_library.build({SEVEN!r}).seven())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "7\n", done.stderr


@needs_compiler
def test_what_the_result_depends_on_is_in_its_name(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(SEVEN)
    build(SEVEN + "\n")
    build(SEVEN, flags=())
    for part in ("_version", "_processor"):
        with monkeypatch.context() as patch:
            patch.setattr(c_library, part, lambda *_: "another")
            build(SEVEN)
    assert len(compiled) == len(list(folder.iterdir())) == 5


@needs_compiler
def test_processes_may_build_at_once(folder: Path) -> None:
    code = f"from noshuffle import c_library; print(c_library.build({SEVEN!r}).seven())"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [process.communicate()[0] for process in started] == ["7\n"] * 4
    assert len(list(folder.iterdir())) == 1


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"\x7fELF nonsense"])
def test_a_damaged_library_is_built_again(
    folder: Path, compiled: list[str], content: bytes
) -> None:
    code = f"from noshuffle import c_library; print(c_library.build({SEVEN!r}).seven())"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    (kept,) = folder.iterdir()
    kept.write_bytes(content)
    assert seven_of(build(SEVEN)) == 7
    assert compiled == [SEVEN]
    assert kept.stat().st_size > 1000


@needs_compiler
@pytest.mark.parametrize("what", ["the folder", "a folder above", "the file", "the owner"])
def test_what_others_can_change_is_not_loaded(
    folder: Path, compiled: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(SEVEN)
    (kept,) = folder.iterdir()
    evil = folder / "evil.c"
    evil.write_text("int seven(void) { return 666; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(kept), str(evil)], check=True)
    planted = kept.read_bytes()
    if what == "the folder":
        folder.chmod(0o770)
    elif what == "a folder above":
        folder.parent.chmod(0o777)
    elif what == "the file":
        kept.chmod(0o666)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert (cache_folder() is None) is (what != "the file")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Path(path).read_bytes())
    loaded = build(SEVEN)
    assert isinstance(loaded, bytes)
    assert loaded != planted
    assert len(compiled) == 2
    folder.parent.chmod(0o700)


def test_a_folder_above_that_others_may_add_to_is_safe(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /tmp is: the sticky bit keeps others from renaming what is ours."""
    folder.parent.chmod(0o1777)
    assert cache_folder() == folder.resolve()
    folder.parent.chmod(0o700)


@needs_compiler
def test_without_a_folder_a_private_one_serves(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("NOSHUFFLE_CACHE", str(file / "below"))
    assert cache_folder() is None
    assert seven_of(build(SEVEN)) == seven_of(build(SEVEN)) == 7
    assert compiled == [SEVEN, SEVEN]


def test_the_users_cache_folder_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOSHUFFLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path.resolve() / "noshuffle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path.resolve() / ".cache" / "noshuffle"


@needs_compiler
def test_switched_off_nothing_is_built(folder: Path, compiled: list[str]) -> None:
    assert build(SEVEN, switch="off") is None
    assert build("not C") is None
    assert compiled == ["not C"]


@needs_compiler
def test_what_is_built_here_agrees_with_its_twin() -> None:
    """One that did not would be left aside without a word, and its tests be skipped."""
    assert native.library() is not None


@pytest.mark.slow
@needs_compiler
def test_the_loops_do_nothing_undefined(folder: Path) -> None:
    """Built to stop at the first overflow, bad shift or null, they still agree with their twins."""
    code = """
from noshuffle.c_library import build, text_of
from noshuffle.noise import native, whole_step

flags = ("-ffp-contract=off", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")
native.build = lambda text, flags=(), wanted=flags: build(text, flags=wanted)
found = native.build_loops(text_of("noise.c"))
if found is None:
    print("none")
else:
    native.library = lambda: found
    print(native.agrees(found), not native.has_aes() or whole_step.is_ready())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.stdout == "none\n":
        pytest.skip("this compiler has no sanitizer")
    assert done.stdout.split() == ["True"] * 2, (done.returncode, done.stderr)
