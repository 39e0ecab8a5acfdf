"""Another version of the project beside this one: every speed row of both, by turns.

    git worktree add ../before v0.1
    python benchmarks/against.py ../before                      the set for this machine
    python benchmarks/against.py ../before cpu --only step_cpu accounting
    python benchmarks/against.py ../before gpu --within 400 --write OUT.md

Each benchmark runs as a process of its own, the other version's script with the other version's
`src` and this one's with this one's, turn by turn and in changing order; peers are left out. Rows
are matched by table, name and column. What is compared is a time (a rate is turned into one) or a
memory, over that of plain training in the same process where the table has such a row. Before and
after are medians over the turns, and their quotient is the verdict: worse is more than 3 %. First
every benchmark has one turn, then a second; those with a row that is worse have further turns while
time is left, since the median of one turn on a shared machine is worth little. Rows of code that is
not ours (torch, NumPy) are not in the table; how far they are from 1 says how quiet the machine
was. The exit status is 1 if a row is worse.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import peers
from all import SHORTEST, hardware, has_gpu

HERE = Path(__file__).resolve().parents[1]
WORSE, TURNS = 1.03, 7
Row = tuple[str, str, str]  # title of the table, name, column
#: Modules that a benchmark finds absent here, so that it leaves its peers out.
LEFT_OUT = ("opacus", "fastDP", "jax_privacy", "opake", "dp_accounting", "flwr", "pfl", "river")
LAUNCH = (
    f"import os, runpy, sys; sys.modules.update(dict.fromkeys({LEFT_OUT})); del sys.argv[0]; "
    "sys.path[0] = os.path.dirname(sys.argv[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
)
#: Rows of code that is the same on both sides.
OTHERS = re.compile(r"torch|numpy|plain|sgd|adamw|scikit", re.IGNORECASE)


@dataclass(frozen=True)
class Compared:
    """A benchmark, its columns that are compared, and the row whose value theirs are divided by."""

    script: str
    arguments: str
    quick: str
    columns: str
    base: str = ""
    has_titles: bool = True
    names: int = 1  # leading cells that name a row


CPU = (
    Compared("step_cpu", "--own", "cnn mlp --own --rounds 3", "ms a step", "SGD"),
    Compared("accounting", "", "--repeats 2", "median s", names=2),
    Compared("noise_cpu", "", "--numbers 1000000 --repeat 3", "ms, .*", has_titles=False),
    Compared("noise_peers", "", "--count 1000000", "ms"),
    Compared("convex_speed", "", "--rows 50000", "seconds"),
    Compared(
        "federated_speed",
        "--task digits --only ours --repeats 1",
        "--task digits --only ours --repeats 1 --rounds 6 --cohort 10",
        "rounds/s",
    ),
    Compared("step_cpu", "mlp --memory", "cnn --memory", "MB"),
)
GPU = (
    Compared(
        "step_gpu", "--rounds 7", "--rounds 3 --steps 20", "ms .*", "SGD, CUDA", has_titles=False
    ),
    Compared("noise_gpu", "--only speed --no-peers", "--only speed --no-peers", "ms"),
    Compared(
        "transformer_gpu",
        "--dtype bf16 tf32 --only private --rounds 3",
        "--dtype bf16 --only auto --rounds 3",
        "ms .*|GiB",
        "plain",
    ),
    Compared(
        "huggingface_gpu",
        "--models gpt2 --rounds 3",
        "--models gpt2 --dtypes bf16 --rounds 3",
        "ms .*|GiB",
        "plain",
    ),
    Compared(
        "transformer_gpu",
        "--dtype bf16 --optimizer adamw --only auto --rounds 3",
        "--dtype bf16 --optimizer adamw --only auto --rounds 3",
        "ms .*|GiB",
        "plain",
    ),
    Compared(
        "transformer_gpu",
        "--shape 1.3b --dtype bf16 --optimizer adamw --only auto --rounds 3",
        "--shape 1.3b --dtype bf16 --optimizer adamw --only auto --rounds 3",
        "ms .*|GiB",
        "plain",
    ),
    Compared("noise_gpu", "--only scaling", "--only scaling", r"ms|[\d,]+|step .*|eager|in a .*"),
)
SETS = {"cpu": CPU, "gpu": GPU}


def number(cell: str) -> float | None:
    """The first number of a cell: of "0.383 (0.380 to 0.386)" it is 0.383."""
    found = re.match(r"\d[\d,]*\.?\d*", cell)
    return float(found[0].replace(",", "")) if found else None


def tables(said: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, heads and rows of what was printed: Markdown, or columns two spaces apart."""
    lines = said.splitlines()
    text = title = ""
    heads: list[str] = []
    rows: list[list[str]] = []
    for line, below in zip(lines, [*lines[1:], ""]):
        is_markdown = line.startswith("|")
        parts = line.split("|")[1:-1] if is_markdown else re.split(r"\s{2,}", line.strip())
        cells = [part.strip() for part in parts]
        is_words = len(cells) > 3 and not any(map(number, cells))
        if below.startswith("|---") or (is_words and not is_markdown):
            if heads:
                yield title, heads, rows
            title, heads, rows = text, cells, []
            continue
        if len(cells) == len(heads):
            rows.append(cells)
        elif not is_markdown:
            text = line.strip() or text
    if heads:
        yield title, heads, rows


