"""Write the golden values: `python -m tests.golden.write [SECTION...]`, from the repository root.

They hold today's numbers over a rewrite: ε of plans, clipped sums, noise, estimators, solvers and
the JSON of commands, read through public names only. A value may change only in a commit that says
why the new one is right.
"""

from __future__ import annotations

import json
import sys
import time

from tests.golden.entries import FOLDER, SECTIONS, plain, section

from noshuffle import NoshuffleError


def write(name: str) -> None:
    """Compute one section and write its file. What the library refuses has no value."""
    began, values = time.perf_counter(), {}
    for entry, how in section(name).items():
        try:
            values[entry] = plain(how.compute())
        except NoshuffleError as refusal:
            print(f"  {name}: {entry}: {type(refusal).__name__}: {refusal}", file=sys.stderr)
    lines = (f"{json.dumps(key)}:{_short(value)}" for key, value in values.items())
    path = FOLDER / f"{name}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf8")
    size, spent = path.stat().st_size / 1024, time.perf_counter() - began
    print(f"{name}: {len(values)} values, {size:.0f} KiB, {spent:.1f} s")


def _short(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


if __name__ == "__main__":
    for name in sys.argv[1:] or SECTIONS:
        write(name)
