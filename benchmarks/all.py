"""Every speed benchmark beside its peers, as one Markdown document.

    python benchmarks/all.py                        the set for this machine: gpu if there is one
    python benchmarks/all.py cpu --quick            smaller sizes, a few minutes
    python benchmarks/all.py gpu --write OUT.md     also keep the document
    python benchmarks/all.py gpu --within 500       stop starting rows after so many seconds
    python benchmarks/all.py --only noise_gpu step_gpu

Each benchmark is a process of its own that measures ours and the peers' rows together; what it
prints becomes a section under its command. One that is absent, fails or runs past its limit leaves
a line that says so, and the others go on; the last line counts them, and the exit status is 1 if
there were any. The document is written after every section, so that a run that is stopped keeps
what it has. The GPU set takes about ten minutes on an H200. Data sets are looked up in
`$NOSHUFFLE_DATA`, else downloaded where they are offered; a row whose data is not to be had is one
that did not finish. pfl runs in the environment of `$NOSHUFFLE_PFL_PYTHON`, if there
is one. Accuracy tables (`adult_table`, `flower_baseline`) train
models for minutes to hours and are not part of it. `against.py` puts the rows of another version
beside these.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import peers

HERE = Path(__file__).resolve().parent
#: A benchmark is not begun with less time than this, in seconds.
SHORTEST = 10


@dataclass(frozen=True)
class Job:
    """One benchmark: its file, its arguments, those of a quick run, and seconds it may take."""

    title: str
    script: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    limit: int = 300


def job(title: str, script: str, arguments: str = "", quick: str = "", limit: int = 300) -> Job:
    return Job(title, script, tuple(arguments.split()), tuple(quick.split()), limit)


CPU = (
    job("The private step", "step_cpu", "", "cnn mlp --rounds 5", 600),
    job(
        "Extra memory of the private step", "step_cpu", "cnn mlp tlm --memory", "cnn --memory", 600
    ),
    job("Normals and noise", "noise_cpu", "--threads 1 2", "--numbers 1000000 --repeat 5"),
    job("Noise of a step beside peers", "noise_peers", "", "--count 1000000"),
    job(
        "Federated rounds, digits",
        "federated_speed",
        "--task digits",
        "--task digits --rounds 6 --repeats 1 --cohort 20",
        900,
    ),
    job(
        "Federated rounds, MNIST by writer",
        "federated_speed",
        "--task writers",
        "--task writers --rounds 6 --repeats 1 --cohort 20",
        900,
    ),
    job(
        "Federated rounds, Shakespeare by role",
        "federated_speed",
        "--task shakespeare --model lstm --repeats 1",
        "--task shakespeare --model lstm --repeats 1 --rounds 5 --cohort 10",
        1200,
    ),
    job("Accounting", "accounting"),
    job("Convex estimators", "convex_speed", "", "--rows 100000"),
)
GPU = (
    job("The private step", "step_gpu", "", "--rounds 5 --steps 20"),
    job("4,800 private steps on MNIST", "step_gpu", "--run"),
    job("Residual nets, ViT, users", "residual_gpu", "--peers", "wrn-16-4 500 --rounds 3", 600),
    job("Scaling along four axes", "scaling", "", "--most 2"),
    job("Fused noise", "noise_gpu", "", "--only speed --no-peers"),
    job(
        "GPT-2 small, SGD",
        "transformer_gpu",
        "--dtype bf16 tf32 --peers",
        "--dtype bf16 tf32 --rounds 3",
    ),
    job(
        "GPT-2 small, bf16, AdamW",
        "transformer_gpu",
        "--dtype bf16 --optimizer adamw",
        "--dtype bf16 --optimizer adamw --only private --rounds 3",
    ),
    job(
        "1.3 B parameters",
        "transformer_gpu",
        "--shape 1.3b --dtype bf16 --optimizer adamw --only private --rounds 5",
        "--shape 1.3b --dtype bf16 --optimizer adamw --only auto --rounds 3",
    ),
    job(
        "Hugging Face models, unedited",
        "huggingface_gpu",
        "--peers",
        "--dtypes bf16 --rounds 3",
    ),
)
SETS = {"cpu": CPU, "gpu": GPU}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def hardware() -> str:
    """Processor, cores, memory and GPU in one line."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), name)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{name}, {usable} cores"]
    if hasattr(os, "sysconf"):
        parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB")
    if has_gpu():
        import torch

        seen = torch.cuda.get_device_properties(0)
        size = seen.total_memory / 2**30
        parts.append(f"{torch.cuda.device_count()} × {seen.name}, {size:.0f} GiB")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def load() -> str:
    """How busy the machine was, since a shared one measures its neighbours too."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def section(item: Job, *, is_quick: bool, left: float) -> tuple[str, bool]:
    """Run one benchmark; its heading, command and output, and whether it came to its end."""
    path = HERE / f"{item.script}.py"
    arguments = item.quick if is_quick and item.quick else item.arguments
    shown = " ".join(("python", f"benchmarks/{path.name}", *arguments))
    head = f"## {item.title}\n\n`{shown}`"
    if not path.exists():
        return f"{head}\n\n**Not measured:** there is no {path.name} here.", False
    limit = int(min(item.limit, left))
    if limit < SHORTEST:
        return f"{head}\n\n**Not measured:** no time was left for it.", False
    before, begin = load(), time.perf_counter()
    with subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=peers.environment(),
        cwd=HERE.parent,
        start_new_session=True,
    ) as process:
        try:
            said, failed = process.communicate(timeout=limit)
            trouble = "" if process.returncode == 0 else f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
            said, failed = process.communicate()
            trouble = f"stopped after {limit} s"
    took = f"({time.perf_counter() - begin:.0f} s, load before {before})"
    text = f"{head} {took}\n\n{as_markdown(said)}"
    if trouble:
        reason = " ".join(failed.strip().splitlines()[-1:])
        text += f"\n\n**Not finished: {trouble}.** {reason[:400]}"
    return text, not trouble


def as_markdown(said: str) -> str:
    """Tables as they are, with a free line before each; anything else as it was printed."""
    said = said.strip("\n")
    if "|---" not in said:
        return f"```\n{said}\n```" if said else "(nothing was printed)"
    lines: list[str] = []
    for line in said.splitlines():
        was_table = bool(lines) and lines[-1].startswith("|")
        if lines and lines[-1] and was_table != line.startswith("|"):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def document(
    jobs: tuple[Job, ...], *, name: str, is_quick: bool, within: float
) -> Iterator[tuple[str, bool]]:
    """The parts of the document, each as soon as it is there, and whether it is complete."""
    begin = time.perf_counter()
    size = "quick sizes" if is_quick else "full sizes"
    today = datetime.datetime.now(tz=datetime.UTC).date()
    yield f"# Benchmarks, {name}, {size}\n\n{today} · {hardware()}\n\n{peers.table()}", True
    short: list[str] = []
    for item in jobs:
        left = within - (time.perf_counter() - begin)
        part, is_complete = section(item, is_quick=is_quick, left=left)
        short += [] if is_complete else [item.title]
        yield part, is_complete
    took = f"{time.perf_counter() - begin:.0f} s"
    end = f"All {len(jobs)} finished"
    if short:
        end = f"{len(short)} of {len(jobs)} did not finish ({'; '.join(short)})"
    yield f"{end}, {took} in all.", True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", nargs="?", choices=tuple(SETS), help="gpu if there is one, else cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of benchmark files")
    parser.add_argument("--within", type=float, default=math.inf, metavar="S", help="seconds")
    parser.add_argument("--write", type=Path, metavar="PATH", help="also keep the document there")
    options = parser.parse_args()
    name = options.set or ("gpu" if has_gpu() else "cpu")
    known = {item.script for item in SETS[name]}
    if unknown := set(options.only or ()) - known:
        parser.error(f"no such benchmark in {name}: {sorted(unknown)}; there are {sorted(known)}")
    jobs = tuple(j for j in SETS[name] if not options.only or j.script in options.only)
    done: list[str] = []
    is_whole = True
    options_of = {"is_quick": options.quick, "within": options.within}
    for part, is_complete in document(jobs, name=name, **options_of):
        print(part, end="\n\n", flush=True)
        done.append(part)
        is_whole = is_whole and is_complete
        if options.write:
            options.write.write_text("\n\n".join(done) + "\n", encoding="utf-8")
    sys.exit(0 if is_whole else 1)


if __name__ == "__main__":
    main()