def readings(said: str, item: Compared) -> dict[Row, float]:
    """What a benchmark printed, over the value of its base row where it has one."""
    values: dict[Row, float] = {}
    for text, heads, rows in tables(said):
        title = re.split(r"[:;] ", text)[0] if item.has_titles else heads[0]
        columns = [i for i, head in enumerate(heads) if re.fullmatch(item.columns, head)]
        for i in columns:
            found = {" · ".join(row[: item.names]): number(row[i]) for row in rows}
            base = [v for n, v in found.items() if v and item.base and n.startswith(item.base)]
            for name, value in found.items():
                if not value or (item.base and not base):
                    continue
                scaled = 1e3 / value if heads[i].endswith("/s") else value
                if base and not OTHERS.match(name):
                    scaled /= base[0]
                values[title, name, heads[i] if len(columns) > 1 else ""] = scaled
    return values


@dataclass
class Side:
    """One version: its folder and, for every row, the values of all turns."""

    root: Path
    values: dict[Row, list[float]] = field(default_factory=dict)

    def turn(self, item: Compared, arguments: str, limit: float) -> str:
        """One run of a benchmark; the reason if it did not end well, else nothing."""
        path = self.root / "benchmarks" / f"{item.script}.py"
        env = peers.environment()
        rest = [p for p in env["PYTHONPATH"].split(os.pathsep) if p != str(HERE / "src")]
        env["PYTHONPATH"] = os.pathsep.join([str(self.root / "src"), *rest])
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LAUNCH, str(path), *arguments.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=self.root,
            start_new_session=True,
        ) as process:
            try:
                said, failed = process.communicate(timeout=limit)
                trouble = f"exit status {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                trouble = f"stopped after {limit:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
            if trouble.startswith("stopped"):
                said, failed = process.communicate()
        for name, value in readings(said, item).items():
            self.values.setdefault(name, []).append(value)
        return f"{trouble}: {' '.join(failed.split())[-300:]}" if trouble else ""


@dataclass
class Match:
    """A benchmark on both sides."""

    item: Compared
    arguments: str
    before: Side
    after: Side
    seconds: float = 0.0
    turns: int = 0
    trouble: str = ""

    def turn(self, limit: float) -> None:
        begin = time.perf_counter()
        order = (self.before, self.after) if self.turns % 2 == 0 else (self.after, self.before)
        for side in order:
            trouble = side.turn(self.item, self.arguments, limit - (time.perf_counter() - begin))
            if trouble:
                self.trouble = f"{side.root.name}: {trouble}"
        self.seconds, self.turns = time.perf_counter() - begin, self.turns + 1

    def rows(self, *, is_ours: bool) -> dict[Row, tuple[float, float]]:
        """Row → medians before and after, of those that both sides have."""
        both = [name for name in self.before.values if name in self.after.values]
        own = [name for name in both if bool(OTHERS.match(name[1])) != is_ours]
        middle = statistics.median
        return {n: (middle(self.before.values[n]), middle(self.after.values[n])) for n in own}

    @property
    def is_worse(self) -> bool:
        return any(new > WORSE * old for old, new in self.rows(is_ours=True).values())

    def text(self) -> str:
        unit = f", × {self.item.base}…" if self.item.base else ""
        command = f"benchmarks/{self.item.script}.py {self.arguments}".strip()
        lines = [f"`{command}` ({self.turns} turns of {self.seconds:.0f} s{unit})", ""]
        if self.trouble:
            lines += [f"**Not finished.** {self.trouble}", ""]
        lines += [
            "| row | before | after | after ÷ before | turns | |",
            "|---|---|---|---|---|---|",
        ]
        for name, (old, new) in self.rows(is_ours=True).items():
            pairs = [b / a for a, b in zip(self.before.values[name], self.after.values[name])]
            verdict = (
                "**worse**" if new > WORSE * old else "better" if new < old / WORSE else "same"
            )
            shown = " · ".join(filter(None, name))
            spread = f"{min(pairs):.2f} to {max(pairs):.2f}"
            lines.append(
                f"| {shown} | {old:.4g} | {new:.4g} | {new / old:.3f} | {spread} | {verdict} |"
            )
        return "\n".join(lines)


def play(matches: list[Match], within: float, most: int) -> Iterator[Match]:
    """A turn each, a second, worse ones first, and more for those while time is left."""
    begin = time.perf_counter()
    for turn in range(most):
        for match in sorted(matches, key=lambda match: not match.is_worse):
            left = within - (time.perf_counter() - begin)
            needs = max(1.1 * match.seconds, SHORTEST)
            if needs > left or (turn > 1 and not match.is_worse):
                continue
            match.turn(left)
            yield match


def document(matches: list[Match]) -> tuple[str, int]:
    """The tables of all benchmarks, and how many rows are worse."""
    parts = [match.text() for match in matches if match.turns]
    for is_ours, words in ((False, "The same code on both sides"), (True, "Ours")):
        pairs = [pair for match in matches for pair in match.rows(is_ours=is_ours).values()]
        ratios = [new / old for old, new in pairs]
        if ratios:
            parts.append(
                f"{words}: {len(ratios)} rows, after ÷ before {min(ratios):.3f} to "
                f"{max(ratios):.3f}, median {statistics.median(ratios):.3f}."
            )
    worse = sum(ratio > WORSE for ratio in ratios)
    parts.append(f"{worse} of {len(ratios)} rows are worse by more than {WORSE - 1:.0%}.")
    return "\n\n".join(parts) + "\n", worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="folder of the other version")
    parser.add_argument("set", nargs="?", choices=tuple(SETS), help="gpu if there is one, else cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of benchmark files")
    parser.add_argument("--within", type=float, default=86400.0, metavar="S", help="seconds")
    parser.add_argument("--turns", type=int, default=TURNS, help="most turns of a benchmark")
    parser.add_argument("--write", type=Path, metavar="PATH", help="also keep the table there")
    options = parser.parse_args()
    if not (options.before / "benchmarks").is_dir():
        parser.error(f"expected a checkout with benchmarks/, got {options.before}")
    jobs = SETS[options.set or ("gpu" if has_gpu() else "cpu")]
    known = {item.script for item in jobs}
    if unknown := set(options.only or ()) - known:
        parser.error(f"no such benchmark: {sorted(unknown)}; there are {sorted(known)}")
    chosen = [item for item in jobs if not options.only or item.script in options.only]
    sides = options.before.resolve(), HERE
    matches = [
        Match(item, item.quick if options.quick else item.arguments, *map(Side, sides))
        for item in chosen
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what runs, too
    head = f"{hardware()}\n\n"
    for match in play(matches, options.within, options.turns):
        print(f"{match.item.script}: turn {match.turns}, {match.seconds:.0f} s", flush=True)
        if options.write:
            options.write.write_text(head + document(matches)[0], encoding="utf-8")
    text, worse = document(matches)
    print(f"\n{head}{text}")
    sys.exit(1 if worse or any(m.trouble or not m.turns for m in matches) else 0)


if __name__ == "__main__":
    main()
