"""The matrix: Pythons 3.11 to 3.14, torch from the oldest that is promised to the newest.

    nox                     every Python that is present, with the oldest and the newest torch
    nox -- tests            the same with the whole suite instead of the core
    nox -s mathematics      strategies and accounting alone, which need no torch
    nox -s wheel            builds a wheel, installs it without a compiler, and trains with it

A Python that is not there is skipped and named. Versions of everything else follow pyproject.toml.
"""

from __future__ import annotations

import nox

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
TORCH = {"oldest": "torch==2.6.*", "newest": "torch"}
#: The first torch that has wheels for a Python, where that is a later one.
FIRST = {"3.14": "torch==2.9.*"}
#: The core: plans, noise, clipping, evidence, training. A few minutes of one core for each cell.
CORE = (
    "tests/plan/test_plan.py",
    *(f"tests/noise/test_{name}.py" for name in ("source", "stream", "grid")),
    *(f"tests/clipping/test_{name}.py" for name in ("engines", "factors", "edges")),
    *(f"tests/release/test_{name}.py" for name in ("log", "release", "verify", "threshold")),
    *(f"tests/training/test_{name}.py" for name in ("private", "loop", "criterion")),
)

nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["tests"]


@nox.session(python=PYTHONS)
@nox.parametrize("torch", list(TORCH))
def tests(session: nox.Session, torch: str) -> None:
    wanted = TORCH[torch]
    session.install(FIRST.get(str(session.python), wanted) if torch == "oldest" else wanted)
    session.install("-e", ".[dev,federated]")
    session.run("python", "-m", "pytest", *(session.posargs or CORE))


@nox.session(python=PYTHONS)
def mathematics(session: nox.Session) -> None:
    """Without torch: the doctests of all that may not import it."""
    session.install("numpy", "scipy", "threadpoolctl", "pytest")
    session.install("--no-deps", "-e", ".")
    places = [f"src/noshuffle/{name}" for name in ("strategies", "accounting", "participation")]
    options = ("--doctest-modules", "--import-mode=importlib", "-c", "/dev/null", "--rootdir=.")
    session.run("python", "-m", "pytest", "-q", *options, *places)


@nox.session(python=PYTHONS[0])
def wheel(session: nox.Session) -> None:
    """A wheel from this checkout, tried where no compiler is found."""
    folder = session.create_tmp()
    session.run("python", "-m", "pip", "wheel", "--no-deps", "-w", folder, ".")
    session.install("--find-links", folder, "--pre", "noshuffle")
    session.run("noshuffle", "--version")
    session.run("noshuffle", "train", "--out", f"{folder}/run", env={"PATH": session.bin})
